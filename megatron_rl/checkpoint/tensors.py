"""Weights and optimizer state through megatron's ``dist_checkpointing``.

Any topology can load what any other has saved: weights are stored as logical tensors and the
distributed optimizer in its ``fully_reshardable`` form.
"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from torch.distributed.checkpoint.api import CheckpointException

from megatron_rl.checkpoint.optimizer_state import load_state, make_room
from megatron_rl.checkpoint.result_queue import prepare_result_queue
from megatron_rl.errors import CheckpointError
from megatron_rl.models import PolicyModel
from megatron_rl.platform.megatron import asynchronous_writer
from megatron_rl.trainer import Optimization

_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}
_LONGEST_REASON = 200
"""megatron lists every tensor of the model when one is missing."""


def save_tensors(directory: Path, policy: PolicyModel, optimization: Optimization | None) -> None:
    """Write this job's tensors into ``directory``; collective. None leaves the optimizer out."""
    _save(directory, policy, optimization, in_background=False)


def begin_to_save_tensors(
    directory: Path, policy: PolicyModel, optimization: Optimization | None
) -> AsyncRequest:
    """The same as `save_tensors` up to the writing, which is returned for a background process; collective."""
    return _save(directory, policy, optimization, in_background=True)


def _save(
    directory: Path, policy: PolicyModel, optimization: Optimization | None, in_background: bool
) -> AsyncRequest | None:
    prepare_result_queue()
    state = _state(policy, optimization, loading=False)
    with _quiet():
        strategy = get_default_save_sharded_strategy("torch_dist")
        return dist_checkpointing.save(
            state, str(directory), strategy, async_sharded_save=in_background, **asynchronous_writer()
        )


def load_weights(directory: Path, policy: PolicyModel) -> None:
    """Load the model's weights in place; collective.

    Raises:
        CheckpointError: the checkpoint does not hold this model.
    """
    state = _load(directory, _state(policy, None, loading=True))
    policy.gpt.load_state_dict(state["model"])


def load_all(directory: Path, policy: PolicyModel, optimization: Optimization) -> None:
    """Load weights and optimizer state in place; collective."""
    make_room(optimization)
    state = _load(directory, _state(policy, optimization, loading=True))
    policy.gpt.load_state_dict(state["model"])
    load_state(optimization, state["optimizer"])


def _state(policy: PolicyModel, optimization: Optimization | None, loading: bool) -> dict[str, Any]:
    metadata = ensure_metadata_has_dp_cp_group(dict(_METADATA))
    model = policy.gpt.sharded_state_dict(metadata=metadata)
    state: dict[str, Any] = {"model": model}
    if optimization is not None:
        state["optimizer"] = optimization.optimizer.sharded_state_dict(
            model, is_loading=loading, metadata=metadata
        )
    return state


def _load(directory: Path, state: dict[str, Any]) -> dict[str, Any]:
    try:
        with _quiet():
            return dist_checkpointing.load(
                state, str(directory), get_default_load_sharded_strategy(str(directory))
            )
    except (CheckpointingException, CheckpointException, KeyError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint {str(directory)!r} does not fit this model ({_reason(error)}); "
            "use the flags it was trained with"
        ) from error


def _reason(error: BaseException) -> str:
    """The start of the message; torch's own only counts the ranks on which the real error happened."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    first_line = str(error).strip().splitlines()[0]
    return first_line if len(first_line) <= _LONGEST_REASON else first_line[:_LONGEST_REASON] + " ..."


class _quiet(warnings.catch_warnings):
    """Silences torch's and megatron's deprecation chatter around a save or load."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.simplefilter("ignore")
        self._level = logging.getLogger("megatron.core.dist_checkpointing").level
        logging.getLogger("megatron.core.dist_checkpointing").setLevel(logging.CRITICAL)  # an error is raised too

    def __exit__(self, *details: object) -> None:
        logging.getLogger("megatron.core.dist_checkpointing").setLevel(self._level)
        super().__exit__(*details)
