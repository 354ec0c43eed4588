"""megatron-rl estimate --model MODEL --gpus 64: the layouts that fit, best first, each as flags to paste.

Bytes are those of the estimate. Seconds are on paper, for H100s in nodes of 8, and coarser than docs/scaling.md: trust
the order of two layouts that are 20 % apart, not the figures.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_rl.cli.options import described, take
from megatron_rl.config.arguments import read_flags
from megatron_rl.config.flags import flag
from megatron_rl.config.rl_config import RLConfig, all_flags, resolve
from megatron_rl.config.rules import validate
from megatron_rl.errors import ConfigError
from megatron_rl.main import refuse
from megatron_rl.metrics.console import format_table
from megatron_rl.run.gpu_defaults import MOST_BIN
from megatron_rl.run.memory.estimate import Estimate, estimate, slot_bytes
from megatron_rl.run.preflight.machine import recipe_problems

USABLE = 0.925
"""Of a GPU's memory, by tensors: 74 of 80 GB."""
BANDWIDTH, DENSE, EXPERTS = 0.84 * 3.35e12, 0.6 * 989e12, 0.4 * 989e12
"""Bytes/s of memory, FLOP/s of products in updates, and of the experts' products."""
NODE, LINK, NETWORK = 8, 300e9, 40e9
"""GPUs of a node; bytes/s of a GPU within it and to other nodes."""
REDUCE_S, LAYER_S = 12e-6, 30e-6
"""Seconds of an all-reduce, however small, and of a layer's kernels in a decode step."""
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@dataclass(frozen=True, kw_only=True)
class Question:
    """The flags of the proposal."""

    model: str | None = flag(None)
    """A Hugging Face directory or name."""
    gpus: int = flag(8, ge=1, le=65_536)
    """GPUs of the whole job."""
    gpu_memory: float = flag(80.0, gt=0, le=10_000)
    """GB of one GPU."""
    rows: int = flag(8, ge=1, le=1000)
    """Layouts to list."""


class Sizes(NamedTuple):
    """Numbers of the whole model."""

    dense: int
    """All but the experts."""
    experts: int
    multiplied: int
    """Of ``dense``, without the embedding."""
    active: float
    """Of the experts, those that a token is sent to."""

    @classmethod
    def of(cls, config: RLConfig) -> Sizes:
        """Compute the sizes from the layout of the model on one rank."""
        layout = resolve(config, 1).layout(config.tokenizer.vocab_size or 1)
        experts = sum(each.size for each in layout.parameters if each.is_of_an_expert)
        dense = sum(each.size for each in layout.parameters) - experts
        share = (config.model.moe_router_topk or 1) / (config.model.num_experts or 1)
        return cls(dense, experts, dense - layout.padded_vocab_size * config.model.hidden_size, experts * share)


@dataclass(frozen=True)
class Proposal:
    """A layout that fits."""

    values: dict[str, Any]
    """Field -> value, those that differ from the defaults."""
    result: Estimate
    at_once: int
    """Sequences of full length that a copy of the model decodes at once."""
    rollout_s: float
    update_s: float

    @property
    def flags(self) -> str:
        """The layout as words of a command."""
        flags = {each.name: each for each in all_flags()}
        return " ".join(flags[name].typed(value) for name, value in self.values.items())


def proposes(words: Sequence[str]) -> bool:
    """Return whether ``words`` of `estimate` ask for layouts."""
    return bool({"--gpus", "--gpu-memory"} & {word.partition("=")[0] for word in words})


def main(words: Sequence[str]) -> int:
    """Return 0, 1 if no layout fits, 2 for wrong flags."""
    try:
        asked, rest = take(Question, words)
        if asked.model is None:
            raise ConfigError([f"--model is missing: a Hugging Face directory or name\n{described(Question)}"])
        config = _config(asked, rest)
    except ConfigError as error:
        return refuse(error.problems)
    found = sorted(proposals(config, asked), key=lambda one: one.rollout_s + one.update_s)
    tokens, algorithm = config.training.seq_length, config.algorithm
    samples = f"{algorithm.grpo_prompts_per_step} prompts x {algorithm.grpo_group_size} samples"
    sys.stdout.write(f"{asked.model} on {asked.gpus} GPUs of {asked.gpu_memory:g} GB, {samples}, {tokens:,} tokens\n")
    if not found:
        sys.stdout.write("no layout fits: take more GPUs, --seq-length or a smaller model\n")
        return 1
    rows = [(f"{one.rollout_s + one.update_s:,.0f}", f"{one.rollout_s:,.0f}", f"{one.update_s:,.0f}",
             f"{(one.result.training - one.result.for_rollouts) / 1e9:.0f}",
             f"{(one.result.rollout - one.result.kv_cache.rollout) / 1e9:.0f}", f"{one.at_once:,}", one.flags)
            for one in found[: asked.rows]]  # fmt: skip
    header = ("s/step", "rollout", "update", "GB training", "GB rollout", "sequences at once", "flags")
    sys.stdout.write(f"\n{format_table(header, rows)}\n\n{len(found)} layouts fit; seconds are on paper\n")
    return 0


def _config(asked: Question, rest: Sequence[str]) -> RLConfig:
    defaults = ["--perform-rl-step", "--bf16", "--use-distributed-optimizer", "--seq-length", "4096", "--estimate"]
    defaults += ["--grpo-prompts-per-step", "128", "--grpo-group-size", "8", "--train-iters", "1", "--run-dir", "runs"]
    reading = read_flags([*defaults, "--load-hf", asked.model, *rest])
    if reading.problems:
        raise ConfigError(reading.problems)
    return reading.config


def proposals(config: RLConfig, asked: Question, quantizations: Sequence[str] = ("fp8", "none")) -> Iterator[Proposal]:
    """Yield layouts of `asked.gpus` ranks that the rules allow and the memory holds.

    Of those that differ in recomputation and context parallelism alone: the first that fits, the simplest first.
    """
    usable, sizes = asked.gpu_memory * 1e9 * USABLE, Sizes.of(config)
    experts = (1, 4, 8, 16, 32, 64) if config.model.num_experts else (1,)
    for tensor, pipeline, expert in itertools.product((1, 2, 4, 8), (1, 2, 4, 8), experts):
        numbers = (sizes.dense / tensor + sizes.experts / expert) / pipeline  # weights in bf16, gradients in fp32
        if asked.gpus % (tensor * pipeline) or asked.gpus % (pipeline * expert) or 6 * numbers > usable:
            continue
        values = {
            "tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline,
            "expert_model_parallel_size": expert, "sequence_parallel": tensor > 1,
        }  # fmt: skip
        if sizes.experts and tensor > 1:
            values["expert_tensor_parallel_size"] = 1
        for quantization in quantizations:
            tries = ({"context_parallel_size": context, **more} for context in (1, 2, 4) for more in ({}, FULL))
            given = (values | one | {"rl_rollout_quantization": quantization} for one in tries)
            found = (_proposal(config, one, asked, sizes) for one in given)
            if (first := next(filter(None, found), None)) is None:
                break  # unquantized rollouts need more
            yield first


def _proposal(config: RLConfig, values: dict[str, Any], asked: Question, sizes: Sizes) -> Proposal | None:
    usable, vocabulary = asked.gpu_memory * 1e9 * USABLE, config.tokenizer.vocab_size or 1
    sequences = max(1, MOST_BIN // config.training.seq_length)
    given = values if "micro_batch_size" in config.typed else values | {"micro_batch_size": sequences}
    changed = config.with_values(**given)
    if validate(changed, asked.gpus):
        return None
    one = resolve(changed, asked.gpus)
    ends = sorted({0, one.stages.count - 1})  # the fullest stage has most micro-batches under way, or the head
    result = max((estimate(one, asked.gpus, vocabulary, stage) for stage in ends), key=lambda each: each.training)
    free = usable - (result.rollout - result.kv_cache.rollout)
    at_once = int(free // slot_bytes(one, one.layout(vocabulary)))
    if result.training - result.for_rollouts > usable or at_once < 1 or recipe_problems(one):
        return None
    defaults = {each.name: each.default for each in all_flags()}
    own = {name: value for name, value in given.items() if value not in (defaults[name], None)}
    return Proposal(own, result, at_once, *seconds(one, asked.gpus, result, at_once, sizes))


def seconds(config: RLConfig, gpus: int, result: Estimate, at_once: int, sizes: Sizes) -> tuple[float, float]:
    """Return the seconds of a rollout and of one update, lengths even from 0 to the limit.

    Rollout: a token of all rows reads the weights and the KV cache (a third of the limit in the mean), stage by stage;
    one that waits adds its share of a wave. Update: 2 FLOPs a number and pass, 3 passes or 4 with recomputation, with
    causal attention and the pipeline's bubble, beside the exchange of hidden states and of gradients and parameters.
    """
    parallel, limit = config.parallel, config.rollout.rl_max_new_tokens or config.training.seq_length
    tensor, stages = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    layers, hidden = config.model.num_layers, config.model.hidden_size
    samples = math.ceil(config.samples_per_step / config.rollout_replicas(gpus))
    rows = min(samples, at_once)
    read = result.quantized.rollout + result.weights.rollout
    cached = rows * slot_bytes(config, config.layout()) * limit / config.training.seq_length / 3
    reduces = (2 if tensor > 1 else 0) + (2 if parallel.expert_model_parallel_size > 1 else 0)
    step = (stages * read + cached) / BANDWIDTH + layers * (LAYER_S + reduces * REDUCE_S) * max(1, stages // 2)
    rollout = step * limit * (0.5 + max(0.5, samples / rows / 2))

    attention = layers * config.model.num_attention_heads * (config.model.kv_channels or 0) * limit
    tokens, passes = config.samples_per_step * limit / 2, 4 if config.kernels.recompute_granularity == "full" else 3
    products = 2 * tokens * passes * ((sizes.multiplied + attention) / DENSE + sizes.active / EXPERTS) / gpus
    bins = max(1, tokens / config.data_parallel_size(gpus) / (config.training.rl_sequence_packing_bin_size or limit))
    moved = 4 * passes * layers / stages * 2 * hidden * tokens / config.data_parallel_size(gpus)
    moved *= (tensor - 1) / tensor + (parallel.expert_model_parallel_size > 1)
    slow = LINK if max(tensor, parallel.expert_model_parallel_size) <= NODE else NETWORK
    state = 8 * result.sizes.parameters_per_rank / (LINK if gpus <= NODE else NETWORK * min(NODE, gpus) / tensor)
    return rollout, products * (1 + (stages - 1) / bins) + moved / parallel.context_parallel_size / slow + state
