"""Whole runs with quantised rollouts: the gate's three actions, a resume, and flags that cannot work."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import differences
from tests.support.runs import Outcome, copy_as_of, facts_of, rows_of, run_many

INT8 = {"rl_rollout_quantization": "int8"}
TIGHT = {"rl_mismatch_max_kl": 1e-9}
"""fp32 rollouts are closer than this, quantised ones are not."""
RUNS = {
    "fallback": {**INT8, **TIGHT, "rl_mismatch_action": "fallback", "train_iters": 2},
    "stop": {**INT8, **TIGHT, "rl_mismatch_action": "stop", "train_iters": 2},
    "warn": {**INT8, **TIGHT, "rl_mismatch_action": "warn", "train_iters": 2},
    "aligned": {**INT8, "rl_train_forward": "quantized", "rl_mismatch_max_kl": 1e-8, "rl_mismatch_action": "stop",
                "rl_mismatch_interval": 1, "grpo_kl_beta": 0.01},
    "skipping": {"rl_rollout_quantization": "fp8", "rl_quantization_skip": "first:1", "train_iters": 2,
                 "rl_mismatch_max_kl": 10.0, "rl_mismatch_max_gap": 10.0},
    "unquantized_evaluation": {**INT8, "rl_evaluate_unquantized": True, "eval_interval": 1, "rl_prompts_per_eval": 2,
                               "train_iters": 1},
}  # fmt: skip
RESUMED = {
    "int8": {**INT8, "rl_mismatch_interval": 3},
    "int8_smooth": {"rl_rollout_quantization": "int8_smooth"},
    "fp8_end_to_end": {"rl_rollout_quantization": "fp8_block_pow2", "rl_train_forward": "quantized",
                       "rl_train_backward": "quantized", "use_distributed_optimizer": True,
                       "use_precision_aware_optimizer": True, "exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8"},
    "fp8_cache": {**INT8, "rl_kv_cache_dtype": "fp8", "rl_mismatch_interval": 1, "rl_mismatch_action": "stop",
                  "rl_mismatch_max_kl": 10.0, "rl_mismatch_max_gap": 10.0},
}
"""Each takes 4 steps."""
HALF = {"save_interval": 2}


@pytest.fixture(scope="module")
def runs(workshop) -> dict[str, Outcome]:
    """All of them in one process; in another the second halves of `RESUMED` again, from what was saved on the way."""
    commands = {name: workshop.rl(name, **flags) for name, flags in RUNS.items()}
    commands |= {f"{name}_whole": workshop.rl(f"{name}_whole", **flags, **HALF) for name, flags in RESUMED.items()}
    outcomes = dict(zip(commands, run_many(list(commands.values())), strict=True))
    for name in RESUMED:
        outcomes[f"{name}_whole"].check()
        copy_as_of(2, workshop.run_dir(f"{name}_whole"), workshop.run_dir(f"{name}_halved"))
    again = {f"{name}_halved": flags | HALF | {"resume": True} for name, flags in RESUMED.items()}
    halved = run_many([workshop.rl(name, **flags) for name, flags in again.items()])
    for outcome in halved:
        assert "(step 2)" in outcome.check().output
    return outcomes | dict(zip(again, halved, strict=True))


def _audit(run_dir: Path) -> list[dict[str, object]]:
    return json.loads((run_dir / "quantization.json").read_text())["layers"]


def test_falling_back_ends_at_full_precision_and_finishes(runs, workshop):
    output = runs["fallback"].check().output
    first = output.index("rollouts go on with int8_smooth instead of int8")
    assert first < output.index("rollouts go on with none instead of int8_smooth")
    for recipe in ("int8", "int8_smooth", "none"):
        assert f"parity of rollout ({recipe}) and trainer over" in output
    assert facts_of(workshop.run_dir("fallback"))["status"] == "finished"
    rows = rows_of(workshop.run_dir("fallback"))
    assert [row["step"] for row in rows if row["step"]] == [1, 2]
    assert max(row["training/rollout_logprob_gap_max"] for row in rows if row["step"]) < 1e-5


def test_a_step_done_again_has_the_same_prompts(runs, workshop):
    """Falling back does not skip tasks."""
    runs["fallback"].check()
    runs["warn"].check()

    def prompts(name: str) -> set[str]:
        records = (workshop.run_dir(name) / "rollouts" / "step_000001.jsonl").read_text().splitlines()
        return {json.loads(line)["prompt"] for line in records}

    assert prompts("fallback") & prompts("warn"), "other prompts than the first ones"
    assert prompts("fallback") <= prompts("warn") or prompts("warn") <= prompts("fallback")


def test_stopping_is_one_line_and_exit_code_1(runs, workshop):
    output = runs["stop"].check(1).output
    errors = [line for line in output.splitlines() if "parity gate: KL of rollout and trainer with int8" in line]
    assert len(errors) == 1
    assert "above --rl-mismatch-max-kl 1e-09" in errors[0]
    assert "use a safer --rl-rollout-quantization" in errors[0]
    assert "Traceback" not in output
    assert facts_of(workshop.run_dir("stop"))["status"] == "failed"
    metrics = workshop.run_dir("stop") / "metrics.jsonl"
    assert not metrics.exists() or not [row for row in rows_of(workshop.run_dir("stop")) if row["step"]]


def test_warning_is_a_line_and_the_run_goes_on(runs, workshop):
    output = runs["warn"].check().output
    assert output.count("parity gate: KL of rollout and trainer with int8") == 1, "once, before the first update"
    assert facts_of(workshop.run_dir("warn"))["status"] == "finished"
    first, second = (row for row in rows_of(workshop.run_dir("warn")) if row["step"])
    assert first["parity/k3_kl"] > 1e-9
    assert first["parity/emulation_gap_mean"] < 1e-4
    assert not any(name.startswith("parity/") for name in second)
    assert second["training/rollout_logprob_gap_mean"] > 1e-4, "the rollouts are not quantised any more"


def test_every_layer_is_audited(runs, workshop):
    runs["skipping"].check()
    rows = _audit(workshop.run_dir("skipping"))
    assert len(rows) == 8
    for row in rows:
        expected = "full precision" if row["layer"].startswith("layers.0.") else "fp8 e4m3, channel x token"
        assert (row["wanted"], row["ran"], row["agrees"]) == (expected, expected, True)
        assert row["calls"] > 0


def test_aligned_training_keeps_agreeing(runs, workshop):
    """Four updates with a check before each: the copies are those of the last update every time."""
    runs["aligned"].check()
    check_agreement(rows_of(workshop.run_dir("aligned")))


@pytest.mark.long  # tests/parity/test_quantized_tensor_parallel.py has their gradients
def test_aligned_training_keeps_agreeing_on_tensor_parallel_ranks(workshop):
    flags = RUNS["aligned"] | {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    (outcome,) = run_many([workshop.rl("aligned_ranks", **flags)], ranks=2)
    outcome.check()
    check_agreement(rows_of(workshop.run_dir("aligned_ranks")))
    assert len(_audit(workshop.run_dir("aligned_ranks"))) == 8


def check_agreement(rows: list[dict[str, float]]) -> None:
    rows = [row for row in rows if row["step"]]
    assert len(rows) == 4
    for row in rows:
        assert row["parity/max"] < 1e-4
        assert row["training/rollout_logprob_gap_max"] < 1e-4
        assert row["parity/top1_agreement"] == 1.0


def test_the_gate_repeats_an_fp8_cache_in_every_step(runs, workshop):
    """The limit on stale weights ends the run, and stays as tight as without an fp8 cache."""
    output = runs["fp8_cache_whole"].check().output
    assert output.count("parity of rollout (int8, fp8 KV cache) and trainer over") == 4
    rows = [row for row in rows_of(workshop.run_dir("fp8_cache_whole")) if row["step"]]
    assert max(row["parity/emulation_gap_mean"] for row in rows) < 1e-4
    assert min(row["parity/gap_mean"] for row in rows) > 1e-4
    summary = json.loads((workshop.run_dir("fp8_cache_whole") / "summary.json").read_text())
    assert summary["attention"]["kv_cache_dtype"] == "fp8"


def test_held_out_tasks_may_be_answered_in_full_precision(runs, workshop):
    runs["unquantized_evaluation"].check()
    assert len(_audit(workshop.run_dir("unquantized_evaluation"))) == 8, "the rollouts after it are quantised"


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_is_the_uninterrupted_one(runs, workshop, name):
    runs[f"{name}_whole"].check()
    runs[f"{name}_halved"].check()
    whole, halved = workshop.run_dir(f"{name}_whole"), workshop.run_dir(f"{name}_halved")
    last = Path("checkpoints") / "step_0000004"
    assert differences(whole / last, halved / last) == []
    assert rows_of(halved) == rows_of(whole)
    for step in (1, 2, 3, 4):
        record = Path("rollouts") / f"step_{step:06d}.jsonl"
        assert (whole / record).read_text() == (halved / record).read_text(), f"step {step}"


def test_a_run_resumed_with_another_recipe_uses_it(runs, workshop):
    runs["int8_halved"].check()
    shutil.copytree(workshop.run_dir("int8_halved"), workshop.run_dir("other"))
    argv = workshop.rl("other", rl_rollout_quantization="fp8", train_iters=6, resume=True,
                       rl_mismatch_max_kl=10.0, rl_mismatch_max_gap=10.0)  # fmt: skip
    (outcome,) = run_many([argv])
    assert "parity of rollout (fp8) and trainer over" in outcome.check().output


BAD = {
    "recipe": ({"rl_rollout_quantization": "int9"}, ["'int9'", "did you mean int8", "Available: "]),
    "pattern": ({**INT8, "rl_quantization_skip": "layers.7.*"},
                ["--rl-quantization-skip layers.7.* matches no linear layer", "first:N and last:N"]),
    "everything skipped": ({**INT8, "rl_quantization_skip": "first:2"}, ["leaves no layer to quantise"]),
    "skip without a recipe": ({"rl_quantization_skip": "first:1"}, ["has nothing to skip", "leave it out"]),
    "transformer engine": ({"transformer_impl": "transformer_engine"},
                           ["Transformer Engine is not installed", "pip install", "--transformer-impl local"]),
    "tiles": ({"rl_rollout_quantization": "fp8_block", "tensor_model_parallel_size": 2},
              ["fp8_block with --tensor-model-parallel-size 2", "no multiple of 128", "use fp8 or int8"]),
    "aligned with nothing": ({"rl_train_forward": "quantized"},
                             ["--rl-train-forward quantized", "nothing to quantise"]),
    "aligned fallback": ({**INT8, "rl_train_forward": "quantized", "rl_mismatch_action": "fallback"},
                         ["--rl-mismatch-action fallback", "use --rl-mismatch-action stop"]),
    "limit": ({**INT8, "rl_mismatch_max_kl": 0}, ["--rl-mismatch-max-kl must be above 0"]),
}  # fmt: skip
"""Name -> flags, and the parts their one line must have."""


def test_what_cannot_work_is_one_line_each_and_nothing_is_built(workshop):
    import importlib.util

    cases = dict(BAD)
    if importlib.util.find_spec("transformer_engine") is not None:
        del cases["transformer engine"]
    world = {"tiles": ["--check-world-size", "2"]}
    commands = [[*workshop.rl("bad", **flags), "--check", *world.get(name, [])] for name, (flags, _) in cases.items()]
    whole = workshop.rl("bad", **BAD["pattern"][0])  # without --check, too
    # --check-world-size is for other machines; here a GPU would have to be.
    library = workshop.rl("bad", attention_backend="flash")
    *checked, started, flash = run_many([*commands, whole, library])
    for (name, (_, fragments)), outcome in zip(cases.items(), checked, strict=True):
        lines = [line for line in outcome.check(2).output.strip().splitlines() if not line.startswith("note: ")]
        assert lines[0] == "1 problem(s) in the configuration:", f"{name}: {lines}"
        assert len(lines) == 2, f"{name}: {lines}"
        assert [text for text in fragments if text not in lines[1]] == [], f"{name}: {lines[1]}"
    assert "layers.7.*" in started.check(2).output
    if not torch.cuda.is_available():
        assert "--attention-backend flash needs a CUDA device; use auto, or " in flash.check(2).output
    assert not workshop.run_dir("bad").exists()
