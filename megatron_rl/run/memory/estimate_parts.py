"""What the estimate adds up, from flags and a rank's `ModelLayout`: training state, activations, logits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from megatron_rl.arithmetic import FEWEST_LOGIT_ROWS, PRODUCT_ELEMENTS, TILE
from megatron_rl.config.rl_config import RLConfig
from megatron_rl.families import ExpertShare, Layer, Linear, ModelLayout, Parameter, Stages
from megatron_rl.families.blocks import blocks_of
from megatron_rl.families.layout import cache_of
from megatron_rl.families.lora import Lora, adapters_of
from megatron_rl.quantization.shapes import skipped

FP32 = 4
_PARAMETER_START = 64
_BUCKET_END = 128
"""Multiples, in numbers, at which megatron's distributed optimizer starts a parameter and ends a bucket."""
_BUCKET = 40_000_000
_BUCKET_A_REPLICA = 1_000_000
"""Megatron's numbers in a bucket: the first, or with more than 40 replicas the second times the replicas."""


@dataclass(frozen=True)
class TrainingState:
    """The bytes of a model that training holds on one rank."""

    numbers: int
    """Parameters."""
    weights: int
    gradients: int
    optimizer: int
    kept: int
    """Of the optimizer's, all but fp32 gradients."""


NO_STATE = TrainingState(0, 0, 0, 0, 0)


def training_state(
    config: RLConfig, layout: ModelLayout, copies: int, world_size: int, lora: Lora | None = None,
    on_another: bool = False,
) -> TrainingState:  # fmt: skip
    """Return the bytes of a rank with ``layout``, whose weights ``copies`` ranks have. With ``lora`` all but adapters
    is frozen, and with ``on_another`` that is another model's.
    """
    number = 2 if config.precision.bf16 else FP32
    gradient = FP32 if config.precision.accumulate_allreduce_grads_in_fp32 else number
    kept_as_they_are = (p for p in layout.parameters if lora and not (p.is_value_head or p.is_buffer))
    frozen = 0 if on_another else sum(parameter.size for parameter in kept_as_they_are)
    buffers = _buffers(config, trained_parameters(layout, lora), copies, world_size)
    buffer = updated = 0
    for sizes, owners in buffers:
        padded = _buffer_elements(sizes, config, owners, layout.is_first)
        # Of the rank with the largest shard; the buffer's padding has no state, but a shard may be all parameters.
        updated += min(sum(sizes), padded // owners) if config.parallel.use_distributed_optimizer else sum(sizes)
        buffer += padded
    kept = FP32 * int(config.precision.bf16) * updated  # fp32 parameters are their own main parameters
    if config.optimizer.optimizer == "adam":
        sizes = [size for each, _ in buffers for size in each]
        for dtype in (config.precision.exp_avg_dtype, config.precision.exp_avg_sq_dtype):
            kept += _moment_bytes(dtype, sizes, updated)
    else:
        kept += FP32 * int(config.optimizer.sgd_momentum > 0) * updated
    fixed = 0 if on_another else sum(parameter.size for parameter in layout.parameters if parameter.is_buffer)
    return TrainingState(
        numbers=frozen + sum(sum(sizes) for sizes, _ in buffers) + fixed,
        # With the distributed optimizer parameters lie in a buffer that is padded like the gradients'.
        weights=(frozen + buffer) * number + FP32 * fixed,
        gradients=buffer * gradient,
        optimizer=kept + (FP32 * updated if gradient != FP32 else 0),
        kept=kept,
    )


def _moment_bytes(dtype: str, sizes: Sequence[int], updated: int) -> int:
    """Of one moment of ``updated`` numbers of parameters of ``sizes``; in fp8 blocks of 128 with an fp32 scale each."""
    if dtype != "fp8":
        return updated * (2 if dtype == "bf16" else FP32)
    blocks = sum(-(-size // TILE) for size in sizes)
    return math.ceil(blocks * updated / sum(sizes)) * (TILE + FP32)


def trained_parameters(layout: ModelLayout, lora: Lora | None) -> list[Parameter]:
    """Return all of a rank, or adapters and a critic's head."""
    if lora is None:
        return list(layout.parameters)
    heads = (parameter for parameter in layout.after if parameter.is_value_head)
    return [*(parameter for part in adapters_of(layout, lora) for parameter in (part.a, part.b)), *heads]


def _buffers(
    config: RLConfig, parameters: Iterable[Parameter], copies: int, world_size: int
) -> list[tuple[list[int], int]]:
    """Sizes of the parameters that share a gradient buffer, and how many ranks hold the same; experts on several ranks
    have one of their own.
    """
    are_shared = config.parallel.expert_model_parallel_size > 1
    kinds: dict[bool, list[int]] = {False: []}
    for parameter in (each for each in parameters if not each.is_buffer):
        kinds.setdefault(are_shared and parameter.is_of_an_expert, []).append(parameter.size)
    return [(sizes, world_size // config.expert_parallel_ranks if kind else copies) for kind, sizes in kinds.items()]


def _buffer_elements(sizes: Iterable[int], config: RLConfig, replicas: int, in_buckets: bool) -> int:
    """Numbers in the contiguous buffer of megatron's DDP; ``sizes`` in the model's order.

    With the distributed optimizer parameters start aligned and buckets can be cut into equal shards. megatron has no
    buckets but on the first pipeline stage.
    """
    sharded = config.parallel.use_distributed_optimizer
    in_buckets = in_buckets and config.parallel.overlap_grad_reduce
    bucket = max(_BUCKET, _BUCKET_A_REPLICA * replicas) if in_buckets else None
    bucket_end = math.lcm(replicas, _BUCKET_END)
    bucket_start = end = 0
    for size in reversed(list(sizes)):
        end = (_round_up(end, _PARAMETER_START) if sharded else end) + size
        if bucket is not None and end - bucket_start >= bucket:
            bucket_start = end = _round_up(end, bucket_end) if sharded else end
    return _round_up(end, bucket_end) if sharded else end


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def activation_elements(config: RLConfig, layout: ModelLayout, stage: int = 0) -> int:
    """Count the numbers alive at the start of the backward pass, without logits; of the parameters' type. Approximate.

    Numbers kept a layer, with C context-parallel ranks, T = tokens of the bin / C, S = T / tensor-parallel size under
    `--sequence-parallel` (else T), hidden h, and q, k, v, f the widths of queries, keys, values and the MLP on one
    tensor-parallel rank::

        norms               4 S h               inputs and outputs of the two
        attention           T (3 q + k + v)     rotated q, k and v, the result padded and packed
          with qk norms     + T (2 q + k + v)   the projection itself, and q once more
          core recomputed   T (3 q + 2 k + v)   the projection, rotated q and k, the result
          both              T (4 q + 2 k + v)   the same, and q once more
        MLP                 3 T f               SwiGLU: fc1 counts twice, and its product; shared experts, too
          other gates       5 T f               the gate after its activation and the other half, too
          without gate      2 T f
          recomputed        0

    With C > 1 there are, of one layer at a time, the keys and values of all ranks and those that this one's spans see,
    C T (2 + 1 / 2 C) (k + v).
    Layers recomputed as a whole keep their input S h, once a group, and one group at a time is alive in full. What is
    kept counts once for every micro-batch that a pipeline stage has begun: see `_in_flight`.
    Not in it: padding between sequences of different lengths, statistics of norms and softmax, gradients of
    activations, and what only CPUs keep: the score matrices of short sequences.
    """
    kernels, tokens = config.kernels, config.padded_bin_size
    border = tokens // config.sequence_shares * config.model.hidden_size
    ends = 2 * border if layout.is_last else 0  # the final norm's input and output
    layers = [4 * border + _inner_elements(layer, config) for layer in layout.layers]
    kept, alive, count = sum(layers), 0, kernels.recompute_num_layers
    if kernels.recompute_granularity == "full" and kernels.recompute_method == "uniform":
        kept, alive = math.ceil(len(layers) / count) * border, count * max(layers)
    elif kernels.recompute_granularity == "full":
        count = min(count * config.stages.chunks, len(layers))  # of each chunk
        kept, alive = count * border + sum(layers[count:]), 0 if layers[count:] else max(layers)
    size = config.parallel.context_parallel_size
    heads = replace(layout.architecture, rl_mla_absorb=False)  # training has no latents in their place
    each = max(cache_of(layer.kind, heads, layout.tensor_size).numbers(1) for layer in layout.layers)
    gathered = each * (2 * tokens + tokens // (2 * size))
    return math.ceil(kept * _in_flight(config.stages, stage)) + alive + ends + (gathered if size > 1 else 0)


def _in_flight(stages: Stages, stage: int) -> float:
    """Micro-batches whose activations a stage holds at once, where an update has enough of them.

    The first of 4 stages begins 4 before the first comes back. With 2 chunks a stage: 7 half ones for the way to the
    last stage and back, and 4 for the chunk in between.
    """
    after = stages.count - stage - 1
    if stages.chunks == 1:
        return after + 1
    return (2 * after + 1 + (stages.chunks - 1) * stages.count) / stages.chunks


def _inner_elements(layer: Layer, config: RLConfig) -> int:
    """Of attention and MLP."""
    parallel, recomputed = config.parallel, config.kernels.recompute_modules or ()
    share = ExpertShare(tensor_size=parallel.expert_tensor_parallel_size)
    sizes = config.architecture(), parallel.tensor_model_parallel_size, share
    mixer, mlp = blocks_of(layer.kind)
    kept = mixer.kept(*sizes, "core_attn" in recomputed) + mlp.kept(*sizes, "mlp" in recomputed)
    return config.padded_bin_size // parallel.context_parallel_size * kept


def quantized_linears(config: RLConfig, layout: ModelLayout) -> list[Linear]:
    """Return those that rollouts run on quantised copies."""
    skip = config.quantization.rl_quantization_skip
    return [linear for linear in layout.linears if not skipped(linear.name, skip, config.model.num_layers)]


def read_in_rollouts(config: RLConfig, layout: ModelLayout) -> int | None:
    """Count parameters that quantised rollouts read unquantised; None where the others must stay."""
    made_again = config.precision.bf16 and config.parallel.use_distributed_optimizer
    is_quantized = config.quantization.rl_rollout_quantization != "none"
    made_again &= config.lora.lora_rank is None  # frozen weights are nowhere else
    made_again &= not config.precision.fp8_param_gather  # copies are made of these
    if not is_quantized or not made_again or "weights" in config.rollout.rl_keep_in_rollouts:
        return None
    replaced = sum(linear.rows * linear.columns for linear in quantized_linears(config, layout))
    return sum(parameter.size for parameter in layout.parameters) - replaced


def training_logits(config: RLConfig, layout: ModelLayout, number: int, *, learns: bool = True) -> int:
    """Count the bytes of a bin, where the head is: in the model's type, with their gradient written over them.

    Beside them, in a model that ``learns``, the gradient of the output layer's weight. Fused with that layer a few rows
    of logits at a time, and the weight's gradient also in fp32.
    """
    if not layout.is_last:
        return 0
    tokens = config.padded_bin_size // config.parallel.context_parallel_size
    columns = layout.padded_vocab_size // layout.tensor_size
    weight = columns * config.model.hidden_size if learns else 0
    if not config.kernels.rl_fused_output_layer:
        return (tokens * columns + weight) * number
    rows = min(tokens, max(FEWEST_LOGIT_ROWS, PRODUCT_ELEMENTS // columns))
    return rows * columns * number + weight * (FP32 + (number if number < FP32 else 0))
