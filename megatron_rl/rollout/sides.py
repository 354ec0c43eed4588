"""Whose weights the engine has amid a rollout: the policy's or, for a while, those of the reference that judges ask.

    policy      A0 A1 A2 ... no work left ─┐                    ┌─► calls that came meanwhile
    reference                              └─► V0 V1 V2 ... ────┘

Requests to the other side are held until this one has no work and nothing new comes. All of them are then one batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager

from megatron_rl.inference.engine import Engine
from megatron_rl.types import Request


class Sides:
    """Of one rollout, the same on all ranks that step together."""

    def __init__(self, engine: Engine, reference: Callable[[], AbstractContextManager[None]] | None) -> None:
        """The model has the weights of ``reference`` inside it, see `ReferencePolicy.generating`; None: nobody asks."""
        self._engine = engine
        self._reference = reference
        self._is_reference = False
        self.inside = contextlib.ExitStack()
        """To be left when the rollout ends, however it ends: the policy's weights are in the model again."""
        self.held: list[Request] = []

    def submit(self, request: Request) -> None:
        """Queue it, or hold it for the other side."""
        if request.of_reference == self._is_reference:
            self._engine.submit(request)
        else:
            self.held.append(request)

    def cancel(self, calls: Collection[int]) -> None:
        """Nobody waits for the answers to these, be they held or in the engine."""
        self.held = [request for request in self.held if request.call not in calls]
        self._engine.cancel(calls)

    def switch(self) -> None:
        """To the other side, with all that was held for it; collective over the lockstep group."""
        self._engine.abort()  # nothing is unfinished; what the cache has of prompts is of the weights that leave
        if self._is_reference:
            self.inside.close()
        else:
            self.inside.enter_context(self._reference())
        self._is_reference = not self._is_reference
        held, self.held = self.held, []
        for request in held:
            self.submit(request)
