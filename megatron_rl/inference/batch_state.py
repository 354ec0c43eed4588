"""The running batch on the device, one row per sequence, and the processing of its output on the host."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as ListOf
from typing import NamedTuple

import torch

from megatron_rl.arithmetic import uniform
from megatron_rl.inference.sampler import MOST_SCORED, SamplingModes, SamplingTensors
from megatron_rl.inference.sequence import Sequence
from megatron_rl.platform.device import to_device
from megatron_rl.sampling import find_stop
from megatron_rl.types import FinishReason, SamplingParams, TokenScore

DecodeText = Callable[[ListOf[int], ListOf[str]], str]
"""Decodes token ids. Special tokens become text if one of the given stop strings contains them."""


class BatchState:
    """Static per-row buffers; a step reads and writes views of the first N rows.

    ``token`` [rows] was drawn last and is fed next, at ``position``. ``count``: tokens drawn since the prefill, at most
    ``limit``. ``tokens`` and ``logprobs`` are [rows, max_new + 1]; ended rows write to the last column.
    """

    def __init__(self, rows: int, max_new_tokens: int, is_stop: torch.Tensor, paged: bool = False) -> None:
        """``is_stop`` [V] bool marks end tokens; ``paged``: the KV cache has blocks, so a row owns no memory in it."""
        self.device = device = is_stop.device
        self.is_stop = is_stop
        self.paged = paged
        self.trash = max_new_tokens
        for name in ("token", "position", "count", "limit", "seed", "top_k"):
            setattr(self, name, torch.zeros(rows, dtype=torch.int64, device=device))
        self.temperature = torch.ones(rows, device=device)
        self.top_p = torch.ones(rows, device=device)
        self.min_p = torch.zeros(rows, device=device)
        self.bias: torch.Tensor | None = None
        self.divisor: torch.Tensor | None = None
        """[rows, V] fp32 each; allocated when the first sequence needs them."""
        self.top_ids: torch.Tensor | None = None
        self.top_logprobs: torch.Tensor | None = None
        """[rows, MOST_SCORED], for each row's last token; allocated when the first request wants them."""
        self.greedy = torch.zeros(rows, dtype=torch.bool, device=device)
        self.alive = torch.zeros(rows, dtype=torch.bool, device=device)
        self.tokens = torch.zeros(rows, max_new_tokens + 1, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(rows, max_new_tokens + 1, device=device)

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Return all per-row tensors."""
        return [held for held in vars(self).values() if isinstance(held, torch.Tensor) and held is not self.is_stop]

    def reset(self) -> None:
        """Reset all rows. Idle rows are computed too, and in experts the row count affects rounding."""
        for held in self.buffers:
            held.fill_(any(held is one for one in (self.temperature, self.top_p, self.divisor)))

    def begin(self, sequences: ListOf[Sequence], rows: torch.Tensor) -> None:
        """Start ``sequences`` in ``rows`` [N]: their prompts are in the cache, and no token has been drawn."""
        params = [sequence.request.sampling for sequence in sequences]
        self.count[rows] = 0
        self.alive[rows] = True
        whole = {
            "position": [len(sequence.prefill_ids) - 1 for sequence in sequences],
            "seed": [sequence.seed for sequence in sequences],
            "limit": [p.max_new_tokens - len(s.output_ids) for p, s in zip(params, sequences, strict=True)],
            "top_k": [min(p.top_k or self.is_stop.numel(), self.is_stop.numel()) for p in params],
            "greedy": [p.greedy for p in params],
        }
        real = {
            "top_p": [p.top_p for p in params],
            "temperature": [1.0 if p.greedy else p.temperature for p in params],
            "min_p": [p.min_p for p in params],
        }
        for columns, dtype in ((whole, torch.int64), (real, torch.float32)):
            values = to_device([*columns.values()], self.device, dtype)  # together: each copy is a launch
            for name, column in zip(columns, values, strict=True):
                held = getattr(self, name)
                held[rows] = column.to(held.dtype)
        guides = [sequence.guide for sequence in sequences]
        biases = [guide and guide.bias(s.output_ids) for guide, s in zip(guides, sequences, strict=True)]
        self.set_biases(rows, biases, [guide and guide.divisor for guide in guides])

    def allocate_scores(self) -> None:
        """Allocate the buffers of `store_scores`, once: CUDA graphs hold their addresses."""
        if self.top_ids is None:
            shape = len(self.token), min(MOST_SCORED, self.is_stop.numel())
            self.top_ids = torch.zeros(shape, dtype=torch.int64, device=self.device)
            self.top_logprobs = torch.zeros(shape, device=self.device)

    def store_scores(self, rows: slice | torch.Tensor, ids: torch.Tensor, logprobs: torch.Tensor) -> None:
        """Store ids and log-probs [N, MOST_SCORED] of the likeliest tokens of ``rows``."""
        self.top_ids[rows], self.top_logprobs[rows] = ids, logprobs

    def allocate_biases(self, divides: bool) -> None:
        """Allocate the buffers of `set_biases`, once: CUDA graphs hold their addresses."""
        shape = len(self.token), self.is_stop.numel()
        if self.bias is None:
            self.bias = torch.zeros(shape, device=self.device)
        if divides and self.divisor is None:
            self.divisor = torch.ones(shape, device=self.device)

    def set_biases(
        self, rows: torch.Tensor, biases: ListOf[torch.Tensor | None], divisors: ListOf[torch.Tensor | None]
    ) -> None:
        """Set bias and repetition divisor of ``rows``, [V] each; None resets to neutral."""
        for held, values, neutral in ((self.bias, biases, 0.0), (self.divisor, divisors, 1.0)):
            if held is not None:
                nothing = torch.full((self.is_stop.numel(),), neutral)
                held[rows] = torch.stack([nothing if value is None else value for value in values]).to(self.device)

    def sampling(self, rows: slice | torch.Tensor, modes: SamplingModes) -> SamplingTensors:
        """Return the sampling parameters of ``rows``; those that no request needs are None."""
        return SamplingTensors(
            seeds=self.seed[rows],
            temperature=self.temperature[rows] if modes.tempered else None,
            greedy=self.greedy[rows] if modes.greedy else None,
            top_k=self.top_k[rows] if modes.filtered else None,
            top_p=self.top_p[rows] if modes.filtered else None,
            min_p=self.min_p[rows] if modes.floored else None,
            bias=self.bias[rows] if modes.biased and self.bias is not None else None,
            divisor=self.divisor[rows] if modes.divided and self.divisor is not None else None,
            scored=modes.scored and self.top_ids is not None,
        )

    def ahead(self, rows: int, steps: int, max_length: int, draws: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return positions and random numbers of the next ``steps`` tokens of the first ``rows``.

        ``[steps, rows]`` each: int64 below ``max_length``, and fp32 in (0, 1] (a placeholder unless ``draws``). The
        positions assume that no row ends; the tokens of a row that does are ignored.
        """
        if self.position.is_cuda:
            from megatron_rl.inference.state_kernels import ahead

            return ahead(self, rows, steps, max_length)
        later = torch.arange(steps, device=self.device)[:, None]
        positions = (self.position[:rows] + later).clamp_max_(max_length - 1)
        return positions, uniform(self.seed[:rows], positions + 1) if draws else positions

    def record(self, rows: slice | torch.Tensor, tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
        """Append the tokens of k steps, [k, N] each, to ``rows``; rows with an end token or at their limit end.

        A slice of rows begins at 0. Tokens after a row's end go to the trash column. The host does not wait. The
        position of an ended row stays, so that it never runs out of the cache.
        """
        if self.position.is_cuda:
            from megatron_rl.inference.state_kernels import record

            record(self, rows, tokens, logprobs)
            return
        alive, count, position = self.alive[rows], self.count[rows], self.position[rows]
        room = self.limit[rows] - count
        step = torch.arange(tokens.shape[0], device=self.device)[:, None]
        ends = self.is_stop[tokens]
        ended_before = ends.cumsum(0) - ends.long() if tokens.shape[0] > 1 else torch.zeros_like(tokens)
        kept = alive & (step < room) & (ended_before == 0)
        column = torch.where(kept, count + step, self.trash).t()
        if isinstance(rows, slice):
            self.tokens[rows].scatter_(1, column, tokens.t())
            self.logprobs[rows].scatter_(1, column, logprobs.t())
        else:
            self.tokens[rows[:, None], column] = tokens.t()
            self.logprobs[rows[:, None], column] = logprobs.t()
        added = kept.sum(0)
        count += added
        position += added
        if not isinstance(rows, slice):  # a slice is a view and has been updated in place
            self.count[rows], self.position[rows] = count, position
        self.token[rows] = tokens[-1]
        self.alive[rows] = alive & (added < room) & ~ends.any(0)

    def mark_idle(self, rows: list[int], positions: list[int] | None = None) -> None:
        """Mark rows as idle: they are still computed until they are reused or beyond the batch.

        Idle rows still write to the cache, at ``positions`` or else their current ones: in a cache of rows that is
        behind the finished sequence, whose prefix may be reused. In a cache of blocks they restart at 0 to attend to
        one key only.
        """
        rows = to_device(rows, self.device)
        self.alive[rows] = False
        if positions is not None:
            self.position[rows] = to_device(positions, self.device)
        elif self.paged:
            self.position[rows] = 0

    def swap_rows(self, pairs: ListOf[tuple[int, int]]) -> None:
        """Swap pairs of rows in every per-row buffer."""
        to_and_fro = [row for pair in pairs for row in pair], [row for pair in pairs for row in reversed(pair)]
        source, destination = to_device(to_and_fro, self.device)
        for buffer in self.buffers:
            buffer[destination] = buffer[source]


class PendingFlags(NamedTuple):
    """Alive flags and counts on the device, not yet copied to the host."""

    flags: torch.Tensor
    """[2, rows] int64: alive (0 or 1), and count."""
    ready: torch.cuda.Event | None
    """Recorded after the flags were computed; None on a CPU."""


class OutputProcessor:
    """Copies tokens to the host, on CUDA on its own stream after a `PendingFlags`, and finds where sequences end."""

    def __init__(self, state: BatchState, stop_ids: Collection[int], decode_text: DecodeText) -> None:
        self._state = state
        self._stop_ids = frozenset(stop_ids)
        self._decode_text = decode_text
        # High priority: its few small kernels run between those of a decode step, not after them.
        self._stream = torch.cuda.Stream(state.device, priority=-1) if state.device.type == "cuda" else None

    def snapshot_flags(self, running: ListOf[Sequence]) -> PendingFlags:
        """Copy alive flags and counts of the ``running`` rows on the device."""
        state, height = self._state, max(sequence.row for sequence in running) + 1
        flags = torch.stack((state.alive[:height].long(), state.count[:height]))
        return PendingFlags(flags, None if self._stream is None else torch.cuda.current_stream().record_event())

    def finish(self, running: ListOf[Sequence], pending: PendingFlags) -> list[Sequence]:
        """Copy the flags to the host once, finish the sequences that had ended, and mark their rows idle."""
        state, finished, guided = self._state, [], []
        with self._reading_after(pending.ready):
            alive, counts = pending.flags.tolist()
            watched = [s for s in running if s.is_watched or not alive[s.row]]
            read = list(self._read(watched, [counts[s.row] for s in watched]))
        for sequence, token_ids, logprobs in read:
            ids = sequence.output_ids + token_ids
            kept, reason = self._ending(ids, sequence.request.sampling, bool(alive[sequence.row]))
            if sequence.guide is not None and sequence.guide.is_stuck:
                kept, reason = len(ids), "error"
            if len(ids) > len(sequence.scores) and sequence.request.hints.top_logprobs:
                sequence.scores.append(self._score(sequence, logprobs[-1]))
            if reason is not None:
                new = kept - len(sequence.output_ids)
                sequence.append(token_ids[:new], logprobs[:new])
                sequence.num_cut = len(ids) - kept
                sequence.finish(reason)
                finished.append(sequence)
            elif sequence.guide is not None and not sequence.guide.is_constant:
                guided.append((sequence.row, sequence.guide.bias(ids), sequence.guide.divisor))
        self._mark_idle(finished)
        if guided:
            rows, *values = zip(*guided, strict=True)
            state.set_biases(to_device(rows, state.device), *values)
        return finished

    @contextlib.contextmanager
    def _reading_after(self, ready: torch.cuda.Event | None) -> Iterator[None]:
        """Run device reads in the block on the side stream, after ``ready`` only."""
        if ready is None:
            yield
            return
        self._stream.wait_event(ready)
        with torch.cuda.stream(self._stream):
            yield

    def save(self, preempted: ListOf[Sequence]) -> None:
        """Read the tokens of preempted sequences, which continue from them when they are admitted again."""
        for sequence, token_ids, logprobs in self._read(preempted, [s.num_unread for s in preempted]):
            sequence.append(token_ids, logprobs)
        self._mark_idle(preempted)

    def so_far(self, running: ListOf[Sequence]) -> list[tuple[int, ...]]:
        """Return the tokens of each sequence, without marking them as read."""
        return [s.output_ids + ids for s, ids, _ in self._read(running, [s.num_unread for s in running])]

    def _read(
        self, sequences: ListOf[Sequence], counts: ListOf[int]
    ) -> Iterator[tuple[Sequence, tuple[int, ...], tuple[float, ...]]]:
        """Yield each sequence with its last ``counts`` tokens and their log-probs."""
        if sequences:
            rows, longest = to_device([s.row for s in sequences], self._state.device), max(counts)
            held = (buffer[rows, :longest].tolist() for buffer in (self._state.tokens, self._state.logprobs))
            for sequence, count, token_ids, logprobs in zip(sequences, counts, *held, strict=True):
                yield sequence, tuple(token_ids[:count]), tuple(logprobs[:count])

    def _score(self, sequence: Sequence, logprob: float) -> TokenScore:
        """Return the likeliest tokens of the last position, which the host reads at every step."""
        row, most, state = sequence.row, sequence.request.hints.top_logprobs, self._state
        top = state.top_ids[row, :most].tolist(), state.top_logprobs[row, :most].tolist()
        return TokenScore(logprob, tuple(zip(*top, strict=True)))

    def _mark_idle(self, sequences: ListOf[Sequence]) -> None:
        if sequences:
            self._state.mark_idle([sequence.row for sequence in sequences])

    def _ending(self, ids: tuple[int, ...], params: SamplingParams, alive: bool) -> tuple[int, FinishReason | None]:
        """Return how many tokens belong to the sequence, and its finish reason (None: still running)."""
        ends = (place for place, token in enumerate(ids, 1) if token in params.stop_token_ids)
        by_id = next(ends, None) if params.stop_token_ids else None
        ids, alive = ids[:by_id], alive and by_id is None
        kept, least = None, params.constraints.min_tokens if params.constraints else 0
        if params.stop:
            kept = truncate_at_stop(ids, params.stop, lambda ids: self._decode_text(ids, params.stop), least)
        if kept is not None:
            return kept, "stop_string"
        if by_id is not None:
            return by_id, "stop"
        if alive:
            return len(ids), None
        return len(ids), "stop" if ids[-1] in self._stop_ids else "length"


def truncate_at_stop(
    token_ids: ListOf[int], stop: ListOf[str], decode: Callable[[ListOf[int]], str], min_tokens: int = 0
) -> int | None:
    """Return the smallest number of tokens whose text contains a stop string; None without one.

    The token that completes the stop string is kept: the policy chose it. Stop strings that end within the first
    ``min_tokens`` are ignored.
    """
    least = len(decode(token_ids[:min_tokens])) if min_tokens else 0

    def contains(count: int) -> bool:
        return find_stop(decode(token_ids[:count]), stop, least) is not None

    if not contains(len(token_ids)):
        return None
    counts = range(1, len(token_ids) + 1)  # "contains" is monotone in the number of tokens
    return counts[bisect.bisect_left(counts, True, key=contains)]
