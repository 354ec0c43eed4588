"""Gaps between megatron's distributed optimizer and torch's Adam when a state is loaded.

megatron-core writes its checkpoints for the fused Adams of Transformer Engine and Apex. Without them
torch's Adam takes their place, whose step counter is a tensor for every parameter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_rl.trainer import Optimization


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


def load_state(optimization: Optimization, state: dict[str, Any], gathered: Sequence[Any] = ()) -> None:
    """Put a loaded state in place. Rates and decays stay as configured.

    Args:
        gathered: what megatron's ``get_parameter_state_dp_zero`` gave, for each distributed optimizer; the values
            count on data-parallel rank 0. Empty where ``state`` holds the parameters' state itself.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_settings_kept(optimization))
        for part in _distributed(optimization):
            stack.enter_context(_step_counters_offered(part))
        optimization.optimizer.load_state_dict(state)
        for part, values in zip(_distributed(optimization) if gathered else (), gathered, strict=True):
            with torch.no_grad():  # in fp32 it writes into slices of the model's own parameters
                part.load_parameter_state_from_dp_zero(values)
    _separate_step_counters(optimization)


def _distributed(optimization: Optimization) -> list[DistributedOptimizer]:
    return [part for part in optimization.optimizer.chained_optimizers if isinstance(part, DistributedOptimizer)]


@contextlib.contextmanager
def _settings_kept(optimization: Optimization) -> Iterator[None]:
    """The flags of this run win over the settings that torch stores with an optimizer's state."""
    parts = optimization.optimizer.chained_optimizers
    configured = [[_without(group, "params", "step") for group in part.optimizer.param_groups] for part in parts]
    yield
    for part, settings in zip(parts, configured, strict=True):
        for group, wanted in zip(part.optimizer.param_groups, settings, strict=True):
            group.update(wanted)


@contextlib.contextmanager
def _step_counters_offered(part: DistributedOptimizer) -> Iterator[None]:
    """megatron copies every key the optimizer has and raises KeyError: no ``step`` is in the file.

    It has just loaded the counter from the parameter groups, so that one is offered as the source.
    """
    copy = part._set_main_param_and_optimizer_states

    def with_step(parameter: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        group, place = part.model_param_group_index_map[parameter]
        own = part.optimizer.state[part.optimizer.param_groups[group]["params"][place]]
        copy(parameter, tensors | {"step": own["step"]} if "step" in own else tensors)

    part._set_main_param_and_optimizer_states = with_step
    try:
        yield
    finally:
        del part._set_main_param_and_optimizer_states  # the class's method again


def _separate_step_counters(optimization: Optimization) -> None:
    """Give every parameter its own step counter, on its own device: there the fused Adam counts.

    megatron loads one tensor into all of them; the next step would then count it up once for
    every parameter, and Adam's bias correction would be silently wrong.
    """
    for part in optimization.optimizer.chained_optimizers:
        for parameter, values in part.optimizer.state.items():
            if torch.is_tensor(values.get("step")):
                values["step"] = values["step"].to(parameter.device, copy=True)


def _without(mapping: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {name: value for name, value in mapping.items() if name not in keys}
