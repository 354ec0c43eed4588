"""Who waits for a seat, and in which order."""

from __future__ import annotations

import bisect
from collections import deque
from dataclasses import dataclass

PREEMPTED, LATER_TURN, FIRST_TURN = range(3)
"""Whose turn it is first: work that was begun, then who holds up a conversation, then everybody else."""


@dataclass
class Waiting:
    """Samples of one prompt; they stay together, so that one prefill serves them."""

    request: int
    tokens: tuple[int, ...]
    """The prompt; of a pre-empted sample also what it has said."""
    samples: deque[int]
    most_new: int
    """Tokens a sample may still draw."""
    expected_new: int
    """Tokens it is expected to draw, never more than ``most_new``."""
    urgency: int = FIRST_TURN
    goes_on: bool = False
    """The samples will probably be asked again, with what they said in the prompt."""
    earlier: int = 0
    """Tokens that a pre-empted sample has drawn already; the last ones of ``tokens``."""

    @property
    def rank(self) -> tuple[int, int, int]:
        """The lowest is served first: the longest before the others, so that none begins alone at the end."""
        return self.urgency, -self.expected_new, self.request


class Queue:
    """Waiting samples by rank."""

    def __init__(self) -> None:
        self._waiting: list[Waiting] = []

    def __len__(self) -> int:
        """Number of prompts."""
        return len(self._waiting)

    @property
    def head(self) -> Waiting:
        """Whose turn it is."""
        return self._waiting[0]

    def add(self, waiting: Waiting) -> None:
        """Line up by rank."""
        bisect.insort(self._waiting, waiting, key=lambda entry: entry.rank)

    def take(self, count: int) -> tuple[int, ...]:
        """The next ``count`` samples of the head."""
        samples = tuple(self.head.samples.popleft() for _ in range(count))
        if not self.head.samples:
            self._waiting.pop(0)
        return samples

    def clear(self) -> None:
        """Forget everybody."""
        self._waiting.clear()
