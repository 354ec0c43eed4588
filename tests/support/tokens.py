"""Token batches made by hand, as losses, corrections and advantages see them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from megatron_rl.algorithms import StepRewards, TokenBatch
from megatron_rl.algorithms.batch import CriticValues, Packing, Sample
from megatron_rl.algorithms.extension import Composed, Function
from megatron_rl.algorithms.groups import informative_groups
from megatron_rl.registry import CORRECTIONS


def token_batch(
    sequence: Sequence[int] | torch.Tensor, mask: Sequence[float] | torch.Tensor, **further: Any
) -> TokenBatch:
    """Tokens of these sequences, numbered from 0 in their order; ``further`` fields of the batch or of its records."""
    sequence_index, loss_mask = torch.as_tensor(sequence).long(), torch.as_tensor(mask, dtype=torch.float32)
    lengths = [] if sequence_index.is_meta else torch.bincount(sequence_index).tolist()
    zeros = torch.zeros_like(sequence_index)
    of_sequences = zeros.new_zeros(len(further.get("lengths", lengths)))
    given: dict[str, Any] = {
        "loss_mask": loss_mask,
        "lengths": tuple(lengths),
        "sequence_index": sequence_index,
        "sample_id": tuple(range(len(lengths))),
        "token_ids": zeros,
        "position_ids": zeros,
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).int(),
        "rewards": zeros.float(),
        "inference_logprobs": zeros.float(),
        "versions": zeros,
        "reward": of_sequences.float(),
        "sequence": of_sequences,
        "tokens_elsewhere": of_sequences,
        "truncated": of_sequences.bool(),
    } | further

    def record(kind: type) -> Any:
        return kind(**{field.name: given[field.name] for field in fields(kind) if field.name in given})

    if "values" in given:
        given["critic"] = record(CriticValues)
    given |= {"packing": record(Packing), "samples": record(Sample)}
    return record(TokenBatch)


def changed(batch: TokenBatch, **values: Any) -> TokenBatch:
    """The batch with other values of its own fields and of those of its records."""
    own = {name: value for name, value in values.items() if name in vars(batch)}
    for name, kind in (("packing", Packing), ("samples", Sample), ("critic", CriticValues)):
        known = {field.name for field in fields(kind)}
        if inner := {one: value for one, value in values.items() if one not in own and one in known}:
            record = getattr(batch, name)
            own[name] = kind(**inner) if record is None else replace(record, **inner)
    return replace(batch, **own)


def padding_of(batch: TokenBatch) -> int:
    """Number of tokens of the dummy sequences."""
    return sum(batch.packing.lengths[len(batch.samples.sample_id) :])


def step_rewards(
    rewards: torch.Tensor,
    valid: torch.Tensor,
    group_index: torch.Tensor,
    baseline: str = "group",
    loss_tokens: torch.Tensor | None = None,
) -> StepRewards:
    """A step of these samples, of one token each unless said; those of groups without a signal are not in the loss."""
    signal = informative_groups(baseline, rewards, valid, group_index)
    loss_tokens = torch.ones_like(group_index) if loss_tokens is None else loss_tokens
    return StepRewards(rewards, valid, group_index, signal, valid & signal[group_index], loss_tokens)


def one_token_a_sample(step: StepRewards) -> TokenBatch:
    """All samples of the step in one batch, each of one token: an advantage of theirs is [N]."""
    count = step.rewards.numel()
    return token_batch(torch.arange(count), step.valid.float(), rewards=step.rewards, step=step)


def correction(name: str, **options: float) -> Function:
    """As ``--rl-correction`` has it; each part gets those of the options that it has."""
    parts = []
    for part in name.split("+"):
        found = CORRECTIONS.get(part)
        known = {field.name for field in fields(found)}
        parts.append(found(**{option: value for option, value in options.items() if option in known}))
    return parts[0] if len(parts) == 1 else Composed(tuple(parts))
