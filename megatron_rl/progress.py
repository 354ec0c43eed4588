"""Where a run stands: the counters that move from step to step and go into every checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl.errors import TrainingError

MAX_CONSECUTIVE_SKIPS = 3


@dataclass
class Progress:
    """Mutable on purpose: the one object the loop advances."""

    step: int = 0
    """Finished steps."""
    updates: int = 0
    """Applied optimizer updates."""
    policy_version: int = 0
    """Version of the weights; stamped on every completion."""
    tokens: int = 0
    """Tokens generated (RL) or trained on (supervised)."""
    logprob_gap_max: float = 0.0
    """Largest |inference - trainer| log-prob of any token so far."""
    consecutive_skips: int = 0
    """Updates skipped in a row because of non-finite gradients."""
    best: float | None = None
    """Highest value of --keep-best's metric so far."""
    steps_without_signal: int = 0
    """Steps in a row in which no group had a signal."""

    def state_dict(self) -> dict[str, Any]:
        """All of it, for a checkpoint."""
        return dataclasses.asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        for entry in dataclasses.fields(self):
            setattr(self, entry.name, state.get(entry.name, entry.default))

    def is_best(self, value: float | None) -> bool:
        """Book an evaluation; whether it is better than all before. None: it had no such metric."""
        if value is None or (self.best is not None and value <= self.best):
            return False
        self.best = value
        return True

    def count_updates(self, applied: int, skipped: int) -> None:
        """Book a step's updates.

        Raises:
            TrainingError: the gradient was not finite ``MAX_CONSECUTIVE_SKIPS`` times in a row.
        """
        self.updates += applied
        if applied:
            self.policy_version += 1
        # Of several updates a step some are applied: then weights and gradients are finite, whatever their order was.
        self.consecutive_skips = 0 if applied else self.consecutive_skips + skipped
        if self.consecutive_skips >= MAX_CONSECUTIVE_SKIPS:
            raise TrainingError(
                f"{self.consecutive_skips} updates in a row had a non-finite gradient and were skipped; the batches "
                "are in the run directory's logs/; lower --lr or look for the cause there"
            )
