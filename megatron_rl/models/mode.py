"""Switch one model between its two phases, in place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.utils import set_model_to_sequence_parallel

from megatron_rl.models.gpt import PolicyModel


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
    sequence_parallel = policy.config.sequence_parallel
    if hooked:
        wrapped.disable_forward_pre_hook(param_sync=True)
    policy.gpt.eval()
    if sequence_parallel:
        set_model_to_sequence_parallel(policy.gpt, set_to=False)
    try:
        yield
    finally:
        if sequence_parallel:
            set_model_to_sequence_parallel(policy.gpt, set_to=True)
        if hooked:
            wrapped.enable_forward_pre_hook()
        policy.gpt.train()

