"""How the model and the batch are spread over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_rl.config.fields import flag


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Sizes of the parallel groups and their communication."""

    tensor_model_parallel_size: int = flag(1, ge=1, common=True)
    """Ranks that share each layer."""
    pipeline_model_parallel_size: int = flag(1, ge=1)
    """Ranks that share the stack of layers; above 1 not built yet."""
    context_parallel_size: int = flag(1, ge=1)
    """Ranks that share each sequence; above 1 not built yet."""
    expert_model_parallel_size: int = flag(1, ge=1)
    """Ranks that share the experts; above 1 not built yet."""
    sequence_parallel: bool = flag(False)
    """Spread norms and dropout over the tensor-parallel ranks; off, with a note, without such ranks."""
    use_distributed_optimizer: bool = flag(False)
    """Spread the optimizer state over the data-parallel ranks."""
    overlap_grad_reduce: bool = flag(False)
    """Reduce gradients while the backward pass goes on."""
    overlap_param_gather: bool = flag(False)
    """Gather updated parameters while the forward pass goes on."""
    distributed_backend: Literal["auto", "nccl", "gloo"] = flag("auto")
    """Communication library; auto is nccl on GPUs and gloo on the CPU."""
    distributed_timeout_minutes: int = flag(10, ge=1, le=100_000)
    """A rank that waits longer than this for others, or for anything else, says where, and the job ends."""
    initialize_socket_comms: bool = flag(
        False, note="rollouts and training share one process, so there are no inference sockets to open early"
    )
    """Megatron's warm-up of inference socket communication."""
    data_parallel_random_init: bool = flag(
        False, note="data-parallel replicas must start equal, so every replica draws the same weights"
    )
    """Megatron's different initial weights on each data-parallel rank."""
