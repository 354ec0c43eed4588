"""The gated delta rule over concatenated sequences, and one decode step of it: plain torch, fp32.

    S <- exp(g) S;   S <- S + b k (v - S^T k)^T;   output = S^T q          S [key width, value width] per value head

A sequence is cut into chunks. The interactions within a chunk are a triangular system, solved for all chunks of all
sequences at once (Yang et al., 2024, https://arxiv.org/abs/2412.06464); then states pass from chunk to chunk, one step
for all sequences that have another::

    lengths 5, 9, 2, chunks of 4     step 0: [b0 a0 c0]  step 1: [b1 a1]  step 2: [b2]      the longest sequence first
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as functional

from megatron_rl.platform.device import to_device

LONGEST_CHUNK, SHORTEST_CHUNK = 64, 16
_EPSILON = 1e-6
"""Lower bound in the normalisation of queries and keys."""


class DeltaInputs(NamedTuple):
    """Inputs of the delta rule for T tokens, after the convolution."""

    query: torch.Tensor
    """[T, key heads, key width], of norm 1 / sqrt(key width)."""
    key: torch.Tensor
    """[T, key heads, key width], of norm 1."""
    value: torch.Tensor
    """[T, value heads, value width]; groups of value heads share a key head."""
    strength: torch.Tensor
    """``b``: [T, value heads], between 0 and 1."""
    decay: torch.Tensor
    """``g``: [T, value heads], at most 0."""


@dataclass(frozen=True)
class Chunks:
    """Index maps between a packed batch, its chunks, and the input line of the convolution."""

    active: tuple[int, ...]
    """Number of sequences in each step; chunks are stored step by step."""
    tokens: torch.Tensor
    """[chunks, size] int64: the token of each cell, 0 in empty cells."""
    is_token: torch.Tensor
    """[chunks, size] bool."""
    cell: torch.Tensor
    """[T] int64: cell of each token."""
    order: torch.Tensor
    """[B] int64: sequences by descending length."""
    place: torch.Tensor
    """[B] int64: rank of each sequence in that order."""
    line: torch.Tensor
    """[T + B taps] int64: each sequence's past, then its tokens; tokens are numbered from B taps on."""
    on_line: torch.Tensor
    """[T] int64: position of each token on the line."""
    ends: torch.Tensor
    """[B, taps] int64: the last positions of each sequence on the line."""

    @classmethod
    def of(cls, lengths: Sequence[int], taps: int, device: torch.device) -> Chunks:
        """Build the maps; each sequence is preceded by ``taps`` past tokens. No host read."""
        longest = max(lengths)
        size = LONGEST_CHUNK if longest >= LONGEST_CHUNK else max(SHORTEST_CHUNK, 1 << (longest - 1).bit_length())
        order = sorted(range(len(lengths)), key=lambda sequence: -lengths[sequence])
        starts = [0, *accumulate(lengths)]
        steps = range(-(-longest // size))
        active = tuple(sum(length > step * size for length in lengths) for step in steps)
        chunks = [(sequence, step) for step in steps for sequence in order[: active[step]]]
        first = torch.tensor([starts[sequence] + step * size for sequence, step in chunks])
        end = torch.tensor([starts[sequence + 1] for sequence, _ in chunks])
        tokens = first[:, None] + torch.arange(size)
        is_token = tokens < end[:, None]
        cell = torch.empty(starts[-1], dtype=torch.int64)
        cell[tokens[is_token]] = is_token.flatten().nonzero()[:, 0]
        rank = torch.tensor(order)
        before = len(lengths) * taps
        on_line = torch.arange(starts[-1]) + taps * (
            torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)) + 1
        )
        line = torch.empty(starts[-1] + before, dtype=torch.int64)
        line[on_line] = torch.arange(starts[-1]) + before
        ends = torch.tensor(starts[1:]) + taps * torch.arange(1, len(lengths) + 1)
        past = torch.tensor(starts[:-1])[:, None] + taps * torch.arange(len(lengths))[:, None] + torch.arange(taps)
        line[past.flatten()] = torch.arange(before)
        found = (
            tokens.where(is_token, 0), is_token, cell, rank, rank.argsort(), line, on_line,
            ends[:, None] - taps + torch.arange(taps),
        )  # fmt: skip
        return cls(active, *(to_device(one, device, one.dtype) for one in found))


@dataclass(frozen=True)
class LayerStates:
    """Recurrent states that a layer reads and writes in one forward pass."""

    past: torch.Tensor | None
    """[N, taps, channels]: views of the first rows in a decode step; None for prompts from their beginning."""
    memory: torch.Tensor | None
    """[N, heads, key width, value width] fp32, likewise."""
    alive: torch.Tensor
    """[N] bool, in a decode step: rows whose states may change."""
    chunks: Chunks | None
    """For prompts; None in a decode step."""
    rows: torch.Tensor | None
    """[N], for prompts."""
    held: tuple[torch.Tensor, torch.Tensor]
    """``past`` and ``memory`` of all rows."""

    def keep(self, past: torch.Tensor, memory: torch.Tensor) -> None:
        """Store the states after prompts."""
        for held, new in zip(self.held, (past, memory), strict=True):
            held.index_copy_(0, self.rows, new.to(held.dtype))


def convolved(
    inputs: torch.Tensor, weight: torch.Tensor, chunks: Chunks, past: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply a causal depthwise convolution and SiLU.

    Args:
        inputs: [T, channels].
        weight: [channels, 1, taps + 1].
        chunks: index maps of the sequences.
        past: [B, taps, channels] before each sequence; None: zeros.

    Returns:
        [T, channels] fp32, and the last inputs of each sequence, [B, taps, channels].
    """
    channels, taps = inputs.shape[1], weight.shape[-1] - 1
    before = inputs.new_zeros(len(chunks.order) * taps, channels) if past is None else past.flatten(0, 1)
    line = torch.cat((before, inputs)).index_select(0, chunks.line)
    convolution = functional.conv1d(line.float().t()[None], weight.float(), groups=channels)[0]
    return functional.silu(convolution.t().index_select(0, chunks.on_line - taps)), line[chunks.ends]


def delta_inputs(
    convolution: torch.Tensor, widths: tuple[int, int], heads: tuple[int, int], strength: torch.Tensor,
    decay: torch.Tensor,
) -> DeltaInputs:  # fmt: skip
    """Split the convolution's output [T, channels] into inputs of the delta rule.

    ``widths`` and ``heads``: of keys and of values. Channels are ordered by key head: query, key, values.
    """
    of_values = widths[1] * heads[1] // heads[0]
    query, key, value = convolution.unflatten(-1, (heads[0], -1)).split((widths[0], widths[0], of_values), -1)
    query, key = _normed(query), _normed(key)
    return DeltaInputs(query * widths[0] ** -0.5, key, value.reshape(-1, heads[1], widths[1]), strength, decay)


def _normed(heads: torch.Tensor) -> torch.Tensor:
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + _EPSILON)


def delta_rule(
    inputs: DeltaInputs, chunks: Chunks, state: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs [T, value heads, value width] and final states [B, value heads, key width, value width].

    ``state``: the initial ones; None: zeros. Names in the code: N chunks of C tokens, ``k`` key heads with ``s`` value
    heads each, key width ``d``, value width ``e``.
    """
    groups, key_width = inputs.key.shape[1:]
    share, value_width = inputs.value.shape[1] // groups, inputs.value.shape[2]

    def cut(numbers: torch.Tensor, *heads: int) -> torch.Tensor:
        """Cut [T, heads, ..] into [N, k, s, C, ..]."""
        cells = numbers[chunks.tokens].unflatten(2, heads)
        return cells.movedim(1, 3)

    query, key = cut(inputs.query, groups, 1), cut(inputs.key, groups, 1)
    value, is_token = cut(inputs.value, groups, share), chunks.is_token[:, None, None]
    # Empty cells neither write nor decay.
    strength = cut(inputs.strength, groups, share).where(is_token, 0.0)
    decayed = cut(inputs.decay, groups, share).where(is_token, 0.0)
    # On a GPU torch has no deterministic cumsum of floats.
    sums = decayed.new_ones(2 * decayed.shape[-1:]).triu() if torch.are_deterministic_algorithms_enabled() else None
    decayed = decayed.cumsum(-1) if sums is None else decayed @ sums
    between = decayed[..., :, None] - decayed[..., None, :]
    above = torch.ones(between.shape[-2:], dtype=torch.bool, device=between.device).triu(1)
    between = between.masked_fill(above, -torch.inf).exp()
    system = key @ key.transpose(-1, -2) * between * strength[..., None]
    grown = decayed.exp()[..., None]
    right = torch.cat((value, key * grown), -1) * strength[..., None]
    written, read = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split(
        (value_width, key_width), -1
    )
    attended, query = query @ key.transpose(-1, -2) * between, query * grown
    last = decayed[..., -1:]
    key, kept = key * (last - decayed).exp()[..., None], last.exp()[..., None]

    batch = len(chunks.order)
    if state is None:
        state = value.new_zeros(batch, groups, share, key_width, value_width)
    else:
        state = state[chunks.order].unflatten(1, (groups, share))
    outputs, ended = [], []
    pieces = (each.split(chunks.active) for each in (query, key, attended, written, read, kept))
    for query, key, attended, written, read, kept in zip(*pieces, strict=True):
        ended.append(state[len(query) :])
        state = state[: len(query)]
        new = written - read @ state
        outputs.append(query @ state + attended @ new)
        state = state * kept + key.transpose(-1, -2) @ new
    ended.append(state)
    output = torch.cat(outputs).movedim(3, 1).flatten(0, 1).index_select(0, chunks.cell)
    return output.flatten(1, 2), torch.cat(ended[::-1]).index_select(0, chunks.place).flatten(1, 2)


def convolved_step(inputs: torch.Tensor, weight: torch.Tensor, past: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
    """Do one step of `convolved`, [N, channels]; updates ``past`` [N, taps, channels] of ``alive`` rows in place."""
    line = torch.cat((past, inputs[:, None]), 1)
    past.copy_(line[:, 1:].where(alive[:, None, None], past))
    return functional.silu((line.float() * weight[:, 0].t().float()).sum(1))


def delta_step(inputs: DeltaInputs, state: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
    """Do one step of `delta_rule`, [N, ..]; updates ``state`` of ``alive`` [N] rows in place."""
    share = inputs.value.shape[1] // inputs.key.shape[1]
    query, key = (each.repeat_interleave(share, 1)[..., None, :] for each in (inputs.query, inputs.key))
    strength, decay = (each.where(alive[:, None], 0.0)[..., None] for each in (inputs.strength, inputs.decay))
    state.mul_(decay.exp()[..., None])
    new = (inputs.value - (key @ state)[..., 0, :]) * strength
    state.addcmul_(key.transpose(-1, -2), new[..., None, :])
    return (query @ state)[..., 0, :]
