"""Assign samples to micro-batches and data-parallel ranks, and concatenate them."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from megatron_rl.algorithms.batch import SAMPLE_FIELDS, Packing, Sample, TokenBatch
from megatron_rl.errors import ConfigError, TrainingError


def balance(lengths: Sequence[int], num_ranks: int) -> list[int]:
    """Return the data-parallel rank of each sample, with about the same number of tokens on all ranks.

    Longest first, each sample goes to the rank with the fewest tokens so far (LPT: Graham, 1969). Ranks within 1 % of a
    rank's share count as equal; among them the one with the fewest samples gets it. Of 4,096 log-normal lengths on 64
    ranks the fullest rank is 0.4 % above its share, and all have 63 to 65 samples. Deterministic on all ranks.

    Returns:
        One rank per sample, in the order of ``lengths``; every rank occurs if there are enough samples.
    """
    tokens, samples = [0] * num_ranks, [0] * num_ranks
    tolerance = sum(lengths) / num_ranks / 100
    destination = [0] * len(lengths)
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        near = min(tokens) + tolerance
        rank = min((rank for rank in range(num_ranks) if tokens[rank] <= near), key=samples.__getitem__)
        destination[index] = rank
        tokens[rank] += lengths[index]
        samples[rank] += 1
    return destination


def pack(lengths: Sequence[int], capacity: int, seed: int = 0) -> list[list[int]]:
    """Pack best-fit decreasing: each sample, longest first, goes into the fullest bin with room for it.

    Needs at most 11/9 of the optimal number of bins plus 4 (Johnson, 1974); with hundreds of log-normal lengths bins
    are 98 to 99.9 % full. Bins are shuffled by ``seed``: otherwise all long samples would come first.

    Returns:
        Bins of at most ``capacity`` tokens as indices into ``lengths``; every index once, no empty bin.

    Raises:
        ConfigError: a sample is longer than a bin (names the first one).
    """
    for index, length in enumerate(lengths):
        if length > capacity:
            raise ConfigError([
                f"sample {index} has {length} tokens and a micro-batch holds {capacity}: sequences are never split; "
                f"raise the micro-batch's token limit to {length} or limit the length of completions"
            ])
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, bin), sorted
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        place = bisect.bisect_left(room, (lengths[index], 0))
        if place == len(room):
            free, chosen = capacity, len(bins)
            bins.append([])
        else:
            free, chosen = room.pop(place)
        bins[chosen].append(index)
        bisect.insort(room, (free - lengths[index], chosen))
    random.Random(seed).shuffle(bins)
    return bins


def prompt_pieces(
    lengths: Sequence[int], prompts: Sequence[tuple[int, int]], capacity: int
) -> tuple[list[list[int]], list[int]]:
    """Group samples with a common prompt: as many as fit ``capacity`` if the prompt is computed once.

    Args:
        lengths: tokens of each sample.
        prompts: (key, sharable tokens) of each sample's prompt.
        capacity: tokens.

    Returns:
        Indices into ``lengths``, each once; and the tokens of each set, at most ``capacity`` except for single samples.
    """
    pieces: list[list[int]] = []
    costs: list[int] = []
    open_pieces: dict[tuple[int, int], int] = {}
    for index, (length, prompt) in enumerate(zip(lengths, prompts, strict=True)):
        place = open_pieces.get(prompt)
        if place is not None and costs[place] + length - prompt[1] <= capacity:
            pieces[place].append(index)
            costs[place] += length - prompt[1]
            continue
        open_pieces[prompt] = len(pieces)
        pieces.append([index])
        costs.append(length)
    return pieces, costs


def prompt_of(sample: Sample) -> tuple[int, int]:
    """Return the key of a sample's prompt, and its number of sharable tokens: all but the last."""
    count = max(int(sample.loss_mask.long().argmax()) - 1, 0)
    digest = hashlib.blake2b(sample.token_ids[:count].numpy().tobytes(), digest_size=7).digest()
    return int.from_bytes(digest, "big"), count


def skipped_tokens(samples: Sequence[Sample]) -> list[int]:
    """Count the first tokens of each sample that need no computation: they and their next token equal the previous
    sample's.

    Tokens with other recorded experts differ.
    """
    skipped = [0]
    for before, sample in itertools.pairwise(samples):
        size = min(before.length, sample.length)
        same = before.token_ids[:size] == sample.token_ids[:size]
        if sample.routing is not None:
            same &= (before.routing[:size] == sample.routing[:size]).flatten(1).all(1)
        common = int(same.long().cumprod(0).sum())
        skipped.append(max(common - 1, 0))
    return skipped


def collate(
    samples: Sequence[Sample], device: torch.device | str, round_to: int = 1, skipped: Sequence[int] = ()
) -> TokenBatch:
    """Concatenate the samples in order and move them to the device once; see the example of `TokenBatch`.

    Args:
        samples: at least one, on the CPU.
        device: of the batch's tensors.
        round_to: pad T to a multiple of this (tensor-parallel size, longest micro-batch of a pipeline) by dummy
            sequences no longer than the samples; they are last in ``lengths`` and ``cu_seqlens`` and have no entry in
            ``samples.sample_id``.
        skipped: tokens of each sample that do not run through the model; T is the number of the others.

    Raises:
        TrainingError: a sample without a prompt: its first token has no log-prob.
    """
    for sample in samples:
        if sample.loss_mask[0]:
            raise TrainingError(
                f"sample {sample.sample_id} has no prompt: nothing precedes its first token; give it 1 token or more"
            )
    own = tuple(sample.length for sample in samples)
    padding = (sum(skipped) - sum(own)) % round_to
    whole, rest = divmod(padding, max(own))
    lengths = (*own, *[max(own)] * whole, *([rest] if rest else []))
    laid = _end_to_end(samples, padding, len(lengths) - len(own))
    per_sequence = torch.tensor(lengths)
    cu_seqlens = torch.nn.functional.pad(per_sequence.cumsum(0), (1, 0))
    index = torch.arange(len(lengths)).repeat_interleave(per_sequence)
    places = torch.arange(sum(lengths))
    ends = torch.zeros_like(per_sequence).scatter_reduce(0, index, places * laid.loss_mask, "amax")
    rewards = torch.zeros(sum(lengths))
    rewards[ends[: len(own)]] = laid.reward[: len(own)]
    packing = Packing(
        lengths=lengths, cu_seqlens=cu_seqlens.int(), position_ids=places - cu_seqlens[index], sequence_index=index
    )
    return TokenBatch(
        samples=_moved(laid, device),
        packing=_moved(packing, device),
        loss_mask=laid.loss_mask.float().to(device),
        rewards=torch.where(laid.loss_mask, rewards, 0.0).to(device),
        inference_logprobs=torch.where(laid.loss_mask, laid.inference_logprobs, 0.0).to(device),
    )


def _moved(record: Any, device: torch.device | str) -> Any:
    return replace(record, **{name: one.to(device) for name, one in vars(record).items() if torch.is_tensor(one)})


def _end_to_end(samples: Sequence[Sample], padding: int, dummies: int) -> Sample:
    """Concatenate each field as specified by its `Kind`, with ``padding`` tokens in ``dummies`` sequences."""
    laid: dict[str, Any] = {}
    for name, kind in SAMPLE_FIELDS.items():
        values = [getattr(sample, name) for sample in samples]
        if kind.on_host:
            laid[name] = tuple(values)
        elif not kind.per_token:
            laid[name] = torch.tensor(values + [0] * dummies, dtype=kind.dtype)
        elif values[0] is not None:
            filler = torch.iinfo(values[0].dtype).max if kind.padding is None else kind.padding
            laid[name] = torch.cat([*values, values[0].new_full((padding, *values[0].shape[1:]), filler)])
    return Sample(**laid)


def without_loss(batch: TokenBatch) -> TokenBatch:
    """Return a batch of the same size without effect on the loss."""
    nothing = torch.zeros_like(batch.loss_mask)
    samples = replace(batch.samples, sample_id=(), tokens_elsewhere=torch.zeros_like(batch.samples.tokens_elsewhere))
    return replace(batch, loss_mask=nothing, rewards=nothing, inference_logprobs=nothing, samples=samples)
