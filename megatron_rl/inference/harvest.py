"""The one host read of an engine step: which rows have ended, and what they said."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_rl.inference.slot_state import SlotState
from megatron_rl.inference.stop_strings import truncate_at_stop
from megatron_rl.types import FinishReason


@dataclass(frozen=True)
class Ended:
    """What a row has produced; the end token is part of it."""

    slot: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    reason: FinishReason


@dataclass(frozen=True)
class Watch:
    """What a row had said before it was pre-empted, and what ends it."""

    stop: Sequence[str] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()


class Harvest:
    """Reads what the rows have said."""

    def __init__(
        self, state: SlotState, stop_ids: Collection[int], decode_text: Callable[[Sequence[int]], str]
    ) -> None:
        self._state = state
        self._stop_ids = frozenset(stop_ids)
        self._decode_text = decode_text

    def __call__(self, rows: Mapping[int, Watch]) -> list[Ended]:
        """Those of the ``rows`` that have ended."""
        state, height = self._state, max(rows) + 1
        alive, counts = torch.stack((state.alive[:height].long(), state.count[:height])).tolist()
        watched = [slot for slot, watch in rows.items() if watch.stop or not alive[slot]]
        found = []
        for slot, (tokens, logprobs) in self.said({slot: counts[slot] for slot in watched}).items():
            ids, reason = self._ending(rows[slot].token_ids + tokens, rows[slot].stop, bool(alive[slot]))
            if reason is not None:
                found.append(Ended(slot, ids, (rows[slot].logprobs + logprobs)[: len(ids)], reason))
        self.stop([ended.slot for ended in found])
        return found

    def said(self, counts: Mapping[int, int]) -> dict[int, tuple[tuple[int, ...], tuple[float, ...]]]:
        """Tokens of rows, so many of each, and their log-probs."""
        if not counts:
            return {}
        picked, longest = torch.tensor(list(counts), device=self._state.device), max(counts.values())
        tokens = self._state.tokens[picked, :longest].tolist()
        logprobs = self._state.logprobs[picked, :longest].tolist()
        return {
            slot: (tuple(ids[:count]), tuple(values[:count]))
            for (slot, count), ids, values in zip(counts.items(), tokens, logprobs, strict=True)
        }

    def stop(self, slots: Sequence[int]) -> None:
        """The rows go idle."""
        if slots:
            self._state.stop(slots)

    def _ending(
        self, ids: tuple[int, ...], stop: Sequence[str], alive: bool
    ) -> tuple[tuple[int, ...], FinishReason | None]:
        """Why the row ended, and its tokens up to there; None while it goes on."""
        if stop:
            kept = truncate_at_stop(ids, stop, self._decode_text)
            if kept is not None:
                return ids[:kept], "stop_string"
        if alive:
            return ids, None
        return ids, "stop" if ids[-1] in self._stop_ids else "length"
