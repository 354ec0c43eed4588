"""An engine without a model."""

from __future__ import annotations

from megatron_rl.inference.engine import EngineStatistics
from megatron_rl.types import Completed, Completion, Request


class QueuedEngine:
    """Answers every request in the next step; subclasses say with what."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        """All that were ever submitted."""
        self._waiting: list[Request] = []
        self.statistics = EngineStatistics()

    def begin(self, seed: int, policy_version: int) -> None:
        self._waiting.clear()

    def submit(self, request: Request) -> None:
        self._waiting.append(request)
        self.requests.append(request)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._waiting)

    def step(self) -> list[Completed]:
        done = [request for request in self._waiting if self.ends(request)]
        self._waiting = [request for request in self._waiting if request not in done]
        return [(request, self.answer(request)) for request in done]

    def abort(self) -> None:
        self._waiting.clear()

    def ends(self, request: Request) -> bool:
        """Whether it has an answer at all."""
        return True

    def answer(self, request: Request) -> tuple[Completion, ...]:
        """One a sample."""
        raise NotImplementedError
