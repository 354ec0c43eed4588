"""A training step, and a whole GRPO step with a reward that costs nothing."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron_rl.algorithms.batch import Sample
from megatron_rl.algorithms.extension import advantage_of
from megatron_rl.metrics.timers import PhaseTimer
from megatron_rl.models.gpt import build_model
from megatron_rl.platform.groups import seed_everything
from megatron_rl.quantization.linears import QuantizedLinears
from megatron_rl.registry import RECIPES
from megatron_rl.rollout.rollouter import Rollouter
from megatron_rl.signals import StopRequest
from megatron_rl.trainer.batches import BatchBuilder
from megatron_rl.trainer.samples import SampleBuilder
from megatron_rl.types import Grade, Task, Transcript
from tools.benchmark.common import benchmark_config
from tools.benchmark.on_gpu.engines import GRAPHS, open_engine
from tools.benchmark.on_gpu.measure import Bench, Row, guarded
from tools.benchmark.on_gpu.shapes import training_flops, utilisation
from tools.benchmark.update import make_samples, make_trainer, our_update

OPTIMIZER = ("--use-distributed-optimizer", "--lr-decay-style=constant", "--clip-grad=1.0")


def training(bench: Bench) -> Iterator[Row]:
    """Updates of the 0.5B on packed samples: forward, backward, optimizer.

    All of the context's length, then of log-normal lengths, as many tokens and each time others: a library that
    prepares something for each new shape shows there. Then of equal lengths with products by block in fp8
    (`--rl-train-forward quantized`, with `--rl-train-backward quantized`); `requantise` has what the copies cost.
    ``over_equal`` compares the times with those of the first.
    """
    bench.forget()
    sizes, shape = bench.sizes, bench.sizes.small
    config = benchmark_config(
        shape, sizes.context, "--bf16", f"--rl-sequence-packing-bin-size={sizes.bin_tokens}", "--rl-correction=none",
        *OPTIMIZER, *bench.flags,
    )  # fmt: skip
    seed_everything(1)
    policy = build_model(config, bench.platform, shape.vocab)
    update = our_update(policy, config, bench.groups)
    tokens = sizes.samples * sizes.context
    equal = [[sizes.context] * sizes.samples]
    unequal = [log_normal_lengths(tokens, sizes.context, seed) for seed in range(sizes.repeats + 2)]
    first = 0.0

    def row(took: float, lengths: Sequence[int]) -> Row:
        mfu = utilisation(training_flops(shape, lengths), took, bench.peak)
        return {"samples": len(lengths), "tokens": tokens, "ms": 1e3 * took, "tokens_per_second": tokens / took,
                "over_equal": took / first, "mfu": mfu}  # fmt: skip

    for name, every in (("equal", equal), ("log-normal", unequal)):
        turns = itertools.cycle([samples_of(lengths, shape.vocab) for lengths in every])
        took = bench.seconds(lambda turns=turns: update(next(turns)))
        bench.profile(f"{name} lengths", lambda turns=turns: update(next(turns)))
        first = first or took
        yield {"model": shape.name, "lengths": name, "format": "bf16", **row(took, every[0])}
    samples = samples_of(equal[0], shape.vocab)

    def in_fp8(both: bool) -> Iterator[Row]:
        linears = QuantizedLinears(policy.gpt, RECIPES.get("fp8_block"), quantizes_gradients=both)
        with linears.installed():
            yield row(bench.seconds(lambda: update(samples)), equal[0])

    for name, both in (("fp8 forward", False), ("fp8 forward and backward", True)):
        yield from guarded(in_fp8(both), {"model": shape.name, "lengths": "equal", "format": name})


def log_normal_lengths(tokens: int, longest: int, seed: int, least: int = 8) -> list[int]:
    """Lengths up to ``longest``, of which most are about a quarter of it; together ``tokens``."""
    draw, lengths, left = random.Random(seed), [], tokens
    while left:
        drawn = int(draw.lognormvariate(math.log(longest / 4), 0.7))
        length = min(max(least, drawn), longest - least)
        length = left if left - length < least else length  # no rest that is too short for a sample
        lengths.append(length)
        left -= length
    return lengths


def samples_of(lengths: Sequence[int], vocab: int) -> list[Sample]:
    """Samples of these lengths, half of each a prompt."""
    made = [
        make_samples(1, vocab, length // 2, length - length // 2, equal=True, seed=number)[0]
        for number, length in enumerate(lengths)
    ]
    return [replace(sample, sample_id=number) for number, sample in enumerate(made)]


def grpo(bench: Bench) -> Iterator[Row]:
    """A GRPO step of the 0.5B with two updates, rolled out in bf16 and in fp8; CUDA graphs where they are built."""
    graphs = GRAPHS if bench.platform.is_cuda else ()
    for recipe in ("none", "fp8"):
        flags = (f"--rl-rollout-quantization={recipe}", *graphs)
        labels = {"model": bench.sizes.small.name, "rollouts": recipe, "graphs": bool(graphs)}
        yield from guarded(_grpo(bench, flags), labels)


async def _dummy_reward(environment: str, items: Sequence[tuple[Task, Transcript]]) -> list[Grade]:
    """0 and 1 in turns: every group has a signal, so that all answers are trained on."""
    del environment
    return [Grade(float(place % 2)) for place, _ in enumerate(items)]


def _grpo(bench: Bench, flags: Sequence[str]) -> Iterator[Row]:
    bench.forget()
    sizes, shape = bench.sizes, bench.sizes.small
    batch, length = sizes.prompts * sizes.group, 2 * sizes.answer_tokens
    rolling = open_engine(
        bench, shape, batch=batch, length=length,
        flags=[f"--grpo-group-size={sizes.group}", f"--grpo-prompts-per-step={sizes.prompts}",
               f"--global-batch-size={batch // 2}", f"--rl-sequence-packing-bin-size={sizes.bin_tokens}",
               *OPTIMIZER, *flags],
    )  # fmt: skip
    config, groups, timer = rolling.config, bench.groups, PhaseTimer(sync=bench.platform.synchronize)
    advantage = advantage_of(config)
    trainer = make_trainer(rolling.policy, config, groups, timer, advantage)
    rollouter = Rollouter(rolling.engine, rolling.tokenizer, groups, _dummy_reward, StopRequest())
    builder = SampleBuilder(advantage.BASELINE, False, groups)
    batches = BatchBuilder(sizes.bin_tokens, 1, bench.device, groups)
    requests = rolling.requests(
        prompts=sizes.prompts, copies=sizes.group, prompt_tokens=sizes.answer_tokens, new_tokens=sizes.answer_tokens
    )
    try:
        for step in range(3):  # the first compiles, fills caches and audits; the last one counts
            bench.platform.synchronize()
            started = time.perf_counter()
            with timer.phase("gen"), rolling.rollouts():
                rollouts = rollouter.run(requests, step, step)
            with timer.phase("advantages"):
                samples, rewards = builder.build(rollouts.groups, [request.index for request in requests], 0)
                updates = batches.updates(samples, batch // 2, step)
            trainer.step(updates, rewards)
            rolling.quantization.weights_changed()
            bench.platform.synchronize()
            took, phases = time.perf_counter() - started, timer.collect()
    finally:
        rollouter.close()
    trained = sum(sample.length for sample in samples)
    yield {"ms": 1e3 * took, "answers": batch, "generated_tokens": rollouts.statistics.generated_tokens,
           "trained_tokens": trained, "tokens_per_second": batch * length / took,
           **{name.removeprefix("timing_s/") + "_ms": 1e3 * value for name, value in phases.items()}}  # fmt: skip
