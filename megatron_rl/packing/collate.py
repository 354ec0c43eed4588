"""Samples to a packed micro-batch: sequences end to end, no padding between them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rl.errors import TrainingError
from megatron_rl.types import PackedBatch, Sample

PADDING_TOKEN = 0
"""Any id of the vocabulary does: padding is a sequence of its own without loss, seen by no other token."""


def collate(samples: Sequence[Sample], device: torch.device | str, round_to: int = 1) -> PackedBatch:
    """Lays the samples end to end, in their order, and moves them to the device once.

    With ``round_to=4``, two samples ``P0 A0 E`` and ``Q0 B0`` (``-`` is padding)::

        token_ids    P0 A0  E  Q0 B0  -  -  -
        position_ids  0  1  2   0  1  0  1  2
        cu_seqlens    0        3     5        8
        loss_mask     0  1  1   0  1  0  0  0

    Args:
        samples: at least one, on the CPU.
        device: where the tensors of the batch go.
        round_to: T becomes a multiple of this (tensor- and context-parallel size, kernel tiles) by a dummy
            sequence; it is the last of ``lengths`` and ``cu_seqlens`` and has no entry in ``sample_ids``.

    Raises:
        TrainingError: no samples, or one whose parts contradict each other; names it.
    """
    if not samples:
        raise TrainingError("a micro-batch needs at least one sample; leave empty bins out")
    for sample in samples:
        _check(sample)

    num_tokens = sum(sample.length for sample in samples)
    padding = -num_tokens % round_to
    lengths = tuple(sample.length for sample in samples) + ((padding,) if padding else ())
    prompt_lengths = [sample.prompt_length for sample in samples] + ([padding] if padding else [])
    advantages = [sample.advantage for sample in samples] + ([0.0] if padding else [])

    per_sequence = torch.tensor(lengths)
    cu_seqlens = torch.nn.functional.pad(per_sequence.cumsum(0), (1, 0))
    sequence = torch.arange(len(lengths)).repeat_interleave(per_sequence)
    position_ids = torch.arange(num_tokens + padding) - cu_seqlens[sequence]
    in_loss = position_ids >= torch.tensor(prompt_lengths)[sequence]
    for sample, first in zip(samples, cu_seqlens.tolist(), strict=False):  # the last border begins nothing
        for start, end in sample.environment_spans:
            in_loss[first + start : first + end] = False
    inference_logprobs = torch.cat(
        [_inference_logprobs(sample) for sample in samples] + [torch.zeros(padding)]
    )
    return PackedBatch(
        token_ids=_token_ids(samples, padding).to(device),
        position_ids=position_ids.to(device),
        cu_seqlens=cu_seqlens.int().to(device),
        lengths=lengths,
        loss_mask=in_loss.float().to(device),
        advantages=torch.tensor(advantages)[sequence].to(device),
        inference_logprobs=torch.where(in_loss, inference_logprobs, 0.0).to(device),
        sample_ids=tuple(sample.sample_id for sample in samples),
        num_loss_tokens=sum(sample.num_loss_tokens for sample in samples),
        padding=padding,
    )


def _token_ids(samples: Sequence[Sample], padding: int) -> Tensor:
    filler = torch.full((padding,), PADDING_TOKEN, dtype=torch.int64)
    return torch.cat([*(sample.token_ids for sample in samples), filler])


def _inference_logprobs(sample: Sample) -> Tensor:
    """[L] fp32; zeros for a supervised sample, which nothing sampled."""
    return sample.inference_logprobs if sample.inference_logprobs.numel() else torch.zeros(sample.length)


def _check(sample: Sample) -> None:
    if not 1 <= sample.prompt_length <= sample.length:
        raise TrainingError(
            f"sample {sample.sample_id} has a prompt of {sample.prompt_length} of {sample.length} tokens: "
            "the first token has no log-prob, nothing precedes it; give it a prompt of 1 token or more"
        )
    borders = [sample.prompt_length, *(border for span in sample.environment_spans for border in span), sample.length]
    if sorted(borders) != borders:
        raise TrainingError(
            f"sample {sample.sample_id} of {sample.length} tokens, {sample.prompt_length} of them the prompt, has the "
            f"environment's tokens at {sample.environment_spans}: spans must follow one another after the prompt"
        )
    if sample.inference_logprobs.numel() not in (0, sample.length):
        raise TrainingError(
            f"sample {sample.sample_id} has {sample.inference_logprobs.numel()} inference log-probs for "
            f"{sample.length} tokens: index t must belong to token t; pad the prompt with zeros"
        )
