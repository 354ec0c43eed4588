"""How the model is spread over ranks and which implementations compute it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron_rl.config.flags import Finding, divisors, flag, nearest_multiples
from megatron_rl.errors import Problem

if TYPE_CHECKING:
    from megatron_rl.config.rl_config import RLConfig

_SPREAD = "a model is spread by tensor and data parallelism"


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Sizes of the parallel groups and their communication."""

    tensor_model_parallel_size: int = flag(1, ge=1, common=True)
    """Ranks that share each layer."""
    pipeline_model_parallel_size: int = flag(1, ge=1, only=_SPREAD)
    """Ranks that share the stack of layers; above 1 not built yet."""
    context_parallel_size: int = flag(1, ge=1, only=_SPREAD)
    """Ranks that share each sequence; above 1 not built yet."""
    expert_model_parallel_size: int = flag(1, ge=1, only=_SPREAD)
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


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """Implementations, fusions and activation recomputation."""

    transformer_impl: Literal["local", "transformer_engine"] = flag("local")
    """Where layers come from (Megatron's default: transformer_engine, whose rollouts here have no quantised copies)."""
    attention_backend: Literal[
        "auto", "sdpa", "flash", "varlen", "triton_paged", "te", "paged", "fused", "unfused", "local"
    ] = flag("auto")
    """Attention kernel; auto takes the fastest present. Megatron's fused, unfused and local are refused."""
    rl_fused_output_layer: bool = flag(False)
    """Train without the logits of a micro-batch in memory, at the cost of one more product of the output layer."""
    enable_cuda_graph: bool = flag(False)
    """Capture the rollout engine's decode step in CUDA graphs; on a CPU, and with experts, it runs eager."""
    cuda_graph_impl: Literal["none", "local", "transformer_engine"] = flag("none")
    """Megatron's newer spelling: local is --enable-cuda-graph. Graphs of Transformer Engine's layers are not built."""
    use_cpu_initialization: bool = flag(False)
    """Draw weights on the CPU: the same numbers at any tensor-parallel size that pads the vocabulary alike.

    Padding goes to a multiple of --make-vocab-size-divisible-by times the size: 128 on one rank and 64 on two agree.
    """
    recompute_granularity: Literal["full", "selective"] | None = flag(
        None, derived=lambda config, _: "selective" if config.kernels.recompute_activations else None
    )
    """Recompute whole layers (full) or --recompute-modules (selective) in the backward pass."""
    recompute_activations: bool = flag(False)
    """Short for --recompute-granularity selective."""
    recompute_method: Literal["uniform", "block"] | None = flag(None)
    """With full: groups of --recompute-num-layers layers (uniform), or only the first ones (block)."""
    recompute_num_layers: int | None = flag(None, ge=1)
    """With full: layers a group (uniform) or layers recomputed (block)."""
    recompute_modules: tuple[Literal["core_attn", "mlp"], ...] | None = flag(
        None, derived=lambda config, _: ("core_attn",) if config.kernels.recompute_granularity == "selective" else None
    )
    """With selective: what is recomputed. Without it core_attn."""


def parallel_problems(config: RLConfig, world_size: int) -> Iterator[Finding]:
    """Sizes that do not divide what they share, and overlap without what it overlaps."""
    parallel, size, parts = config.parallel, config.model_parallel_size, config.parallel.tensor_model_parallel_size
    if world_size % size:
        yield Problem(
            "--tensor-model-parallel-size",
            f"world size {world_size} is not divisible by {size}, the ranks of one copy of the model (tensor x "
            f"pipeline x context parallel size); start {nearest_multiples(world_size, size)} ranks",
        )
    bin_size = config.training.rl_sequence_packing_bin_size
    if parallel.sequence_parallel and bin_size is not None and bin_size % parts:
        yield "rl_sequence_packing_bin_size", (
            f"is not divisible by tensor-parallel size {parts}, which --sequence-parallel needs; use "
            f"{nearest_multiples(bin_size, parts)}"
        )
    for needed in ("use_distributed_optimizer", "overlap_grad_reduce"):
        if parallel.overlap_param_gather and not getattr(parallel, needed):
            other = f"--{needed.replace('_', '-')}"
            yield "overlap_param_gather", f"without {other}: it gathers what the other shards; add {other}"


def kernel_problems(config: RLConfig, _: int) -> Iterator[Finding]:
    """Attention kernels that are refused, and recomputation that does not say of what."""
    kernels, layers, count = config.kernels, config.model.num_layers, config.kernels.recompute_num_layers
    if kernels.attention_backend in ("fused", "unfused", "local"):
        yield "attention_backend", (
            "is refused: it has no kernel for packed sequences and a KV cache here; use auto, sdpa or flash (with "
            "flash-attn installed)"
        )
    if kernels.recompute_granularity == "full":
        if kernels.recompute_activations:
            yield "recompute_activations", "means selective, but --recompute-granularity is full; keep one"
        if kernels.recompute_method is None or count is None:
            yield "recompute_granularity", (
                "needs to know which layers: give --recompute-method uniform --recompute-num-layers 1"
            )
    elif kernels.recompute_method is not None or count is not None:
        yield "recompute_method", (
            "and --recompute-num-layers choose whole layers, which only --recompute-granularity full recomputes; add "
            "it, or leave them out"
        )
    if kernels.recompute_modules is not None and kernels.recompute_granularity != "selective":
        yield "recompute_modules", (
            "chooses parts of a layer, which only --recompute-granularity selective recomputes; add it, or leave them "
            "out"
        )
    if count is not None and layers is not None and count > layers:
        yield "recompute_num_layers", f"is more than the model's {layers} layers; use at most {layers}"
    elif kernels.recompute_method == "uniform" and count and layers and layers % count:
        yield "recompute_num_layers", (
            f"with --recompute-method uniform does not divide the model's {layers} layers into equal groups; use "
            f"{divisors(layers)}"
        )
