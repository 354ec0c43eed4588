#!/usr/bin/env python
"""What 8-bit formats do to one set of answers, which layers make the error, and what it helps to skip those.

    python examples/fidelity/by_layer.py --model MODEL --questions gsm8k/test.jsonl --out DIR

The model answers in fp32, once; every format is scored on the same tokens. `DIR/results.json` has all figures and is
written after each of them: a second call of the command goes on where the first one stopped.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from scored import Study, activations, answered, batch_of, beginning_at, compared, engine_gap, recorded, requests_of

from megatron_rl.algorithms import TokenBatch
from megatron_rl.checkpoint.hf.load import load_hf
from megatron_rl.cli.model import model_config
from megatron_rl.families import read_model
from megatron_rl.generation import as_prompt
from megatron_rl.inference.engine import Engine
from megatron_rl.metrics.console import print_table
from megatron_rl.models.attention.kv_format import rounded_attention
from megatron_rl.models.gpt import build_model
from megatron_rl.platform import current_platform
from megatron_rl.platform.groups import initialize, shut_down
from megatron_rl.quantization.audit import observed
from megatron_rl.quantization.linears import QuantizedLinears, parallel_linears
from megatron_rl.registry import RECIPES
from megatron_rl.run.generation import build_engine
from megatron_rl.run.preflight.inputs import open_tokenizer

FORMATS = ("int8", "int8_smooth", "fp8", "fp8_tensor", "fp8_block", "fp8_block_pow2")
BY_LAYER = ("int8", "fp8")
"""Formats whose error is split by layer."""
ASK = " Let's think step by step and output the final answer after \"####\"."


class Results:
    """Figures by name, in a file that is written after each of them."""

    def __init__(self, path: Path) -> None:
        self._path, self._clock = path, time.process_time()
        self.values: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}

    def of(self, name: str, compute: Callable[[], Any]) -> Any:
        """Return the figures of ``name``, computed if they are not in the file."""
        if name not in self.values:
            self.values[name], before = compute(), self._clock
            self._clock = time.process_time()
            seconds = self.values.setdefault("cpu_seconds", {})
            seconds[name] = round(self._clock - before, 1)
            self._path.write_text(json.dumps(self.values))
            sys.stderr.write(f"{name}: {seconds[name]} CPU seconds, load {os.getloadavg()[0]:.0f}\n")
        return self.values[name]


def measure_formats(
    study: Study, results: Results, batches: Sequence[TokenBatch], prompts: Sequence[Sequence[int]],
    engines: Mapping[str, Engine],
) -> None:  # fmt: skip
    """Compare each format with fp32 on all answers. `int8_smooth` is calibrated on their channels, as a run's is."""
    with observed(study.policy.gpt, channels=True) as seen:
        exact = study.scores(batches)

    def of_format(name: str, version: int) -> dict[str, float]:
        linears = QuantizedLinears(study.policy.gpt, RECIPES.get(name))
        if linears.recipe is not None and linears.recipe.needs_calibration:
            linears.calibrate({layer: one.channel_amax for layer, one in seen.items()})
        with linears.installed():
            gap = engine_gap(study, engines["auto"], prompts, version)
            return {"engine": gap} if name == "none" else compared(exact, study.scores(batches)) | {"engine": gap}

    def of_cache() -> dict[str, float]:
        gap = engine_gap(study, engines["fp8"], prompts, 99, rounds_cache=True)
        with rounded_attention(study.policy.layers, engines["fp8"].kv_format):
            return compared(exact, study.scores(batches)) | {"engine": gap}

    for version, name in enumerate(("none", *FORMATS), start=1):
        results.of(f"format {name}", partial(of_format, name, version))
    results.of("format KV cache fp8", of_cache)


def measure_layers(
    study: Study, results: Results, probes: Sequence[TokenBatch], skips: Sequence[Sequence[str]]
) -> None:
    """Measure with one layer quantized, one kind of linear, one linear of the worst layers; then all but the worst."""
    results.of("activations", lambda: activations(study, probes, BY_LAYER))
    exact, inputs = recorded(study, probes)
    names = list(parallel_linears(study.policy.gpt))
    kinds, count = list(dict.fromkeys(map(kind_of, names))), len(inputs)

    def kept(recipe: str, start: int, skip: Sequence[str]) -> dict[str, float]:
        linears = QuantizedLinears(study.policy.gpt, RECIPES.get(recipe), skip)
        with beginning_at(study.policy.layers, start, inputs[start]), linears.installed():
            return compared(exact, study.scores(probes, whole=True))

    def alone(recipe: str, start: int, *wanted: str) -> dict[str, float]:
        return kept(recipe, start, [name for name in names if name not in wanted])

    for recipe in BY_LAYER:
        results.of(f"{recipe} all", partial(kept, recipe, 0, ()))
        for index in range(count):
            own = [name for name in names if layer_of(name) == index]
            results.of(f"{recipe} layer {index}", partial(alone, recipe, index, *own))
        for kind in kinds:
            results.of(f"{recipe} kind {kind}", partial(alone, recipe, 0, *(n for n in names if kind_of(n) == kind)))
        worst = sorted(range(count), key=lambda index: -results.values[f"{recipe} layer {index}"]["kl"])
        for name in names:
            if layer_of(name) in worst[:2]:
                results.of(f"{recipe} linear {name}", partial(alone, recipe, layer_of(name), name))
        kind = max(kinds, key=lambda kind: results.values[f"{recipe} kind {kind}"]["kl"])
        sets = [[f"layers.{index}.*" for index in worst[:size]] for size in (1, 2, 4) if size < count]
        for skip in (*sets, [f"layers.*.{kind}"], *skips):
            results.of(f"{recipe} without {' '.join(skip)}", partial(kept, recipe, 0, skip))


def layer_of(name: str) -> int:
    """Return the number of the layer of ``layers.3.mlp.linear_fc1``."""
    return int(name.split(".")[1])


def kind_of(name: str) -> str:
    """Return ``mlp.linear_fc1`` of ``layers.3.mlp.linear_fc1``."""
    return name.split(".", 2)[2]


def report(values: Mapping[str, Any]) -> None:
    """Print the tables: formats, parts of the model and what skipping brings, activations by linear."""
    measures = ("gap", "p95", "largest", "k3", "kl", "kl_error", "top1", "engine")
    rows = [
        (name, *(f"{row[measure]:.3g}" if measure in row else "" for measure in measures))
        for name, row in values.items()
        if isinstance(row, dict) and name not in ("activations", "cpu_seconds")
    ]
    print_table(sys.stdout, ("", *measures), rows)
    linears = sorted(values["activations"].items(), key=lambda item: -item[1]["largest"] / item[1]["median"])
    columns = list(linears[0][1])
    print_table(
        sys.stdout, ("linear", *columns),
        [(name, *(f"{row[column]:.3g}" for column in columns)) for name, row in linears],
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="as --load-hf")
    parser.add_argument("--questions", type=Path, required=True, help="a JSONL file with the key question")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--probes", type=int, default=2, help="prompts whose answers the figures by layer are of")
    parser.add_argument("--skip", nargs="+", action="append", default=[], help="patterns to skip, as one more row")
    parser.add_argument("--parts", nargs="+", choices=("formats", "layers"), default=("formats", "layers"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    results = Results(options.out / "results.json")
    words = ["--seq-length", "512", "--rl-max-new-tokens", str(options.tokens)]
    config = model_config(options.model, words, 1, options.prompts * options.samples)
    groups, tokenizer = initialize(config.parallel, current_platform()), open_tokenizer(config)
    study = Study(build_model(config, current_platform(), tokenizer.vocab_size), groups)
    load_hf(read_model(options.model), study.policy, groups)
    with options.questions.open() as file:
        questions = [json.loads(line)["question"] for line in itertools.islice(file, options.prompts)]
    prompts = [tokenizer.encode_prompt(as_prompt(tokenizer, question + ASK)) for question in questions]
    engines = {
        kind: build_engine(config.with_values(rl_kv_cache_dtype=kind), study.policy, tokenizer, groups)
        for kind in ("auto", "fp8")
    }
    asked = requests_of(prompts, options.samples, options.tokens)

    def drawn() -> list[list[tuple[int, ...]]]:
        return [[one.token_ids for one in group] for group in answered(study, engines["auto"], asked, 0)]

    answers = results.of("answers", drawn)
    batches = [batch_of(prompt, own, study.policy.device) for prompt, own in zip(prompts, answers, strict=True)]
    if "formats" in options.parts:
        measure_formats(study, results, batches, prompts, engines)
    if "layers" in options.parts:
        measure_layers(study, results, batches[: options.probes], options.skip)
        report(results.values)
    shut_down()
    return 0


if __name__ == "__main__":
    sys.exit(main())
