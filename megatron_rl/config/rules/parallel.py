"""The model's shape against the parallel sizes."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config.rl_config import RLConfig
from megatron_rl.config.rules.wording import Rule, WorldRule, divisors, named, nearest_multiples


def _not_built(config: RLConfig) -> Iterator[str]:
    for name in ("pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size"):
        size = getattr(config.parallel, name)
        if size > 1:
            flag = f"--{name.replace('_', '-')}"
            yield (
                f"{flag} {size} is not built yet in this version; use tensor and data parallelism ({flag} 1)"
            )


def _world_size(config: RLConfig, world_size: int) -> Iterator[str]:
    size = config.model_parallel_size
    if world_size % size:
        yield (
            f"world size {world_size} is not divisible by {size}, the ranks of one copy of the model "
            f"(tensor x pipeline x context parallel size); start {nearest_multiples(world_size, size)} ranks"
        )


def _heads(config: RLConfig) -> Iterator[str]:
    model, parts = config.model, config.parallel.tensor_model_parallel_size
    heads = model.num_attention_heads
    if heads is None:
        return
    if heads % parts:
        yield (
            f"--num-attention-heads {heads} is not divisible by tensor-parallel size {parts}: each rank "
            f"holds whole heads; use --tensor-model-parallel-size {divisors(heads)}"
        )
    if model.hidden_size and model.kv_channels is None:
        yield (
            f"--hidden-size {model.hidden_size} is not divisible by --num-attention-heads {heads}: heads "
            f"share it evenly; use {nearest_multiples(model.hidden_size, heads)}, or give --kv-channels"
        )


def _query_groups(config: RLConfig) -> Iterator[str]:
    model, parts = config.model, config.parallel.tensor_model_parallel_size
    heads, groups = model.num_attention_heads, model.num_query_groups
    if heads is None or groups is None:
        return
    if groups != heads and not model.group_query_attention:
        yield (
            f"--num-query-groups {groups} without --group-query-attention: Megatron would ignore it and use "
            f"{heads}; add --group-query-attention, or leave it out"
        )
    if heads % groups:
        yield (
            f"--num-query-groups {groups} does not divide --num-attention-heads {heads}: groups share the "
            f"query heads evenly; use {divisors(heads)}"
        )
    if groups % parts and parts % groups:
        yield (
            f"--num-query-groups {groups} does not fit tensor-parallel size {parts}: one must divide the "
            f"other; use --tensor-model-parallel-size {divisors(groups)}, or a multiple of {groups}"
        )


def _ffn(config: RLConfig) -> Iterator[str]:
    width, parts = config.model.ffn_hidden_size, config.parallel.tensor_model_parallel_size
    if width is not None and width % parts:
        yield (
            f"{named(config, 'ffn_hidden_size', width, '--hidden-size')} is not divisible by tensor-parallel "
            f"size {parts}: each rank holds an equal share; use {nearest_multiples(width, parts)}"
        )


def _sequence_parallel(config: RLConfig) -> Iterator[str]:
    bin_size, parts = config.training.rl_sequence_packing_bin_size, config.parallel.tensor_model_parallel_size
    if config.parallel.sequence_parallel and bin_size is not None and bin_size % parts:
        what = named(config, "rl_sequence_packing_bin_size", bin_size, "--micro-batch-size x --seq-length")
        yield (
            f"{what} is not divisible by "
            f"tensor-parallel size {parts}, which --sequence-parallel needs; "
            f"use {nearest_multiples(bin_size, parts)}"
        )


def _overlap(config: RLConfig) -> Iterator[str]:
    parallel = config.parallel
    for needed in ("use_distributed_optimizer", "overlap_grad_reduce"):
        if parallel.overlap_param_gather and not getattr(parallel, needed):
            flag = f"--{needed.replace('_', '-')}"
            yield f"--overlap-param-gather without {flag}: it gathers what the other shards; add {flag}"


WORLD_RULES: tuple[WorldRule, ...] = (_world_size,)
RULES: tuple[Rule, ...] = (_not_built, _heads, _query_groups, _ffn, _sequence_parallel, _overlap)
