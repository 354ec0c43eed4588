"""Moves samples between data-parallel ranks: flat tensors, straight from the rank that has one to the one
that trains on it. Nothing is pickled and nobody receives what it does not need.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.errors import TrainingError
from megatron_rl.types import Sample

HEADER = 5
"""Integers that go ahead of a sample's tokens: sample_id, length, prompt_length, number of log-probs, of spans."""


def exchange_samples(
    local: Sequence[Sample],
    destination: Sequence[int],
    data_group: dist.ProcessGroup | None,
    device: torch.device | str = "cpu",
) -> list[Sample]:
    """Sends each sample to a rank and returns those sent here. All ranks of the group must call this.

    Three all-to-alls: how much, integers (int64), floats (fp32; every advantage is rounded to that).

    Args:
        local: this rank's samples, on the CPU; may be empty.
        destination: for each of them, a rank within the group.
        data_group: the data-parallel ranks; None is all ranks.
        device: where the tensors travel: the CPU for gloo, this rank's GPU for nccl.

    Returns:
        This rank's samples, on the CPU, in the order of ``sample_id``.

    Raises:
        TrainingError: a sample without a destination, or one that is not in the group.
    """
    num_ranks = dist.get_world_size(data_group)
    _check(local, destination, num_ranks)
    if num_ranks == 1:  # nothing travels; advantages are rounded as if they did
        return sorted((_rounded(sample) for sample in local), key=lambda sample: sample.sample_id)
    outgoing: list[list[Sample]] = [[] for _ in range(num_ranks)]
    for sample, rank in zip(local, destination, strict=True):
        outgoing[rank].append(sample)

    integers = [_integers(samples) for samples in outgoing]
    floats = [_floats(samples) for samples in outgoing]
    counts = torch.tensor(
        [(len(s), i.numel(), f.numel()) for s, i, f in zip(outgoing, integers, floats, strict=True)]
    )
    counts_here = _all_to_all(list(counts), [3] * num_ranks, data_group, device)

    num_samples, num_integers, num_floats = torch.stack(counts_here).t().tolist()
    integers_here = _all_to_all(integers, num_integers, data_group, device)
    floats_here = _all_to_all(floats, num_floats, data_group, device)
    received = [
        sample
        for count, ints, reals in zip(num_samples, integers_here, floats_here, strict=True)
        for sample in _samples(count, ints, reals)
    ]
    return sorted(received, key=lambda sample: sample.sample_id)


def _rounded(sample: Sample) -> Sample:
    rounded = ctypes.c_float(sample.advantage).value
    return sample if rounded == sample.advantage else replace(sample, advantage=rounded)


def _check(local: Sequence[Sample], destination: Sequence[int], num_ranks: int) -> None:
    if len(local) != len(destination):
        raise TrainingError(
            f"{len(local)} samples have {len(destination)} destinations; give each sample one"
        )
    for sample, rank in zip(local, destination, strict=True):
        if not 0 <= rank < num_ranks:
            raise TrainingError(
                f"sample {sample.sample_id} is to go to rank {rank} of a group of {num_ranks}; "
                "count ranks within the data-parallel group"
            )


def _integers(samples: Sequence[Sample]) -> Tensor:
    """All headers, then all spans, then all tokens: int64."""
    headers = [
        (
            *(sample.sample_id, sample.length, sample.prompt_length),
            *(sample.inference_logprobs.numel(), len(sample.environment_spans)),
        )
        for sample in samples
    ]
    spans = [span for sample in samples for span in sample.environment_spans]
    flat = [torch.tensor(rows, dtype=torch.int64).reshape(-1) for rows in (headers, spans)]
    return torch.cat([*flat, *(sample.token_ids for sample in samples)])


def _floats(samples: Sequence[Sample]) -> Tensor:
    """All advantages, then all log-probs: fp32."""
    advantages = torch.tensor([sample.advantage for sample in samples], dtype=torch.float32)
    return torch.cat([advantages, *(sample.inference_logprobs for sample in samples)])


def _samples(count: int, integers: Tensor, floats: Tensor) -> list[Sample]:
    """The inverse of ``_integers`` and ``_floats``."""
    headers = integers[: count * HEADER].reshape(count, HEADER).tolist()
    num_spans = [header[4] for header in headers]
    first_token = count * HEADER + 2 * sum(num_spans)
    spans = integers[count * HEADER : first_token].reshape(-1, 2).split(num_spans)
    tokens = integers[first_token:].split([header[1] for header in headers])
    logprobs = floats[count:].split([header[3] for header in headers])
    return [
        Sample(
            # Cloned: a view keeps the whole exchange in memory, and puts it into every checkpoint.
            token_ids=token_ids.clone(),
            prompt_length=prompt_length,
            advantage=advantage,
            inference_logprobs=inference_logprobs.clone(),
            sample_id=sample_id,
            environment_spans=tuple((start, end) for start, end in own_spans.tolist()),
        )
        for (sample_id, _, prompt_length, *_), token_ids, inference_logprobs, advantage, own_spans in zip(
            headers, tokens, logprobs, floats[:count].tolist(), spans, strict=True
        )
    ]


def _all_to_all(
    parts: Sequence[Tensor],
    sizes_here: Sequence[int],
    data_group: dist.ProcessGroup | None,
    device: torch.device | str,
) -> list[Tensor]:
    """Sends ``parts[r]`` to rank r; what came from each rank, on the CPU."""
    outgoing = torch.cat(list(parts)).to(device)
    incoming = outgoing.new_empty(sum(sizes_here))
    dist.all_to_all_single(
        incoming, outgoing, list(sizes_here), [part.numel() for part in parts], group=data_group
    )
    return list(incoming.cpu().split(list(sizes_here)))
