"""The running batch on the device, one row a sequence, updated in place; and what the host reads of it."""

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
"""Takes ids and the stop strings that their text is searched for: special tokens in those are then part of it."""


class BatchState:
    """Static buffers, [rows] each; a step reads and writes views of the first N rows.

    ``position`` is where ``token`` (drawn, not yet fed) goes; ``count`` is how many tokens the row has produced since
    its prefill, ``limit`` how many it may. ``tokens`` and ``logprobs`` are [rows, max_new + 1]; the last column takes
    the writes of rows that have ended.
    """

    def __init__(self, rows: int, max_new_tokens: int, is_stop: torch.Tensor, paged: bool = False) -> None:
        """``is_stop`` [V] bool marks end tokens; ``paged``: a row without a sequence has no place of its own."""
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
        """[rows, V] fp32 each, from the first sequence on that needs them."""
        self.top_ids: torch.Tensor | None = None
        self.top_logprobs: torch.Tensor | None = None
        """[rows, MOST_SCORED] of each row's last token, from the first sequence on that wants them."""
        self.greedy = torch.zeros(rows, dtype=torch.bool, device=device)
        self.alive = torch.zeros(rows, dtype=torch.bool, device=device)
        self.tokens = torch.zeros(rows, max_new_tokens + 1, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(rows, max_new_tokens + 1, device=device)

    @property
    def buffers(self) -> list[torch.Tensor]:
        """List the tensors that have an entry for each row."""
        return [held for held in vars(self).values() if isinstance(held, torch.Tensor) and held is not self.is_stop]

    def reset(self) -> None:
        """Empty all rows: idle ones are computed, too, and an expert's rounding depends on how many rows it has."""
        for held in self.buffers:
            held.fill_(any(held is one for one in (self.temperature, self.top_p, self.divisor)))

    def begin(self, sequences: ListOf[Sequence], rows: torch.Tensor) -> None:
        """Start ``sequences`` in their ``rows`` [N]: their prompts are in the cache, nothing is drawn yet."""
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

    def make_room_for_scores(self) -> None:
        """Have the buffers that `note` writes: CUDA graphs know their addresses."""
        if self.top_ids is None:
            shape = len(self.token), min(MOST_SCORED, self.is_stop.numel())
            self.top_ids = torch.zeros(shape, dtype=torch.int64, device=self.device)
            self.top_logprobs = torch.zeros(shape, device=self.device)

    def note(self, rows: slice | torch.Tensor, ids: torch.Tensor, logprobs: torch.Tensor) -> None:
        """Keep the likeliest tokens of the draw that ``rows`` do now."""
        self.top_ids[rows], self.top_logprobs[rows] = ids, logprobs

    def make_room_for_biases(self, divides: bool) -> None:
        """Have the buffers that `set_biases` writes: CUDA graphs know their addresses."""
        shape = len(self.token), self.is_stop.numel()
        if self.bias is None:
            self.bias = torch.zeros(shape, device=self.device)
        if divides and self.divisor is None:
            self.divisor = torch.ones(shape, device=self.device)

    def set_biases(
        self, rows: torch.Tensor, biases: ListOf[torch.Tensor | None], divisors: ListOf[torch.Tensor | None]
    ) -> None:
        """Write what changes the logits of ``rows``, [V] each; None is nothing."""
        for held, values, neutral in ((self.bias, biases, 0.0), (self.divisor, divisors, 1.0)):
            if held is not None:
                nothing = torch.full((self.is_stop.numel(),), neutral)
                held[rows] = torch.stack([nothing if value is None else value for value in values]).to(self.device)

    def sampling(self, rows: slice | torch.Tensor, modes: SamplingModes) -> SamplingTensors:
        """Return how ``rows`` are sampled, as far as any request needs it."""
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
        """Return where the first rows' next tokens go, if none of them ends, and the numbers that draw them.

        ``[steps, rows]`` each: int64 below ``max_length``, and fp32 in (0, 1], which nobody may read unless ``draws``.
        A row that has ended goes on behind its last token; what it writes there is never read.
        """
        if self.position.is_cuda:
            from megatron_rl.inference.state_kernels import ahead

            return ahead(self, rows, steps, max_length)
        later = torch.arange(steps, device=self.device)[:, None]
        positions = (self.position[:rows] + later).clamp_max_(max_length - 1)
        return positions, uniform(self.seed[:rows], positions + 1) if draws else positions

    def record(self, rows: slice | torch.Tensor, tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
        """Append what k steps drew, [k, N] each, to ``rows`` and end those that stopped or are full.

        A slice of rows begins at 0. Tokens drawn after a row's end go to the trash column. Nothing is read by the
        host. What a row that has ended is fed next does not matter, but its position stays: it must not run out of the
        cache.
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

    def idle(self, rows: list[int], positions: list[int] | None = None) -> None:
        """Mark rows as without a running sequence: they are computed until they are taken or left out.

        They write to the cache meanwhile, at ``positions`` or where they stand: in a row of the cache behind its
        sequence, whose beginning may be used again. Over blocks a row without a sequence goes on with one key, and not
        with as many as it had.
        """
        rows = to_device(rows, self.device)
        self.alive[rows] = False
        if positions is not None:
            self.position[rows] = to_device(positions, self.device)
        elif self.paged:
            self.position[rows] = 0

    def exchange(self, pairs: ListOf[tuple[int, int]]) -> None:
        """Let rows change places, so that what is idle stays idle (compaction)."""
        to_and_fro = [row for pair in pairs for row in pair], [row for pair in pairs for row in reversed(pair)]
        source, destination = to_device(to_and_fro, self.device)
        for buffer in self.buffers:
            buffer[destination] = buffer[source]


class Look(NamedTuple):
    """Which rows have ended as of a moment of the device's work, not read yet."""

    flags: torch.Tensor
    """[2, rows] int64: whether a row is alive, and its count."""
    moment: torch.cuda.Event | None
    """None on a CPU, where it has passed."""


class OutputProcessor:
    """Reads tokens and log-probs of rows, and finds the end of their sequences.

    On CUDA it reads on a stream of its own, which waits for a `Look` and for nothing that was enqueued behind it.
    """

    def __init__(self, state: BatchState, stop_ids: Collection[int], decode_text: DecodeText) -> None:
        self._state = state
        self._stop_ids = frozenset(stop_ids)
        self._decode_text = decode_text
        # With priority: its few small kernels come between those of a decode step, not after them.
        self._stream = torch.cuda.Stream(state.device, priority=-1) if state.device.type == "cuda" else None

    def look(self, running: ListOf[Sequence]) -> Look:
        """Note on the device which rows of ``running`` have ended by now."""
        state, height = self._state, max(sequence.row for sequence in running) + 1
        flags = torch.stack((state.alive[:height].long(), state.count[:height]))
        return Look(flags, None if self._stream is None else torch.cuda.current_stream().record_event())

    def finish(self, running: ListOf[Sequence], look: Look) -> list[Sequence]:
        """Read once which sequences had ended at the ``look``: those are finished, and their rows idle.

        What their rows hold has not changed since.
        """
        state, finished, guided = self._state, [], []
        with self._behind(look.moment):
            alive, counts = look.flags.tolist()
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
        self._leave(finished)
        if guided:
            rows, *values = zip(*guided, strict=True)
            state.set_biases(to_device(rows, state.device), *values)
        return finished

    @contextlib.contextmanager
    def _behind(self, moment: torch.cuda.Event | None) -> Iterator[None]:
        """Let reads in the block wait for what the device was given before ``moment`` alone."""
        if moment is None:
            yield
            return
        self._stream.wait_event(moment)
        with torch.cuda.stream(self._stream):
            yield

    def save(self, preempted: ListOf[Sequence]) -> None:
        """Read what preempted sequences have drawn: they go on from there when they are admitted again."""
        for sequence, token_ids, logprobs in self._read(preempted, [s.num_unread for s in preempted]):
            sequence.append(token_ids, logprobs)
        self._leave(preempted)

    def so_far(self, running: ListOf[Sequence]) -> list[tuple[int, ...]]:
        """Return the tokens that each has drawn, which still count as unread."""
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
        """Of its last token; the host reads each of them."""
        row, most, state = sequence.row, sequence.request.hints.top_logprobs, self._state
        top = state.top_ids[row, :most].tolist(), state.top_logprobs[row, :most].tolist()
        return TokenScore(logprob, tuple(zip(*top, strict=True)))

    def _leave(self, sequences: ListOf[Sequence]) -> None:
        if sequences:
            self._state.idle([sequence.row for sequence in sequences])

    def _ending(self, ids: tuple[int, ...], params: SamplingParams, alive: bool) -> tuple[int, FinishReason | None]:
        """How many tokens belong to the sequence, and why it ended; no reason while it goes on."""
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
    """Return how many tokens to keep so that the text just contains a stop string; None without one.

    The token that completes the stop string is kept: its log-prob belongs to the policy's choice. What is complete
    within ``min_tokens`` does not count.
    """
    least = len(decode(token_ids[:min_tokens])) if min_tokens else 0

    def contains(count: int) -> bool:
        return find_stop(decode(token_ids[:count]), stop, least) is not None

    if not contains(len(token_ids)):
        return None
    counts = range(1, len(token_ids) + 1)  # "contains" is monotone in the number of tokens
    return counts[bisect.bisect_left(counts, True, key=contains)]
