"""Switch one model between its two phases, in place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from megatron.core.distributed import DistributedDataParallel

from megatron_rl.models.gpt import PolicyModel

_SWITCHES = ("sequence_parallel", "scatter_to_sequence_parallel", "reduce_scatter_embeddings")
"""Attributes by which megatron's modules cut a sequence over the tensor-parallel ranks."""


@contextlib.contextmanager
def rollout_mode(
    policy: PolicyModel, wrapped: DistributedDataParallel | None = None
) -> Iterator[None]:
    """Evaluation mode, all parameters gathered, sequence parallelism off.

    Sequence parallelism would cut a decode batch of one token a row into uneven pieces; the
    results are the same without it. ``wrapped`` is given in training runs: with
    `--overlap-param-gather` the updated parameters are still on their way after the optimizer
    step, and a rollout on half of them would be silently stale.
    """
    hooked = wrapped is not None and wrapped.ddp_config.overlap_param_gather
    if hooked:
        wrapped.disable_forward_pre_hook(param_sync=True)
    policy.gpt.eval()
    try:
        with _whole_sequences(policy):
            yield
    finally:
        if hooked:
            wrapped.enable_forward_pre_hook()
        policy.gpt.train()


@contextlib.contextmanager
def _whole_sequences(policy: PolicyModel) -> Iterator[None]:
    """Sequence parallelism off, and what was on on again.

    megatron's `set_model_to_sequence_parallel` remembers the modules of a model by ``id(model)`` for ever: a model
    made where another one lay before kept its sequence parallelism, and the modules of the old one were never freed.
    """
    if not policy.config.sequence_parallel:
        yield
        return
    owners = (policy.config, *policy.gpt.modules())
    on = [(owner, name) for owner in owners for name in _SWITCHES if getattr(owner, name, None) is True]
    for owner, name in on:
        setattr(owner, name, False)
    try:
        yield
    finally:
        for owner, name in on:
            setattr(owner, name, True)

