"""State that registers itself: whoever has something to resume offers it under a name.

    states = StateRegistry(saved.components)            nothing saved: everybody begins anew
    progress = states.register("progress", Progress())  takes up what was saved under the name
    ...
    states.tell_unclaimed()
    states.collect()                                    {"progress": {"step": 7, ...}, ...} for the next checkpoint

Weights and optimizer are not in here: they are sharded tensors, see `tensors`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from megatron_rl.errors import CheckpointError

logger = logging.getLogger(__name__)

State = Mapping[str, Any]
"""JSON values, which are the same on all ranks, and tensors, which are this rank's own."""


class Resumable(Protocol):
    """An object with state that a checkpoint keeps, for `StateRegistry.register`."""

    def state_dict(self) -> State:
        """Return the state that a later start continues from."""

    def load_state_dict(self, state: State) -> None:
        """Go on where `state_dict` was taken."""


Owner = TypeVar("Owner", bound=Resumable)


class StateRegistry:
    """The states of a run by name."""

    def __init__(self, saved: Mapping[str, State] | None = None) -> None:
        """``saved`` is what `collect` gave before; None where the run begins."""
        self._begins = saved is None
        self._unclaimed = dict(saved or {})
        self._owners: dict[str, Resumable] = {}

    def register(self, name: str, owner: Owner, optional: bool = False, resume: bool = True) -> Owner:
        """Put ``owner``'s state into every checkpoint, and let it go on from what was saved under ``name``.

        Args:
            optional: a checkpoint without it is nothing to tell of.
            resume: False begins anew whatever was saved.

        Raises:
            CheckpointError: what was saved is nothing that ``owner`` can take.
        """
        if name in self._owners:
            raise ValueError(f"two owners of the state {name!r}")
        self._owners[name] = owner
        state = self._unclaimed.pop(name, None)
        if not resume:
            return owner
        if state is not None:
            try:
                owner.load_state_dict(state)
            except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
                raise CheckpointError(f"the checkpoint's state of {name!r} is damaged ({error})") from error
        elif not self._begins and not optional:
            logger.warning("the checkpoint has no state of %r: it is reset", name)
        return owner

    def tell_unclaimed(self) -> None:
        """Name what was saved and nobody took, once everybody has registered. It stays in the checkpoints to come."""
        if self._unclaimed:
            names = ", ".join(map(repr, sorted(self._unclaimed)))
            logger.info("this run has no use for the checkpoint's state of %s, which is kept", names)

    def collect(self) -> dict[str, State]:
        """Return everybody's state as it is now, and what was saved before and nobody took."""
        return self._unclaimed | {name: owner.state_dict() for name, owner in self._owners.items()}


class RandomState:
    """This rank's generators. Rollouts do not need them (their draws are counter-based); dropout might."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the bytes of each generator."""
        tensors = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            tensors["cuda"] = torch.cuda.get_rng_state()
        trackers = get_cuda_rng_tracker().get_states()
        return tensors | {_TRACKER + name: state for name, state in trackers.items() if torch.is_tensor(state)}

    def load_state_dict(self, state: State) -> None:
        """Go on with them; the saving job may have had no such rank."""
        if not state:
            logger.info("this rank is new to the run: its generators start from the seed")
            return
        torch.set_rng_state(state["cpu"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
        tracker = get_cuda_rng_tracker()
        saved = {name.removeprefix(_TRACKER): tensor for name, tensor in state.items() if name.startswith(_TRACKER)}
        tracker.set_states(tracker.get_states() | saved)


_TRACKER = "tracker."


def save_rank_state(directory: Path, rank: int, components: Mapping[str, State]) -> None:
    """Write this rank's tensors; no file where there are none."""
    tensors = {
        f"{name}/{key}": value.cpu().contiguous()
        for name, state in components.items()
        for key, value in state.items()
        if torch.is_tensor(value)
    }
    if tensors:
        save_file(tensors, _path(directory, rank))


def with_rank_state(components: Mapping[str, State], directory: Path, rank: int) -> dict[str, State]:
    """Return the components' states, to which this rank's tensors are added.

    Raises:
        CheckpointError: a file cannot be read.
    """
    whole, path = {name: dict(state) for name, state in components.items()}, _path(directory, rank)
    try:
        tensors = load_file(path) if path.exists() else {}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint file {str(path)!r} cannot be read ({error})") from error
    for name, tensor in tensors.items():
        component, _, key = name.partition("/")
        whole.setdefault(component, {})[key] = tensor
    return whole


def _path(directory: Path, rank: int) -> Path:
    return directory / f"state_rank_{rank:05d}.safetensors"
