"""An optimizer's state as it is loaded, whatever optimizer and layout it was saved with.

megatron-core writes its checkpoints for the fused Adams of Transformer Engine and Apex. Without them torch's Adam takes
their place, whose step counter is a tensor for every parameter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_rl.errors import CheckpointError
from megatron_rl.platform.megatron import match_groups_by_content, offer_step_counters
from megatron_rl.trainer.optimizer import Optimization
from megatron_rl.trainer.precision_aware import PrecisionAwareAdamW


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


def by_part(state: dict[Any, Any], optimization: Optimization) -> dict[Any, Any]:
    """Return what was read, in the form that this layout's optimizer takes.

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
        stack.enter_context(match_groups_by_content())
        for part in optimization.optimizer.chained_optimizers:
            if isinstance(part, DistributedOptimizer) and not isinstance(part.optimizer, PrecisionAwareAdamW):
                stack.enter_context(offer_step_counters(part))
        stack.enter_context(moments_in_fp32(optimization))
        optimization.optimizer.load_state_dict(state)
    separate_step_counters(optimization)


@contextlib.contextmanager
def moments_in_fp32(optimization: Optimization) -> Iterator[None]:
    """Enter a block in which megatron reads and writes fp32 numbers of moments that are stored in bf16 or FP8.

    So a checkpoint is of no dtype and no layout of theirs, and another run may keep them in another one.
    """
    parts = [p for p in optimization.optimizer.chained_optimizers if isinstance(p.optimizer, PrecisionAwareAdamW)]

    def offer(part: DistributedOptimizer) -> None:
        def main(parameter: torch.nn.Parameter) -> torch.Tensor:
            group, place = part.model_param_group_index_map[parameter]
            return part.optimizer.param_groups[group]["params"][place]

        def read(parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
            return {"param": main(parameter), **part.optimizer.read_moments(main(parameter))}

        def write(parameter: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
            main(parameter).copy_(tensors["param"])
            part.optimizer.write_moments(main(parameter), tensors)

        part._get_main_param_and_optimizer_states, part._set_main_param_and_optimizer_states = read, write

    for part in parts:
        offer(part)
    try:
        yield
    finally:
        for part in parts:
            del part._get_main_param_and_optimizer_states, part._set_main_param_and_optimizer_states


@contextlib.contextmanager
def parameters_in_place(optimizer: Any) -> Iterator[None]:
    """Enter a block in which the state of a `DistributedOptimizer` is cut into parameters at the right places.

    megatron gathers it without the padding at the ends of buckets, but counts that padding where it cuts: of what
    comes after a padded bucket, shifted numbers went into checkpoints, without an error. A tied embedding over pipeline
    stages has a bucket of its own, and `--overlap-grad-reduce` has many. Of a single replica it makes copies of up to
    nine times the weights; here that state is given as it lies.
    """
    with contextlib.ExitStack() as stack:
        for part in optimizer.chained_optimizers:
            if isinstance(part, DistributedOptimizer):
                part.get_parameter_state_dp_zero = partial(replica_state, part, part.data_parallel_group.size() == 1)
                stack.callback(delattr, part, "get_parameter_state_dp_zero")  # the class's method again
        yield


class _ByStart(dict[int, torch.Tensor]):
    """Numbers of a buffer's parameters by their start in it; a slice gives a parameter, as of one tensor."""

    def __getitem__(self, place: Any) -> torch.Tensor:
        return super().__getitem__(place.start)


def replica_state(part: DistributedOptimizer, is_alone: bool, **options: Any) -> dict[int, Any]:
    state = {} if is_alone else DistributedOptimizer.get_parameter_state_dp_zero(part, **options)
    for number, (buffer, ranges) in enumerate(zip(part.buffers, part.gbuf_ranges, strict=True)):
        before = accumulate((bucket.numel_unpadded for bucket in buffer.buckets), initial=0)
        padding = [start - unpadded for (start, _), unpadded in zip(buffer.bucket_indices, before, strict=False)]
        (dtype,) = ranges
        pieces = {key: _ByStart() for key in ("param", "exp_avg", "exp_avg_sq")}
        for parameter, (start, end, bucket) in buffer.param_index_map.items():
            place = slice(None) if is_alone else slice(start - padding[bucket], end - padding[bucket])
            own = part._get_main_param_and_optimizer_states(parameter) if is_alone else state[number][dtype]
            for key, piece in pieces.items():
                piece[start] = own[key].detach().cpu().view(-1)[place]
        state[number] = {dtype: pieces}
    return state


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
