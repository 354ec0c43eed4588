"""What the scheduler asks of the books about the KV cache: plain Python, never a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_rl.attention.product import FEWEST_ROWS

FEWEST_REUSED = 16
"""A shorter common beginning is not worth a pass of its own."""


@dataclass(frozen=True)
class Copies:
    """What has to be copied in the cache; all at once, so that two may exchange places."""

    pairs: tuple[tuple[int, int], ...] = ()
    """(from, to) in what the cache is made of, slots or pages."""
    length: int = 0
    """Tokens of a slot that matter, from its beginning."""


@dataclass(frozen=True)
class Need:
    """What a sample may take of the cache, in tokens."""

    soon: int
    """Prompt and what is drawn before the host looks again."""
    longest: int
    """Prompt and answer, should it be as long as it may."""
    expected: int
    """The same for the length it is expected to have."""
    returning: bool = False
    """It was pre-empted before."""


@dataclass(frozen=True)
class Entry:
    """Seats for samples of one prompt."""

    slots: tuple[int, ...]
    """The first takes the prefill."""
    reused: int = 0
    """Tokens at the beginning of the prompt that need not be computed again."""
    copies: Copies = Copies()
    """What brings them to the first slot."""


class Storage(Protocol):
    """The books of one cache layout."""

    def cached(self, tokens: Sequence[int]) -> int:
        """How many tokens at the beginning of a prompt need not be computed again."""
        ...

    def enter(self, vacant: Sequence[int], tokens: Sequence[int], samples: int, need: Need) -> Entry | None:
        """Seats in ``vacant`` slots for as many of ``samples`` as there is room for; None if there is for none.

        The first sample of an empty cache always finds room.
        """
        ...

    def share(self, slots: Sequence[int], length: int) -> Copies:
        """The copies that give a prompt of ``length`` tokens, computed in the first slot, to the others."""
        ...

    def learn(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """The cache of ``slots`` will hold ``tokens`` when the next prompts are looked at."""
        ...

    def grow(self, slot: int, length: int) -> bool:
        """Room for the first ``length`` tokens of ``slot``; False when there is none left."""
        ...

    def leave(self, slot: int, tokens: Sequence[int], keep: bool = False) -> None:
        """The sequence in ``slot`` goes; the cache holds its ``tokens``, which may be reused.

        With ``keep`` they probably will be, so that they are worth some effort.
        """
        ...

    def move(self, moves: Sequence[tuple[int, int]], length: int) -> Copies:
        """Sequences of at most ``length`` tokens change slots, each into a vacant one; the copies that this takes."""
        ...

    def clear(self) -> None:
        """Forget everything: all slots are vacant, and nothing in the cache is worth reusing."""
        ...


def reusable(length: int) -> int:
    """Tokens of a prompt that need not be computed at most: its last one must be, for its logits.

    A few more are: a CPU's product of fewer rows adds up in another order.
    """
    return max(0, length - FEWEST_ROWS)


def common_beginning(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences (of the same type) have in common at their beginning."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
