"""From values per token to one loss: weights and denominators that hold over micro-batches and ranks.

The trainer sums ``per_token * weights`` and the denominators over all micro-batches and data-parallel ranks
of a step and divides once. No micro-batch has a denominator of its own, so two micro-batches equal one.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megatron_rl.errors import ConfigError

Aggregation = Literal["token-mean", "sequence-mean", "constant"]


def token_weights(
    kind: Aggregation, loss_mask: Tensor, sequence_index: Tensor, num_sequences: int, constant: float
) -> tuple[Tensor, Tensor]:
    """Weights of the tokens and the denominator of their sum.

    =================  =================================  ============================================
    kind               weight of a loss token             denominator
    =================  =================================  ============================================
    ``token-mean``     1                                  number of loss tokens
    ``sequence-mean``  1 / loss tokens of its sequence    number of sequences with loss tokens
    ``constant``       1 / constant (Dr. GRPO)            number of sequences with loss tokens
    =================  =================================  ============================================

    Args:
        kind: the reduction.
        loss_mask: [T] fp32, after ``trusted_mask`` and before any rejection by a mismatch correction.
        sequence_index: [T] int64, as ``sequence_of_tokens`` makes it.
        num_sequences: host count of sequences, a padding sequence included; those without loss
            tokens count nowhere.
        constant: tokens; read by the kind ``constant`` alone. Dr. GRPO (arXiv 2503.20783) takes the length
            limit of completions.

    Returns:
        weights [T] fp32, 0 at masked positions, and the denominator, [] int64 on the same device: reading it
        on the host would wait for the device in every micro-batch.

    Raises:
        ConfigError: an unknown kind, or a constant that is not positive.
    """
    in_loss = loss_mask > 0
    lengths = _loss_tokens(loss_mask, sequence_index, num_sequences)
    if kind == "token-mean":
        return in_loss.float(), in_loss.sum()
    if kind == "sequence-mean":
        return torch.where(in_loss, 1 / lengths.clamp_min(1)[sequence_index], 0.0), (lengths > 0).sum()
    if kind == "constant":
        if not constant > 0:
            raise ConfigError(
                [f"the constant of the loss is {constant}: it divides every token; use a positive one"]
            )
        return in_loss.float() / constant, (lengths > 0).sum()
    raise ConfigError([f"there is no reduction '{kind}'; use token-mean, sequence-mean or constant"])


def trusted_mask(loss_mask: Tensor, *logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """Takes tokens with a non-finite log-prob out of the mask, and so out of every denominator.

    Set to 0 instead, such a token would count as one the policy was certain of.

    Args:
        loss_mask: [T] fp32.
        logprobs: any number of [T].

    Returns:
        mask [T] fp32, and how many loss tokens were dropped, [] int64 on the same device.
    """
    trusted = loss_mask > 0
    for values in logprobs:
        trusted = trusted & values.detach().isfinite()
    return trusted.float(), (loss_mask > 0).sum() - trusted.sum()


def sequence_of_tokens(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """The sequence of each packed token: ``[0, 3, 5]`` gives ``0 0 0 1 1``.

    Args:
        cu_seqlens: [B+1] int32 or int64.
        num_tokens: its last entry on the host, so that nothing waits for the device.

    Returns:
        [T] int64.
    """
    sequences = torch.arange(cu_seqlens.numel() - 1, device=cu_seqlens.device)
    return sequences.repeat_interleave(cu_seqlens.diff(), output_size=num_tokens)


def sequence_means(values: Tensor, loss_mask: Tensor, sequence_index: Tensor, num_sequences: int) -> Tensor:
    """Mean of ``values`` over the loss tokens of each sequence; 0 for a sequence without any.

    Args:
        values: [T] fp32, finite at loss tokens.
        loss_mask: [T] fp32.
        sequence_index: [T] int64.
        num_sequences: host count.

    Returns:
        [num_sequences] fp32.
    """
    # Summed in fp64: index_add adds in no fixed order on a GPU, and two runs would differ in fp32.
    known = torch.where(loss_mask > 0, values, 0.0).double()
    sums = known.new_zeros(num_sequences).index_add(0, sequence_index, known)
    return (sums / _loss_tokens(loss_mask, sequence_index, num_sequences).clamp_min(1)).float()


def _loss_tokens(loss_mask: Tensor, sequence_index: Tensor, num_sequences: int) -> Tensor:
    """Loss tokens of each sequence: [num_sequences] int64."""
    in_loss = (loss_mask > 0).long()
    return in_loss.new_zeros(num_sequences).index_add(0, sequence_index, in_loss)
