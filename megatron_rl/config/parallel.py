"""How the model is spread over ranks and which implementations compute it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron_rl.config.flags import Finding, InUnit, divisors, flag, in_unit, listed, nearest_multiples, second
from megatron_rl.errors import Problem
from megatron_rl.families.architecture import ONE_STAGE, Stages

if TYPE_CHECKING:
    from megatron_rl.config.rl_config import RLConfig

GRAPHS_AFTER = 128
"""Eager decode steps before automatic CUDA graphs. Capturing 16 batch sizes takes seconds, and an eager step 10 to
20 ms more than a replay (0.5B and 7B on an H200), so a shorter job would not win back the capture."""


def _virtual_stages(config: RLConfig, layers_of_each: int) -> int | None:
    layers = config.model.num_layers
    return layers and max(1, layers // (config.parallel.pipeline_model_parallel_size * layers_of_each))


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Parallelism and communication."""

    tensor_model_parallel_size: int = flag(1, ge=1, common=True)
    """Tensor parallelism (TP): ranks that each layer is split over."""
    pipeline_model_parallel_size: int = flag(1, ge=1)
    """Pipeline parallelism (PP): stages that the layers are split into, for training and rollouts."""
    num_virtual_stages_per_pipeline_rank: int | None = flag(
        None, ge=1, aliases=(
            in_unit("--num-layers-per-virtual-pipeline-stage", "num_virtual_stages_per_pipeline_rank", int,
                    _virtual_stages, ge=1),
        ),
    )  # fmt: skip
    """Interleaved pipeline: chunks of layers per rank, e.g. 2; the other spelling gives the layers of a chunk. A
    shorter pipeline bubble for more communication."""
    decoder_first_pipeline_num_layers: int | None = flag(None, ge=1)
    """Layers of the first stage, which also holds the embedding. The other stages share the rest evenly."""
    decoder_last_pipeline_num_layers: int | None = flag(None, ge=1)
    """Layers of the last stage, which also holds the output layer."""
    context_parallel_size: int = flag(1, ge=1)
    """Context parallelism (CP): ranks that each training sequence is split over. In rollouts they act as replicas."""
    expert_model_parallel_size: int = flag(1, ge=1)
    """Expert parallelism (EP): ranks that the experts of each layer are split over, for training and rollouts."""
    expert_tensor_parallel_size: int | None = flag(
        None, ge=1, source="--tensor-model-parallel-size",
        derived=lambda config, _: config.parallel.tensor_model_parallel_size,
    )
    """Ranks that each expert is split over. Default: --tensor-model-parallel-size."""
    sequence_parallel: bool = flag(False)
    """Sequence parallelism: split norms and dropout over the tensor-parallel ranks. Ignored, with a note, if there is
    one rank."""
    use_distributed_optimizer: bool = flag(False)
    """Shard the optimizer state over the data-parallel ranks (ZeRO-1)."""
    overlap_grad_reduce: bool = flag(False)
    """Overlap gradient reduction with the backward pass."""
    overlap_param_gather: bool = flag(False)
    """Overlap the gathering of updated parameters with the forward pass."""
    distributed_backend: Literal["auto", "nccl", "gloo"] = flag("auto")
    """Communication backend; auto is nccl on GPUs and gloo on the CPU."""
    distributed_timeout_minutes: int = flag(10, ge=1, le=100_000)
    """End the job, with the line that waited, if a rank waits longer than this."""


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """Kernels, CUDA graphs and activation recomputation."""

    transformer_impl: Literal["local", "transformer_engine"] = flag("local")
    """Implementation of the transformer layers (Megatron's default: transformer_engine)."""
    attention_backend: Literal[
        "auto", "sdpa", "flash", "varlen", "triton_paged", "paged", "fused", "unfused", "local"
    ] = flag("auto")
    """Attention kernel; auto picks the fastest that runs. Megatron's flash means varlen; fused, unfused and local are
    refused."""
    rl_fused_output_layer: bool = flag(False)
    """Compute log-probs from hidden states in chunks, without holding a micro-batch's logits. Saves memory and costs
    one more GEMM of the output layer."""
    enable_cuda_graph: bool | None = flag(
        None, aliases=(
            second("--cuda-graph-impl", str, lambda name: {"enable_cuda_graph": name == "local"},
                   choices=("local", "none")),
        ),
    )  # fmt: skip
    """Capture decode steps in CUDA graphs, from the first one on. Default: on a GPU, after 128 decode steps, so that
    short jobs capture nothing. No effect on a CPU or when experts are computed in a loop."""
    rl_persist_cuda_graphs: bool = flag(False)
    """Keep the CUDA graphs when the KV cache is released for an update, at reserved addresses. By default they are
    captured again."""
    deterministic_mode: bool = flag(False)
    """Make training on a GPU bitwise reproducible: the same batches give the same weights. Updates are slower."""
    batch_invariant_mode: bool = flag(False)
    """Make a token's log-prob bitwise equal in rollouts and training, whatever else is in the batch. For a GPU with
    --bf16; implies --deterministic-mode."""
    use_cpu_initialization: bool = flag(False)
    """Initialize weights on the CPU, which gives the same numbers on every machine."""
    recompute_granularity: Literal["full", "selective"] | None = flag(
        None, aliases=(second("--recompute-activations", bool, lambda _: {"recompute_granularity": "selective"}),)
    )
    """Activation recomputation: full recomputes whole layers, selective (--recompute-activations) the
    --recompute-modules."""
    recompute_method: Literal["uniform", "block"] | None = flag(None)
    """With full: uniform recomputes groups of --recompute-num-layers layers, block only the first that many."""
    recompute_num_layers: int | None = flag(None, ge=1)
    """With full: layers in a group (uniform) or layers recomputed (block), e.g. 1."""
    recompute_modules: tuple[Literal["core_attn", "mlp"], ...] | None = flag(
        None, derived=lambda config, _: ("core_attn",) if config.kernels.recompute_granularity == "selective" else None
    )
    """With selective: the modules to recompute, e.g. core_attn mlp. Default: core_attn."""

    @property
    def is_deterministic(self) -> bool:
        """The trainer is to repeat its bits."""
        return self.deterministic_mode or self.batch_invariant_mode

    @property
    def graphs_after(self) -> int | None:
        """Eager decode steps before a GPU captures graphs: 0 if the user asks for them; None: they are switched off."""
        asked = self.enable_cuda_graph
        return GRAPHS_AFTER if asked is None else 0 if asked else None

    @property
    def keeps_graphs(self) -> bool:
        """The addresses that they read are to stay."""
        return self.graphs_after is not None and self.rl_persist_cuda_graphs


def parallel_problems(config: RLConfig, world_size: int) -> Iterator[Finding]:
    """Report sizes that do not divide the world size, and overlap without what it overlaps."""
    parallel, size = config.parallel, config.model_parallel_size
    needed = math.lcm(size, config.expert_parallel_ranks)
    if world_size % size:
        yield Problem(
            "--tensor-model-parallel-size",
            f"world size {world_size} is not divisible by {size}, the ranks of one copy of the model (tensor x "
            f"pipeline x context parallel size); start {nearest_multiples(world_size, needed)} ranks",
        )
    elif world_size % needed and config.model.num_experts is not None:
        yield "expert_model_parallel_size", (
            f"does not fit world size {world_size}, which is not divisible by {config.expert_parallel_ranks}, the "
            "ranks that hold all experts (expert x expert tensor x pipeline parallel size); start "
            f"{nearest_multiples(world_size, needed)} ranks"
        )
    for needed in ("use_distributed_optimizer", "overlap_grad_reduce"):
        if parallel.overlap_param_gather and not getattr(parallel, needed):
            other = f"--{needed.replace('_', '-')}"
            yield "overlap_param_gather", f"without {other}: it gathers what the other shards; add {other}"


def pipeline_problems(config: RLConfig, _: int) -> Iterator[Finding]:
    """Report layers that stages cannot share."""
    layers, stages = config.model.num_layers, config.stages
    size, chunks = stages.count, stages.chunks
    uneven = [f"--decoder-{end}-pipeline-num-layers" for end in ("first", "last") if getattr(stages, end) is not None]
    if size == 1:
        interleaved = ["--num-virtual-stages-per-pipeline-rank"] if chunks > 1 else []
        for name in (*uneven, *interleaved):
            yield Problem(name, f"{name} without --pipeline-model-parallel-size above 1 has no stages; leave it out")
        return
    given = config.typed.get("num_virtual_stages_per_pipeline_rank")
    if isinstance(given, InUnit) and layers and given.number * size * chunks != layers:
        yield "num_virtual_stages_per_pipeline_rank", (
            f"does not cut --num-layers {layers} into chunks for {size} stages; use --num-layers-per-virtual-"
            f"pipeline-stage {divisors(layers // size)}, or --num-virtual-stages-per-pipeline-rank"
        )
        return
    if layers and not stages.sizes(layers):
        yield "pipeline_model_parallel_size", _cannot_share(layers, stages, uneven)


def expert_parallel_problems(config: RLConfig, _: int) -> Iterator[Finding]:
    """Report experts that ranks cannot share."""
    parallel, experts = config.parallel, config.model.num_experts
    size, cut, parts = (
        parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size, parallel.tensor_model_parallel_size
    )  # fmt: skip
    if experts is None:
        for name in ("expert_model_parallel_size", "expert_tensor_parallel_size"):
            if config.typed.get(name, 1) > 1:
                yield name, "without --num-experts: dense layers have no experts to share; leave it out"
        return
    if experts % size:
        yield "expert_model_parallel_size", f"does not divide --num-experts {experts}; use {divisors(experts)}"
    if parts % cut:
        yield "expert_tensor_parallel_size", (
            f"does not divide --tensor-model-parallel-size {parts}, whose ranks cut the experts; use {divisors(parts)}"
        )
    elif size == 1 and cut != parts:
        yield "expert_tensor_parallel_size", (
            "with --expert-model-parallel-size 1: megatron-core would not add up the gradients of the experts' copies; "
            f"use {parts}, or --expert-model-parallel-size {parts // cut}"
        )
    elif parts % (size * cut) and (size * cut) % parts:
        yield "expert_model_parallel_size", (
            f"x --expert-tensor-parallel-size {cut} does not fit --tensor-model-parallel-size {parts}: one must divide "
            f"the other; use {divisors(parts // cut)}, or a multiple of {parts // cut}"
        )


def _cannot_share(layers: int, stages: Stages, uneven: Sequence[str]) -> str:
    given = " and ".join(
        f"{name} {size}" for name, size in zip(uneven, (s for s in (stages.first, stages.last) if s), strict=True)
    )
    chunks = f" in {stages.chunks} chunks each" if stages.chunks > 1 else ""
    if given:
        return (
            f"does not share --num-layers {layers} evenly{chunks}, with {given}: what is left goes to the other stages "
            "in equal parts; use other numbers of layers"
        )
    return (
        f"does not share --num-layers {layers} evenly{chunks}; use {divisors(layers // stages.chunks)}, or give the "
        "first and last stage other numbers with --decoder-first-pipeline-num-layers and "
        "--decoder-last-pipeline-num-layers"
    )


def kernel_problems(config: RLConfig, _: int) -> Iterator[Finding]:
    """Report attention kernels that are not built, and recomputation that does not say of what."""
    kernels, chunks, count = config.kernels, _layers_of_chunks(config), config.kernels.recompute_num_layers
    if kernels.attention_backend in ("fused", "unfused", "local"):
        yield "attention_backend", "has no kernel for packed sequences and a KV cache here; use auto, sdpa or flash"
    if kernels.recompute_granularity == "full":
        if kernels.recompute_method is None or count is None:
            yield "recompute_granularity", (
                "needs to know which layers: give --recompute-method uniform --recompute-num-layers 1"
            )
    elif kernels.recompute_method is not None or count is not None:
        text = "and --recompute-num-layers choose layers, as only --recompute-granularity full does; add it"
        yield "recompute_method", f"{text}, or leave them out"
    if kernels.recompute_modules is not None and kernels.recompute_granularity != "selective":
        yield "recompute_modules", "needs --recompute-granularity selective; add it, or leave this out"
    whose = "model's" if config.stages == ONE_STAGE else "smallest chunk's"
    if count is not None and chunks and count > min(chunks):
        yield "recompute_num_layers", f"is more than the {whose} {min(chunks)} layers; use at most {min(chunks)}"
    elif kernels.recompute_method == "uniform" and count and any(size % count for size in chunks):
        whose = "model's" if config.stages == ONE_STAGE else "chunks'"
        yield "recompute_num_layers", (
            f"with --recompute-method uniform does not divide the {whose} {listed(sorted({*chunks}))} layers into "
            f"equal groups; use {divisors(math.gcd(*chunks))}"
        )


def _layers_of_chunks(config: RLConfig) -> list[int]:
    """Return the layers of each chunk, which recomputes for itself; empty where they are not known."""
    layers, stages = config.model.num_layers, config.stages
    return [size // stages.chunks for size in stages.sizes(layers)] if layers else []
