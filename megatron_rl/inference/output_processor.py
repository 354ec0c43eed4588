"""What the host reads of the device: which sequences have ended, and their tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as ListOf

import torch

from megatron_rl.inference.batch_state import BatchState
from megatron_rl.inference.sequence import Sequence
from megatron_rl.types import FinishReason


class OutputProcessor:
    """Reads tokens and log-probs of rows, and finds the end of their sequences."""

    def __init__(self, state: BatchState, stop_ids: Collection[int], decode_text: Callable[[ListOf[int]], str]) -> None:
        self._state = state
        self._stop_ids = frozenset(stop_ids)
        self._decode_text = decode_text

    def finish(self, running: ListOf[Sequence]) -> list[Sequence]:
        """The one host read of a step: those that have ended are finished and their rows idle."""
        state, height = self._state, max(sequence.row for sequence in running) + 1
        alive, counts = torch.stack((state.alive[:height].long(), state.count[:height])).tolist()
        watched = [s for s in running if s.request.sampling.stop or not alive[s.row]]
        finished = []
        for sequence, token_ids, logprobs in self._read(watched, [counts[s.row] for s in watched]):
            ids = sequence.output_ids + token_ids
            kept, reason = self._ending(ids, sequence.request.sampling.stop, bool(alive[sequence.row]))
            if reason is not None:
                new = kept - len(sequence.output_ids)
                sequence.append(token_ids[:new], logprobs[:new])
                sequence.finish(reason)
                finished.append(sequence)
        self._leave(finished)
        return finished

    def save(self, preempted: ListOf[Sequence]) -> None:
        """Preempted sequences keep what they have drawn, and go on from there when they are admitted again."""
        for sequence, token_ids, logprobs in self._read(preempted, [s.num_unread for s in preempted]):
            sequence.append(token_ids, logprobs)
        self._leave(preempted)

    def so_far(self, running: ListOf[Sequence]) -> list[tuple[int, ...]]:
        """The tokens that each has drawn; they stay unread."""
        return [s.output_ids + ids for s, ids, _ in self._read(running, [s.num_unread for s in running])]

    def _read(
        self, sequences: ListOf[Sequence], counts: ListOf[int]
    ) -> Iterator[tuple[Sequence, tuple[int, ...], tuple[float, ...]]]:
        """The last ``counts`` tokens of sequences and their log-probs."""
        if sequences:
            rows, longest = torch.tensor([s.row for s in sequences], device=self._state.device), max(counts)
            held = (buffer[rows, :longest].tolist() for buffer in (self._state.tokens, self._state.logprobs))
            for sequence, count, token_ids, logprobs in zip(sequences, counts, *held, strict=True):
                yield sequence, tuple(token_ids[:count]), tuple(logprobs[:count])

    def _leave(self, sequences: ListOf[Sequence]) -> None:
        if sequences:
            self._state.idle([sequence.row for sequence in sequences])

    def _ending(self, ids: tuple[int, ...], stop: ListOf[str], alive: bool) -> tuple[int, FinishReason | None]:
        """How many tokens belong to the sequence, and why it ended; no reason while it goes on."""
        kept = truncate_at_stop(ids, stop, self._decode_text) if stop else None
        if kept is not None:
            return kept, "stop_string"
        if alive:
            return len(ids), None
        return len(ids), "stop" if ids[-1] in self._stop_ids else "length"


def truncate_at_stop(token_ids: ListOf[int], stop: ListOf[str], decode: Callable[[ListOf[int]], str]) -> int | None:
    """How many tokens to keep so that the text just contains a stop string; None without one.

    The token that completes the stop string is kept: its log-prob belongs to the policy's choice.
    """

    def contains(count: int) -> bool:
        text = decode(token_ids[:count])
        return any(string in text for string in stop)

    if not contains(len(token_ids)):
        return None
    low, high = 1, len(token_ids)
    while low < high:  # "contains" is monotone in the number of tokens
        middle = (low + high) // 2
        low, high = (low, middle) if contains(middle) else (middle + 1, high)
    return low
