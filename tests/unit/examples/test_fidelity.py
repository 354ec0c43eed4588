"""The fidelity study: its commands are valid, its files have the promised form."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from megatron_rl.config.arguments import read_config
from megatron_rl.quantization.formats import FP8
from megatron_rl.quantization.linears import QuantizedLinears
from megatron_rl.registry import RECIPES
from tests.support.forks import run_python
from tests.support.generation import rollout_engine
from tests.support.quantized import LINEARS, quantizable_policy

ROOT = Path(__file__).parents[3]
FILES = ["--tokenizer-model", "T", "--langrl-env-config", "E", "--run-dir", "R"]


@pytest.fixture
def example(monkeypatch):
    """The modules of the example, which import each other by their file names."""
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "fidelity"))
    names = ("settings", "plot", "controls", "study", "gradients", "scored", "by_layer")
    yield {name: importlib.import_module(name) for name in names}
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("shorten", [False, True], ids=["full", "quick"])
@pytest.mark.parametrize("name", ["EASY", "HARD", "SEEDS", "EXPERTS"])
def test_every_command_is_valid(example, name: str, shorten: bool):
    settings = example["settings"]
    setting = getattr(settings, name)
    setting = settings.quick(setting) if shorten else setting
    assert setting.pairs[0] == ("none", "none"), "the reference comes first"
    assert read_config([*setting.warm_start(), *FILES], 1)[1] == []
    for recipe, correction in setting.pairs:
        config, problems = read_config([*setting.grpo(recipe, correction), *FILES], 1)
        assert problems == []
        assert config.quantization.rl_rollout_quantization == settings.OWN.get(recipe, recipe)
        aligned = correction == settings.ALIGNED
        assert (config.quantization.rl_train_forward == "quantized") == aligned
        assert config.rollout.rl_router_replay == correction.endswith("+replay")
        assert config.algorithm.rl_correction == ("none" if aligned else correction.removesuffix("+replay"))
        assert config.samples_per_step == setting.updates_per_step * config.training.global_batch_size
        assert config.total_steps == setting.steps


def _finished_run(path: Path, score: float, gap: float) -> None:
    path.mkdir(parents=True)
    evaluation = {"before": {"pass@1": 0.25}, "after": {"pass@1": score}}
    summary = {"status": "finished", "eval": evaluation, "logprob_gap_max": 2 * gap, "seconds": {"run": 1.0}}
    (path / "summary.json").write_text(json.dumps(summary))
    rows = [
        {"step": step, "training/rollout_logprob_gap_mean": gap, "rollout_corr/k3_kl": gap**2 / 2,
         "critic/rewards/mean": score, "val/arithmetic/pass@1": score}
        for step in (1, 2)
    ]  # fmt: skip
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_results_are_collected_by_recipe_and_correction(example, tmp_path: Path):
    setting = example["settings"].quick(example["settings"].EASY)
    for seed in (1, 2):
        for recipe, correction in setting.pairs:
            path = example["study"].run_path(tmp_path / "easy", seed, recipe, correction)
            _finished_run(path, score=0.5 + 0.1 * seed, gap=0.01)
    results = example["study"].collect(setting, [1, 2], tmp_path / "easy")
    assert set(results) == {recipe for recipe, _ in setting.pairs}
    assert results["int8"]["token_tis"]["pass@1"] == pytest.approx([0.6, 0.7])
    assert results["int8"]["token_tis"]["gap_mean"] == pytest.approx(0.01)
    assert results["int8"]["token_tis"]["gap_max"] == pytest.approx(0.02)
    example["study"].print_table(setting, results)
    example["plot"].write_page(tmp_path)
    page = (tmp_path / "fidelity.html").read_text()
    assert page.count("<svg") == 3
    assert page.count("<polyline") == 3 * len(setting.pairs)


def test_differences_are_paired_by_seed(example):
    # Pairs 0.1, 0.2 and 0; standard deviation 0.1; t of two degrees of freedom is 4.303: 4.303 * 0.1 / sqrt(3).
    assert example["study"].difference([0.5, 0.7, 0.6], [0.4, 0.5, 0.6]) == "+0.100 ± 0.248"


def test_an_unknown_setting_is_refused_in_one_line():
    outcome = run_python("examples/fidelity/study.py", "--settings", "hardest")
    assert outcome.returncode == 2
    assert "--settings hardest: there are easy, hard, seeds, experts" in outcome.stderr


def test_gradients_are_compared_by_layer(example, one_rank):
    """In fp32 they are float64's; a vector that is twice as long is 100 % away."""
    gradients, policy = example["gradients"], quantizable_policy(seq_length=64)
    batch = gradients.batch_of([5 + number % 7 for number in range(100)])
    assert batch.packing.lengths == (64, 36)
    policy.gpt.double()
    exact = gradients.gradients_of(policy, one_rank, batch)
    policy.gpt.float()
    in_fp32 = gradients.gradients_of(policy, one_rank, batch)
    both = gradients.quantized(policy, one_rank, batch, "fp8_block", backward=True)
    rows = {name: errors for name, *errors in gradients.errors_of(exact, in_fp32, [2 * g for g in exact], both)}
    assert list(rows) == ["layer 0", "layer 1", "all layers"]
    for fp32, twice, quantized, _ in rows.values():
        assert fp32 < 1e-4 and twice == pytest.approx(1) and 0.01 < quantized < 1


def test_formats_are_split_by_layer(example, one_rank, tmp_path: Path):
    """One layer alone does less harm than all; a pass from a layer on is the whole pass; the engine agrees."""
    by_layer, scored, policy = example["by_layer"], example["scored"], quantizable_policy(seq_length=64)
    study, results = by_layer.Study(policy, one_rank), by_layer.Results(tmp_path / "results.json")
    records, prompts = tmp_path / "eval_000000.jsonl", ([5, 9, 7, 11], [8, 6, 10], [4, 4])
    rows = [
        {"prompt_ids": prompt, "token_ids": [5 + number % 7, 6, 9, 20, 11 + number], "greedy": number == 0,
         "inference_logprobs": [-3.0] * 5, "policy_version": 0}
        for prompt in prompts for number in range(4)
    ]  # fmt: skip
    records.write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers = by_layer.answers_of([records], 2, 2)
    assert [(prompt, ids[0]) for prompt, ids, _ in answers] == [(p, first) for p in prompts[:2] for first in (6, 7)]
    batch = by_layer.batch_of(answers, policy.device)
    by_layer.measure_formats(study, results, batch)
    by_layer.measure_layers(study, results, batch, [["first:1"]])
    engines = {"auto": lambda: rollout_engine(policy), "fp8": lambda: rollout_engine(policy, kv_cache_dtype=FP8)}
    by_layer.measure_engine(study, results, engines, prompts[0])
    values = results.values
    for name in by_layer.FORMATS:
        assert values[f"engine {name}"]["engine"] < 1e-5, name
    exact = study.scores(batch)
    for recipe in ("int8", "fp8"):
        with QuantizedLinears(policy.gpt, RECIPES.get(recipe)).installed():
            copies = scored.compared(exact, study.scores(batch))
        assert values[f"format {recipe}"] == copies, "a copy that is made for one pass is another"
        assert values[f"{recipe} all"]["gap"] == pytest.approx(copies["gap"])
        assert values[f"{recipe} layer 1"]["kl"] < values[f"{recipe} all"]["kl"]
        assert values[f"{recipe} without first:1"] == values[f"{recipe} layer 1"]
    whole, inputs, _ = scored.described(study, batch, ())
    with scored.beginning_at(policy.layers, 1, inputs[1]):
        assert scored.compared(whole, study.scores(batch, whole))["kl"] == pytest.approx(0, abs=1e-6)
    assert set(values["activations"]) == set(LINEARS)
    worst = values["activations"]["layers.0.mlp.linear_fc1"]
    assert worst["largest"] >= worst["median"] > 0 and 0 < worst["error_int8"] < worst["error_fp8"] < 0.2
    assert by_layer.Results(tmp_path / "results.json").values == values
    by_layer.report(values)
