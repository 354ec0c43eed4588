"""The memory of a run: what is on the device in rollouts, in updates, in evaluations and during a save."""

from megatron_rl.phases.phases import Phases

__all__ = ["Phases"]
