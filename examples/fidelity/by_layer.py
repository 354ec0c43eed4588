#!/usr/bin/env python
"""What 8-bit formats do to recorded answers, which layers make the error, and what it brings to skip those.

    python examples/fidelity/by_layer.py --model MODEL --answers RUN/rollouts/eval_000000.jsonl --out DIR

The answers are those that a run with unquantized rollouts recorded before its first update; every format is scored on
the same tokens in fp32. `DIR/results.json` is written after each figure, and a second call goes on from there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from scored import (
    Answer,
    RoundingCache,
    Study,
    batch_of,
    beginning_at,
    compared,
    described,
    engine_gap,
    quantized,
)  # fmt: skip

from megatron_rl.algorithms import TokenBatch
from megatron_rl.checkpoint.hf.load import load_hf
from megatron_rl.cli.model import model_config
from megatron_rl.families import read_model
from megatron_rl.metrics.console import print_table
from megatron_rl.models.attention.kv_format import rounded_attention
from megatron_rl.models.gpt import build_model
from megatron_rl.platform import current_platform
from megatron_rl.platform.groups import initialize, shut_down
from megatron_rl.quantization.audit import observe_linears
from megatron_rl.quantization.linears import QuantizedLinears
from megatron_rl.quantization.shapes import skipped
from megatron_rl.registry import RECIPES
from megatron_rl.run.generation import build_engine
from megatron_rl.run.preflight.inputs import open_tokenizer

CACHE = "KV cache fp8"
FORMATS = ("int8", "int8_smooth", "fp8", "fp8_block", CACHE, "fp8_tensor", "fp8_block_pow2")
BY_LAYER = ("int8", "fp8")
"""Formats whose error is split by layer."""
CHECK_TOKENS = 12
"""Length of the answer that the engine draws in each format, to be compared with the trainer's quantized pass."""
PARTS = ("formats", "layers", "engine")


class Results:
    """Figures by name, in a file that is written after each of them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.values: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}

    def of(self, name: str, compute: Callable[[], Any]) -> Any:
        """Return the figures of ``name``, computed if they are not in the file."""
        if name not in self.values:
            before = time.process_time()
            self.values[name] = compute()
            seconds = self.values.setdefault("cpu_seconds", {})
            seconds[name] = round(time.process_time() - before, 1)
            self._path.write_text(json.dumps(self.values))
            sys.stderr.write(f"{name}: {seconds[name]} CPU seconds, load {os.getloadavg()[0]:.0f}\n")
        return self.values[name]


def measure_formats(study: Study, results: Results, batch: TokenBatch) -> None:
    """Compare each format with fp32 on all answers. `int8_smooth` is calibrated on their channels, as a run's is."""
    with observe_linears(study.policy.gpt, channels=True) as seen:
        exact = study.scores(batch)
    amax = {name: one.channel_amax for name, one in seen.items()}
    gap = (exact.logprobs - batch.inference_logprobs[batch.in_loss]).abs()
    results.of("format none", lambda: {"tokens": len(gap), "gap": float(gap.mean()), "largest": float(gap.max())})

    def measured(name: str) -> dict[str, float]:
        is_cache = name == CACHE
        inside = rounded_attention(study.policy.layers, RoundingCache(study.policy)) if is_cache else None
        with inside or quantized(study, name, channel_amax=amax):
            return compared(exact, study.scores(batch))

    for name in FORMATS:
        results.of(f"format {name}", partial(measured, name))


def measure_layers(study: Study, results: Results, batch: TokenBatch, skips: Sequence[Sequence[str]]) -> None:
    """Measure with one layer quantized, one kind of linear, one linear of the worst layers; then all but the worst."""
    exact, inputs, linears = described(study, batch, () if "activations" in results.values else BY_LAYER)
    results.of("activations", lambda: linears)
    names, count = list(linears), len(inputs)
    kinds = list(dict.fromkeys(map(kind_of, names)))

    def measured(recipe: str, wanted: Sequence[str]) -> dict[str, float]:
        start = min(map(layer_of, wanted))
        with beginning_at(study.policy.layers, start, inputs[start]), quantized(study, recipe, wanted):
            return compared(exact, study.scores(batch, exact))

    def one(recipe: str, what: str, wanted: Sequence[str]) -> float:
        return results.of(f"{recipe} {what}", partial(measured, recipe, wanted))["kl"]

    for recipe in BY_LAYER:
        one(recipe, "all", names)
        kls = [one(recipe, f"layer {i}", [name for name in names if layer_of(name) == i]) for i in range(count)]
        worst = sorted(range(count), key=lambda index: -kls[index])
        of_kinds = {kind: one(recipe, f"kind {kind}", [n for n in names if kind_of(n) == kind]) for kind in kinds}
        for name in names:
            if layer_of(name) in worst[:2]:
                one(recipe, f"linear {name}", [name])
        sets = [[f"layers.{index}.*" for index in worst[:size]] for size in (1, 2, 4) if size < count]
        for skip in (*sets, [f"layers.*.{max(of_kinds, key=of_kinds.get)}"], *skips):
            wanted = [name for name in names if not skipped(name, skip, count)]
            one(recipe, f"without {' '.join(skip)}", wanted)


def measure_engine(study: Study, results: Results, engines: Mapping[str, Callable], prompt: Sequence[int]) -> None:
    """Compare the engine with the trainer, both in one format; needs memory for the copies of all linears."""

    def measured(name: str) -> dict[str, float]:
        if name == CACHE:
            engine = engines["fp8"]()
            with rounded_attention(study.policy.layers, engine.kv_format):
                return {"engine": engine_gap(study, engine, prompt, CHECK_TOKENS)}
        with QuantizedLinears(study.policy.gpt, RECIPES.get(name)).installed():
            return {"engine": engine_gap(study, engines["auto"](), prompt, CHECK_TOKENS)}

    for name in FORMATS:
        results.of(f"engine {name}", partial(measured, name))


def layer_of(name: str) -> int:
    """Return the number of the layer of ``layers.3.mlp.linear_fc1``."""
    return int(name.split(".")[1])


def kind_of(name: str) -> str:
    """Return ``mlp.linear_fc1`` of ``layers.3.mlp.linear_fc1``."""
    return name.split(".", 2)[2]


def answers_of(files: Sequence[Path], prompts: int, samples: int) -> list[Answer]:
    """Read the first ``samples`` sampled answers to each of the first ``prompts`` prompts from rollout records."""
    found: dict[tuple[int, ...], list[Answer]] = {}
    for row in (json.loads(line) for file in files for line in file.read_text().splitlines()):
        if not row.get("greedy") and not row["policy_version"]:
            answer = row["prompt_ids"], row["token_ids"], row["inference_logprobs"]
            found.setdefault(tuple(row["prompt_ids"]), []).append(answer)
    return [answer for own in list(found.values())[:prompts] for answer in own[:samples]]


def report(values: Mapping[str, Any]) -> None:
    """Print the tables: formats, parts of the model and what skipping brings, activations by linear."""
    measures = ("tokens", "gap", "p95", "largest", "k3", "kl", "kl_error", "top1", "engine")
    rows = [
        (name, *(f"{row[measure]:.3g}" if measure in row else "" for measure in measures))
        for name, row in values.items()
        if name not in ("activations", "cpu_seconds")
    ]
    print_table(sys.stdout, ("", *measures), rows)
    linears = sorted(values.get("activations", {}).items(), key=lambda item: -item[1]["largest"] / item[1]["median"])
    cells = [(name, *(f"{number:.3g}" for number in row.values())) for name, row in linears]
    print_table(sys.stdout, ("linear", *(linears[0][1] if linears else ())), cells)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="as --load-hf")
    parser.add_argument("--answers", type=Path, nargs="+", required=True, help="rollout records, JSONL")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--probes", type=int, default=2, help="prompts whose answers the figures by layer are of")
    parser.add_argument("--skip", nargs="+", action="append", default=[], help="patterns to skip, as one more row")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    results = Results(options.out / "results.json")
    config = model_config(options.model, ["--seq-length", "512", "--rl-max-new-tokens", "64"], 1, 1)
    groups, tokenizer = initialize(config.parallel, current_platform()), open_tokenizer(config)
    study = Study(build_model(config, current_platform(), tokenizer.vocab_size), groups)
    load_hf(read_model(options.model), study.policy, groups)
    answers = answers_of(options.answers, options.prompts, options.samples)
    if "formats" in options.parts:
        measure_formats(study, results, batch_of(answers, study.policy.device))
    if "layers" in options.parts:
        few = answers_of(options.answers, options.probes, options.samples)
        measure_layers(study, results, batch_of(few, study.policy.device), options.skip)
    if "engine" in options.parts:
        engines = {
            kind: partial(
                build_engine, config.with_values(rl_kv_cache_dtype=kind), study.policy, tokenizer, groups
            )
            for kind in ("auto", "fp8")
        }
        measure_engine(study, results, engines, answers[0][0])
    report(results.values)
    shut_down()
    return 0


if __name__ == "__main__":
    sys.exit(main())
