"""One vocabulary of failures: each error is named after the boundary it crossed.

A message has three parts: what, why, what instead.
"""

from __future__ import annotations

from collections.abc import Sequence


class MegatronRLError(Exception):
    """Base of every error this project raises on purpose."""


class ConfigError(MegatronRLError):
    """The user's configuration cannot run; carries every problem found, one line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems: tuple[str, ...] = tuple(problems)
        super().__init__("\n".join(self.problems))


class CheckpointError(MegatronRLError):
    """A checkpoint is absent, damaged or of another model; names the file."""


class SaveError(CheckpointError):
    """A checkpoint could not be written, on one rank at least; the same on every rank."""


class EnvironmentFault(MegatronRLError):
    """An environment (not a single sample) failed: its server, its data or its code."""


class EngineError(MegatronRLError):
    """The rollout engine cannot go on."""


class QuantizationError(MegatronRLError):
    """Weights that have no quantised form, or a layer that did not run in the format it was given."""


class MemoryExhausted(MegatronRLError):
    """An allocation failed, on the device or on the host; names the phase and what to lower."""

    def __init__(self, message: str, on_all_ranks: bool = False) -> None:
        super().__init__(message)
        self.on_all_ranks = on_all_ranks
        """Every rank raises it at the same point, so that they can still save together."""


class TrainingError(MegatronRLError):
    """The training step cannot go on, for example after repeated non-finite gradients."""
