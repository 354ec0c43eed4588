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


class Harvest:
    """Reads what the rows have said."""

    def __init__(
        self, state: SlotState, stop_ids: Collection[int], decode_text: Callable[[Sequence[int]], str]
    ) -> None:
        self._state = state
        self._stop_ids = frozenset(stop_ids)
        self._decode_text = decode_text

    def __call__(self, stops: Mapping[int, Sequence[str]]) -> list[Ended]:
        """Those of the rows in ``stops`` that have ended; each comes with the strings that end it."""
        state, rows = self._state, max(stops) + 1
        alive, counts = torch.stack((state.alive[:rows].long(), state.count[:rows])).tolist()
        watched = [slot for slot, stop in stops.items() if stop or not alive[slot]]
        if not watched:
            return []
        longest = max(counts[slot] for slot in watched)
        picked = torch.tensor(watched, device=state.device)
        tokens = state.tokens[picked, :longest].tolist()
        logprobs = state.logprobs[picked, :longest].tolist()
        found = []
        for slot, row_tokens, row_logprobs in zip(watched, tokens, logprobs, strict=True):
            ids, reason = self._ending(row_tokens[: counts[slot]], stops[slot], bool(alive[slot]))
            if reason is not None:
                found.append(Ended(slot, tuple(ids), tuple(row_logprobs[: len(ids)]), reason))
        if found:
            state.alive[torch.tensor([ended.slot for ended in found], device=state.device)] = False
        return found

    def _ending(
        self, ids: list[int], stop: Sequence[str], alive: bool
    ) -> tuple[list[int], FinishReason | None]:
        """Why the row ended, and its tokens up to there; None while it goes on."""
        if stop:
            kept = truncate_at_stop(ids, stop, self._decode_text)
            if kept is not None:
                return ids[:kept], "stop_string"
        if alive:
            return ids, None
        return ids, "stop" if ids[-1] in self._stop_ids else "length"
