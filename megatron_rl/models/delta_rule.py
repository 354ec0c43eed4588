"""The gated delta rule over sequences laid end to end, and one step of it: torch alone, fp32.

    S <- exp(g) S;   S <- S + b k (v - S^T k)^T;   output = S^T q          S [key width, value width] of a value head

A sequence is cut into chunks. Within one, what its tokens do to each other is a triangular system, solved for all
chunks of all sequences at once (Yang et al., 2024, https://arxiv.org/abs/2412.06464); then the states go from chunk to
chunk, a step for all sequences that have as many::

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
"""Of the length that queries and keys are divided by."""


class DeltaInputs(NamedTuple):
    """Of T tokens, after the convolution."""

    query: torch.Tensor
    """[T, key heads, key width], of length 1 / sqrt(key width)."""
    key: torch.Tensor
    """[T, key heads, key width], of length 1."""
    value: torch.Tensor
    """[T, value heads, value width]; value heads share the keys in groups."""
    strength: torch.Tensor
    """[T, value heads], between 0 and 1: ``b``."""
    decay: torch.Tensor
    """[T, value heads], at most 0: ``g``."""


@dataclass(frozen=True)
class Chunks:
    """Where the tokens of a packed batch lie in its chunks, and in the line that the convolution runs over."""

    active: tuple[int, ...]
    """Sequences that have a chunk in each step; chunks lie step by step."""
    tokens: torch.Tensor
    """[chunks, size] int64: the token in each cell, 0 where there is none."""
    is_token: torch.Tensor
    """[chunks, size] bool."""
    cell: torch.Tensor
    """[T] int64: the cell of each token."""
    order: torch.Tensor
    """[B] int64: the longest sequence first."""
    place: torch.Tensor
    """[B] int64: of each sequence in that order."""
    line: torch.Tensor
    """[T + B taps] int64: before each sequence its past, then its tokens, which are counted from B taps on."""
    on_line: torch.Tensor
    """[T] int64: of each token."""
    ends: torch.Tensor
    """[B, taps] int64: the last of each sequence on the line."""

    @classmethod
    def of(cls, lengths: Sequence[int], taps: int, device: torch.device) -> Chunks:
        """Lay out sequences, before each ``taps`` tokens of its past. Nothing is read from the device."""
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
    """What a layer reads and writes in one forward pass."""

    past: torch.Tensor | None
    """[N, taps, channels]: in a decode step views of the first rows; in prompts None where these begin."""
    memory: torch.Tensor | None
    """[N, heads, key width, value width] fp32, likewise."""
    alive: torch.Tensor
    """[N] bool, in a decode step: the rows whose states may change."""
    chunks: Chunks | None
    """Of prompts; None in a decode step."""
    rows: torch.Tensor | None
    """[N] of prompts."""
    held: tuple[torch.Tensor, torch.Tensor]
    """Of all rows."""

    def keep(self, past: torch.Tensor, memory: torch.Tensor) -> None:
        """Store what prompts leave."""
        for held, new in zip(self.held, (past, memory), strict=True):
            held.index_copy_(0, self.rows, new.to(held.dtype))


def convolved(
    inputs: torch.Tensor, weight: torch.Tensor, chunks: Chunks, past: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolve each channel by itself, causally, and apply SiLU.

    Args:
        inputs: [T, channels].
        weight: [channels, 1, taps + 1].
        chunks: of the sequences.
        past: [B, taps, channels] before each sequence; None: zeros.

    Returns:
        [T, channels] fp32, and the last inputs of each sequence, [B, taps, channels].
    """
    channels, taps = inputs.shape[1], weight.shape[-1] - 1
    before = inputs.new_zeros(len(chunks.order) * taps, channels) if past is None else past.flatten(0, 1)
    line = torch.cat((before, inputs)).index_select(0, chunks.line)
    turned = functional.conv1d(line.float().t()[None], weight.float(), groups=channels)[0]
    return functional.silu(turned.t().index_select(0, chunks.on_line - taps)), line[chunks.ends]


def delta_inputs(
    turned: torch.Tensor, widths: tuple[int, int], heads: tuple[int, int], strength: torch.Tensor, decay: torch.Tensor
) -> DeltaInputs:
    """Take apart ``turned`` [T, channels], what the convolution gives; ``widths`` and ``heads``: of keys, values.

    Of each key head there come the query, the key and the values of its value heads.
    """
    of_values = widths[1] * heads[1] // heads[0]
    query, key, value = turned.unflatten(-1, (heads[0], -1)).split((widths[0], widths[0], of_values), -1)
    query, key = _normed(query), _normed(key)
    return DeltaInputs(query * widths[0] ** -0.5, key, value.reshape(-1, heads[1], widths[1]), strength, decay)


def _normed(heads: torch.Tensor) -> torch.Tensor:
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + _EPSILON)


def delta_rule(
    inputs: DeltaInputs, chunks: Chunks, state: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs [T, value heads, value width], and the last states [B, value heads, key width, value width].

    ``state`` are those at the beginnings; None: zeros. In the code N chunks of C tokens, ``k`` key heads, ``s`` value
    heads to each, key width ``d``, value width ``e``.
    """
    groups, key_width = inputs.key.shape[1:]
    share, value_width = inputs.value.shape[1] // groups, inputs.value.shape[2]

    def cut(numbers: torch.Tensor, *heads: int) -> torch.Tensor:
        """Cut [T, heads, ..] into [N, k, s, C, ..]."""
        cells = numbers[chunks.tokens].unflatten(2, heads)
        return cells.movedim(1, 3)

    query, key = cut(inputs.query, groups, 1), cut(inputs.key, groups, 1)
    value, is_token = cut(inputs.value, groups, share), chunks.is_token[:, None, None]
    # A cell without a token changes nothing: it neither writes nor decays.
    strength = cut(inputs.strength, groups, share).where(is_token, 0.0)
    decayed = cut(inputs.decay, groups, share).where(is_token, 0.0)
    # On a GPU a cumsum of floats refuses to be deterministic.
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
    """Do as `convolved` with a token a row, [N, channels]; ``past`` [N, taps, channels] moves on in ``alive`` rows."""
    line = torch.cat((past, inputs[:, None]), 1)
    past.copy_(line[:, 1:].where(alive[:, None, None], past))
    return functional.silu((line.float() * weight[:, 0].t().float()).sum(1))


def delta_step(inputs: DeltaInputs, state: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
    """Do as `delta_rule` with a token a row, [N, ..]; ``state`` changes in place in rows that are ``alive`` [N]."""
    share = inputs.value.shape[1] // inputs.key.shape[1]
    query, key = (each.repeat_interleave(share, 1)[..., None, :] for each in (inputs.query, inputs.key))
    strength, decay = (each.where(alive[:, None], 0.0)[..., None] for each in (inputs.strength, inputs.decay))
    state.mul_(decay.exp()[..., None])
    new = (inputs.value - (key @ state)[..., 0, :]) * strength
    state.addcmul_(key.transpose(-1, -2), new[..., None, :])
    return (query @ state)[..., 0, :]
