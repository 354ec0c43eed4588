"""Samples of harnesses that last longer than a step of partial rollouts: their programs end, and call again.

    step 1    program ─► call a ─► answer ─► call b ─► half an answer      the step ends, and so does the program
    step 2    program ─► call a ─► the same answer at once ─► call b ─► the rest, of newer weights ─► call c ─► ...

A program that waited for the next step would hold time limits, memory and connections meanwhile, and no checkpoint
could hold it. One that begins again needs nothing but its answers. A program that asks something else, because a clock
or a random number has a part in it, gets new answers from there on: what it does not ask again was never said.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

from megatron_rl.types import Completion, Request, Talk


def key_of(call: Request) -> str:
    """Return what a call is known by when it is made again: its whole prompt, its branch, and where it ends."""
    sampling = call.sampling
    ends = repr((call.place.branch, sampling.max_new_tokens, sampling.stop, sampling.stop_token_ids))
    return blake2b(array("q", call.prompt_ids).tobytes() + ends.encode(), digest_size=16).hexdigest()


@dataclass
class PastCalls:
    """The calls of one sample in this step, and the answers that it was given in earlier ones."""

    given: Mapping[str, Completion] = field(default_factory=dict)
    """By `key_of`; of a call that was being answered what had been drawn."""
    num_repeated: int = 0
    """Calls in this step that were answered, or begun to be, in an earlier one."""
    _calls: dict[int, Request] = field(default_factory=dict)
    """By number of the call."""

    def add(self, call: Request) -> Completion | None:
        """Take in a call; returns what it has of its answer."""
        self._calls[call.place.call] = call
        found = self.given.get(key_of(call)) if self.given else None
        self.num_repeated += found is not None
        return found

    def waiting(self, answers: Mapping[int, Completion]) -> Talk:
        """Return the sample as it waits for the next step: ``answers`` are whole or begun, by number of the call."""
        new = {key_of(self._calls[number]): answer for number, answer in sorted(answers.items()) if answer.token_ids}
        return Talk(calls={**self.given, **new})
