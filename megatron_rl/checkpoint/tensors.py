"""Weights and optimizer state through megatron's ``dist_checkpointing``: any topology loads what any other saved."""

from __future__ import annotations

import contextlib
import logging
import warnings
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from torch.distributed.checkpoint.api import CheckpointException

from megatron_rl.checkpoint.dist_files import OF_CRITIC
from megatron_rl.checkpoint.saving import ResultQueue
from megatron_rl.errors import CheckpointError, cut
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.models.parameters import sum_over_model
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.platform.megatron import (
    asynchronous_writer,
    groups_known_by_what_they_are,
    parameters_where_they_lie,
    step_counters_offered,
    use_result_queue,
)
from megatron_rl.trainer.optimizer import Optimization

_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}
_WHOLE_NUMBERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
"""Bytes of a number -> what its bits are added up as."""


Model = tuple[PolicyModel, Optimization | None]
"""And its optimizer, if its state is saved or loaded."""


def save_tensors(
    directory: Path,
    policy: PolicyModel,
    optimization: Optimization | None,
    in_background: bool = False,
    critic: Model | None = None,
) -> AsyncRequest | None:
    """Write this job's tensors into ``directory``; collective. None leaves the optimizer out.

    With ``in_background`` nothing is written: what would write is returned, for a process to run.
    """
    use_result_queue(ResultQueue)
    state = _states((policy, optimization), critic, loading=False)
    with _quiet():
        return dist_checkpointing.save(
            state, str(directory), async_sharded_save=in_background, **asynchronous_writer()
        )


def load(
    directory: Path, policy: PolicyModel, optimization: Optimization | None = None, critic: Model | None = None
) -> None:
    """Load weights, and the optimizer's state unless it is None, in place; collective.

    Raises:
        CheckpointError: the checkpoint does not hold this model.
    """
    for _, part in filter(None, ((policy, optimization), critic)):
        if part is not None:
            make_room(part)
    state = _read(directory, _states((policy, optimization), critic, loading=True))
    _take(state, policy, optimization)
    if critic is not None:
        _take(state["critic"], *critic)


def _take(state: dict[str, Any], policy: PolicyModel, optimization: Optimization | None) -> None:
    for name, gpt in named_chunks(policy).items():
        gpt.load_state_dict(state[name])
    if optimization is not None:
        load_state(optimization, _by_part(state["optimizer"], optimization))


def _states(policy: Model, critic: Model | None, loading: bool) -> dict[str, Any]:
    state = sharded_state(*policy, loading)
    if critic is not None:
        state["critic"] = sharded_state(*critic, loading)
        add_prefix_for_sharding(state["critic"], OF_CRITIC)
    return state


def sharded_state(policy: PolicyModel, optimization: Optimization | None, loading: bool) -> dict[str, Any]:
    """What this rank has, in megatron's words for which part of the whole model it is; collective."""
    metadata = ensure_metadata_has_dp_cp_group(dict(_METADATA))
    # Names in the files are those of the whole model: that of a chunk keeps chunks apart in memory alone.
    state: dict[str, Any] = {
        name: gpt.sharded_state_dict(metadata=metadata) for name, gpt in named_chunks(policy).items()
    }
    if optimization is not None:
        models = state["model"] if len(policy.chunks) == 1 else dict(state)
        with parameters_where_they_lie(optimization.optimizer):
            state["optimizer"] = optimization.optimizer.sharded_state_dict(
                models, is_loading=loading, metadata=metadata
            )
    return state


def named_chunks(policy: PolicyModel) -> dict[str, GPTModel]:
    """By Megatron's names: model, or model0, model1, ..."""
    if len(policy.chunks) == 1:
        return {"model": policy.chunks[0]}
    return {f"model{index}": gpt for index, gpt in enumerate(policy.chunks)}


def _read(directory: Path, state: dict[str, Any]) -> dict[str, Any]:
    try:
        with _quiet():
            return dist_checkpointing.load(state, str(directory))
    except (CheckpointingException, CheckpointException, KeyError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint {str(directory)!r} does not fit this model ({_reason(error)}); "
            "use the flags it was trained with"
        ) from error


def _reason(error: BaseException) -> str:
    """The message's first line, as megatron lists every tensor of the model; torch's own only counts ranks."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return cut(str(error).strip().splitlines()[0], 200)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences torch's and megatron's deprecation chatter around a save or load."""
    chatter = logging.getLogger("megatron.core.dist_checkpointing")
    level = chatter.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chatter.setLevel(logging.CRITICAL)  # an error is raised too
        try:
            yield
        finally:
            chatter.setLevel(level)


# -- the optimizer's state -----------------------------------------------------------------------
# megatron-core writes its checkpoints for the fused Adams of Transformer Engine and Apex. Without them torch's Adam
# takes their place, whose step counter is a tensor for every parameter.


def make_room(optimization: Optimization) -> None:
    """Create the state there is to load into: a fresh torch Adam has none.

    The dummy step also moves the weights (decay); load them afterwards.
    """
    for part in optimization.optimizer.chained_optimizers:
        if isinstance(part, DistributedOptimizer):
            part._init_optimizer_states_with_dummy_values()
        elif part.init_state_fn is None:  # megatron has one for Adam only
            part.init_state_fn = _make_momentum


def _make_momentum(optimizer: torch.optim.SGD, config: object = None) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _by_part(state: dict[Any, Any], optimization: Optimization) -> dict[Any, Any]:
    """What was read, in the form that this layout's optimizer takes.

    megatron has an optimizer of its own for experts that lie on several ranks: then states are numbered 0 and 1, else
    there is one without a number. Tensors come as they are asked for, but what is none as it was saved. Of that this
    run needs the count of steps; the rest are settings, and it has its own.
    """
    parts = optimization.optimizer.chained_optimizers
    single = {name: value for name, value in state.items() if not isinstance(name, int)}
    is_single = any("is_expert_parallel" in group for group in _inner(single).get("param_groups", ()))
    saved = single if is_single else state[0]
    if is_single == (len(parts) == 1):
        return state
    own = [state[number] for number in range(len(parts))] if len(parts) > 1 else [single]
    for part, read in zip(parts, own, strict=True):
        _take_settings(read, saved, part.optimizer.param_groups)
    return dict(enumerate(own)) if len(parts) > 1 else single


def _inner(state: dict[str, Any]) -> dict[str, Any]:
    """torch's part of the state of one of megatron's optimizers, which in fp32 is all of it."""
    return state.get("optimizer", state)


def _take_settings(read: dict[str, Any], saved: dict[str, Any], own_groups: Sequence[dict[str, Any]]) -> None:
    if "optimizer" in saved:
        read.setdefault("optimizer", {})
    for name in saved.keys() - read.keys() - {"param_groups", "state"}:
        read[name] = saved[name]
    steps = {name: value for name, value in _inner(saved)["param_groups"][0].items() if name == "step"}
    given = _inner(read).get("param_groups", [{}] * len(own_groups))  # which parameters are in them, or nothing
    _inner(read)["param_groups"] = [
        {name: value for name, value in own.items() if name != "params"} | steps | group
        for own, group in zip(own_groups, given, strict=True)
    ]
    if "common_step" in _inner(saved).get("state", {}):
        _inner(read)["state"]["common_step"] = _inner(saved)["state"]["common_step"]


def load_state(optimization: Optimization, state: dict[str, Any]) -> None:
    """Put a loaded state in place. Rates and decays stay as configured.

    Raises:
        CheckpointError: it is a `DistributedOptimizer`'s and this one is none; the other way round a tensor is missing.
    """
    saved = (state, *(part for part in state.values() if isinstance(part, dict)))
    is_distributed = any(isinstance(part, DistributedOptimizer) for part in optimization.optimizer.chained_optimizers)
    if not is_distributed and any("param_state_sharding_type" in part for part in saved):
        raise CheckpointError(
            "the optimizer's state was saved with --use-distributed-optimizer; add it, or --no-load-optim"
        )
    with contextlib.ExitStack() as stack:
        stack.enter_context(_settings_kept(optimization))
        stack.enter_context(groups_known_by_what_they_are())
        for part in optimization.optimizer.chained_optimizers:
            if isinstance(part, DistributedOptimizer):
                stack.enter_context(step_counters_offered(part))
        optimization.optimizer.load_state_dict(state)
    separate_step_counters(optimization)


@contextlib.contextmanager
def _settings_kept(optimization: Optimization) -> Iterator[None]:
    """The flags of this run win over the settings that torch stores with an optimizer's state."""
    parts = optimization.optimizer.chained_optimizers
    kept = ("params", "step")
    configured = [
        [{name: value for name, value in group.items() if name not in kept} for group in part.optimizer.param_groups]
        for part in parts
    ]
    yield
    for part, settings in zip(parts, configured, strict=True):
        for group, wanted in zip(part.optimizer.param_groups, settings, strict=True):
            group.update(wanted)


def separate_step_counters(optimization: Optimization) -> None:
    """Give every parameter its own step counter, on its own device: there the fused Adam counts.

    megatron loads one tensor into all of them; the next step would then count it up once for
    every parameter, and Adam's bias correction would be silently wrong.
    """
    for part in optimization.optimizer.chained_optimizers:
        for parameter, values in part.optimizer.state.items():
            if torch.is_tensor(values.get("step")):
                values["step"] = values["step"].to(parameter.device, copy=True)


# -- which weights they are ------------------------------------------------------------------------


def fingerprints(policy: PolicyModel, groups: ParallelGroups) -> dict[str, str]:
    """Fingerprints of the model's weights by number format; collective in a model copy.

    A run in bf16 knows that of bf16 alone, one in fp32 both: so the two can be compared.
    """
    formats = {policy.dtype, torch.bfloat16}
    return {
        str(dtype).removeprefix("torch."): f"{weights_fingerprint(policy, groups, dtype):016x}"
        for dtype in sorted(formats, key=str)
    }


def weights_fingerprint(policy: PolicyModel, groups: ParallelGroups, dtype: torch.dtype | None = None) -> int:
    """A sum of all weights' bit patterns, modulo 2^64: another update gives another number.

    The same in every parallel layout, however the vocabulary is padded and the norms are called. Collective in a model
    copy. Reads the device once.

    Args:
        dtype: numbers are rounded to it first; None takes them as they are.
    """
    over_the_vocabulary = {one.name for one in policy.layout.parameters if one.is_over_the_vocabulary}

    def share(name: str, values: torch.Tensor) -> torch.Tensor:
        if name in over_the_vocabulary:
            values = values[: max(0, policy.vocab_size - groups.tensor_group.rank() * len(values))]
        values = values.to(dtype or values.dtype)
        bits = values.view(_WHOLE_NUMBERS[values.element_size()])
        return (zlib.crc32(name.encode()) | 1) * bits.sum(dtype=torch.int64)

    return int(sum_over_model(policy.chunks, groups, share)) % 2**64
