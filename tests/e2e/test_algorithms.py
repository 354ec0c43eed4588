"""One short run for every algorithm and every switch of the loss: each ends well and each does something."""

from __future__ import annotations

import json
from dataclasses import fields
from itertools import combinations
from typing import Any

import pytest

from megatron_rl.registry import ADVANTAGES, CORRECTIONS, FILTERS, LOSSES
from tests.support.checkpoints import state_of
from tests.support.runs import Outcome, records_of, rows_of, run_many

STEPS = 2
"""The second is of weights that were updated and of an optimizer with a state."""
TWO_PASSES = {
    "grpo_iterations": 2, "global_batch_size": 8, "rl_keep_zero_variance_groups": True,
    "grpo_clamp_eps_lower": 0.02, "grpo_clamp_eps_upper": 0.02,
}  # fmt: skip
"""Two halves of a rollout of 16, twice: 4 updates a step; narrow enough for some ratios to be clipped."""


def _of_loss(name: str) -> dict[str, Any]:
    """The flags above that the loss takes: not every one clips."""
    own = {f"grpo_{field.name}" for field in fields(LOSSES.get(name))}
    clips = {"grpo_clamp_eps_lower", "grpo_clamp_eps_upper"}
    return {flag: value for flag, value in TWO_PASSES.items() if flag not in clips - own}


CAPPED = {name: {"rl_correction_cap": 0.5} for name in ("token_tis", "sequence_tis")}
VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    **{f"advantage_{name}": {"rl_advantage": name} for name in ADVANTAGES.names() if name != "grpo"},
    **{f"loss_{name}": {"rl_policy_loss": name, **_of_loss(name)} for name in LOSSES.names()},
    **{f"correction_{name}": {"rl_correction": name, **CAPPED.get(name, {})} for name in CORRECTIONS.names()},
    **{
        f"filter_{name}": {
            "rl_dynamic_sampling": True, "rl_group_filter": name, "rl_truncated": "mask", "train_iters": 3,
        }
        for name in FILTERS.names()
    },
    **dict.fromkeys(("surplus", "surplus_again"), {
        "rl_dynamic_sampling": True, "rl_oversampling": 8, "rl_surplus": "keep", "train_iters": 4,
    }),
    "dual_clip": {"rl_dual_clip": 1.01, **TWO_PASSES},
    "kl": {"grpo_kl_beta": 0.01},
    "kl_k1": {"grpo_kl_beta": 0.01, "rl_kl_estimator": "k1"},
    "entropy": {"grpo_entropy_term_weight": 0.1},
    "sequence_mean": {"rl_loss_aggregation": "sequence-mean"},
    "constant": {"rl_loss_aggregation": "constant"},
    "samples": {"train_iters": None, "train_samples": 32},
    "stop_strings": {"rl_stop_strings": "="},
    "recompute": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "recompute_mlp": {"recompute_granularity": "selective", "recompute_modules": "core_attn mlp"},
    "sgd": {"optimizer": "sgd"},
    "bf16": {"bf16": True},
    "logging": {
        "train_iters": 3,
        "log_params_norm": True, "log_num_zeros_in_grad": True, "log_straggler": True, "log_throughput": True,
        "log_interval": 2, "timing_log_level": 1,
    },
    "evaluated": {
        "train_iters": 3,
        "log_interval": 3, "eval_interval": 1, "rl_prompts_per_eval": 2, "rl_samples_per_eval_prompt": 2,
        "log_samples_interval": 2,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(workshop, warm_start) -> dict[str, Outcome]:
    """All of them in one process."""
    commands = []
    for name, flags in VARIANTS.items():
        argv = workshop.rl(name, pretrained_checkpoint=warm_start, **{"train_iters": STEPS} | flags)
        commands.append([part for text in argv for part in text.split()])
    return dict(zip(VARIANTS, run_many(commands, timeout=1500), strict=True))


@pytest.fixture(scope="module")
def rows(outcomes, workshop) -> dict[str, list[dict[str, Any]]]:
    """Their metrics."""
    return {name: rows_of(workshop.run_dir(name)) for name in outcomes}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_run_ends_well(outcomes, rows, workshop, name):
    outcomes[name].check()
    steps = VARIANTS[name].get("train_iters") or STEPS
    assert rows[name][-1]["step"] == steps
    for row in rows[name]:
        assert "nonfinite" not in row
        if row["step"] == 0:
            continue
        assert row["actor/grad_norm"] > 0
        assert row["actor/skipped_updates"] == 0
    saved = state_of(workshop.run_dir(name) / "checkpoints" / f"step_{steps:07d}")
    updates = saved["components"]["progress"]["updates"]
    # Where all tokens of an update are clipped there is no gradient, and no update.
    empty = sum(row.get("actor/empty_updates", 0) for row in rows[name])
    assert updates + empty == steps * (4 if "grpo_iterations" in VARIANTS[name] else 1) and updates >= steps


def test_no_two_algorithms_are_the_same(rows):
    """A name that is accepted and does nothing would give the run of another one."""
    for kind in ("advantage", "loss"):
        names = [name for name in VARIANTS if name.startswith(f"{kind}_")] + ["base"]
        for one, other in combinations(names, 2):
            same = rows[one][-1]["actor/grad_norm"] == rows[other][-1]["actor/grad_norm"]
            # Of a sequence with one advantage GSPO and GSPO-token have one gradient: eq. 17 of their paper.
            assert same == ((one, other) == ("loss_gspo", "loss_gspo_token")), (one, other)
    for name in ("dual_clip", "kl", "kl_k1", "entropy", "sequence_mean", "constant", "stop_strings", "sgd"):
        assert rows[name][-1]["actor/grad_norm"] != rows["base"][-1]["actor/grad_norm"], name


def test_the_learning_rate_is_the_steps_however_many_updates_it_makes(rows):
    """From 0.01 in equal parts towards a minimum of 0.001; with four updates a step as with one."""
    for name in ("base", "loss_clip", "samples"):
        rates = [row["actor/lr"] for row in rows[name]]
        assert rates == pytest.approx([0.01, 0.0055]), name
    assert [row["actor/lr"] for row in rows["logging"]] == pytest.approx([0.007, 0.004])
    assert {row["training/updates"] for row in rows["loss_clip"]} == {4}


def test_ratios_are_clipped_only_after_the_first_update(rows):
    assert all(row["actor/pg_clipfrac"] == 0 for row in rows["base"])
    assert rows["loss_clip"][-1]["actor/pg_clipfrac"] > 0
    assert any(row["actor/pg_clipfrac_lower"] > 0 for row in rows["dual_clip"])
    assert rows["loss_clip"][-1]["actor/ppo_kl"] != 0


def test_kept_groups_are_at_most_a_step_old(rows):
    ages = [row["rollout/token_lag_max"] for row in rows["surplus"]]
    assert ages[0] == 0 and max(ages) <= 1
    assert all("rollout/token_lag_max" not in row for row in rows["filter_signal"])


def test_the_clock_decides_nothing_where_groups_are_kept(rows):
    assert rows["surplus"] == rows["surplus_again"]


def test_the_reference_is_the_policy_of_the_start(rows):
    for name in ("kl", "kl_k1"):
        assert rows[name][0]["actor/kl_loss"] == pytest.approx(0, abs=1e-9)
    assert rows["kl"][-1]["actor/kl_loss"] > 1e-6
    assert rows["kl"][-1]["actor/kl_loss"] != rows["kl_k1"][-1]["actor/kl_loss"]


def test_truncated_answers_are_masked_where_that_is_asked(workshop, outcomes):
    """After two steps some answers are too long."""
    used: dict[bool, list[bool]] = {True: [], False: []}
    for name, flags in VARIANTS.items():
        files = (workshop.run_dir(name) / "rollouts").glob("step_*.jsonl")
        cut = [row for path in files for row in records_of(path) if row["finish_reason"] == "length"]
        used["rl_truncated" in flags] += [row["advantage"] is not None for row in cut]
    assert any(used[False])
    assert used[True] and not any(used[True])


def test_the_entropy_bonus_keeps_entropy_up(rows):
    assert rows["entropy"][-1]["actor/entropy"] > rows["base"][-1]["actor/entropy"]


def test_corrections_weigh_by_the_gap_between_engine_and_trainer(rows):
    """There is none on a CPU: ratios are 1, of which token_tis with a cap of 0.5 leaves a half."""
    for name in ("none", "masked_is"):
        assert rows[f"correction_{name}"][-1]["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=1e-4), name
    assert rows["correction_token_tis"][-1]["rollout_corr/rollout_is_mean"] == pytest.approx(0.5)
    assert rows["correction_token_tis"][0]["actor/grad_norm"] == pytest.approx(
        rows["correction_none"][0]["actor/grad_norm"] / 2, rel=1e-4
    )


def test_recomputing_rounding_and_counting_in_samples_change_no_result(rows):
    for name in ("recompute", "recompute_mlp"):
        for ours, theirs in zip(rows[name], rows["base"], strict=True):
            assert ours["actor/grad_norm"] == pytest.approx(theirs["actor/grad_norm"], rel=1e-5), name
    assert rows["bf16"][0]["actor/grad_norm"] == pytest.approx(rows["base"][0]["actor/grad_norm"], rel=0.1)
    assert [row["actor/grad_norm"] for row in rows["samples"]] == [row["actor/grad_norm"] for row in rows["base"]]


def test_a_stop_string_ends_a_completion(workshop, outcomes):
    lines = (workshop.run_dir("stop_strings") / "rollouts" / "step_000001.jsonl").read_text().splitlines()
    ended = [record for record in map(json.loads, lines) if "=" in record["completion"]]
    assert ended
    assert {record["finish_reason"] for record in ended} == {"stop_string"}


def test_no_evaluation_is_lost_to_the_log_interval(rows):
    assert [row["step"] for row in rows["evaluated"]] == [0, 1, 2, 3]
    assert all("val/digits/pass@1" in row for row in rows["evaluated"])


def test_a_sample_is_shown_every_so_many_steps_after_the_steps_line(outcomes):
    lines = outcomes["evaluated"].check().output.splitlines()
    [shown] = [index for index, line in enumerate(lines) if "best group | digits" in line]
    assert lines[shown].startswith("sample 2/3 | ")
    assert [line.split()[0] for line in lines[shown + 1 : shown + 4]] == ["prompt", "answer", "reward"]
    position = [line.startswith("step 2/3") for line in lines].index(True)
    assert position < shown
    assert "best group | digits" not in outcomes["base"].check().output


def test_logging_switches_add_their_metrics(rows):
    assert [row["step"] for row in rows["logging"]] == [2, 3]
    added = set(rows["logging"][-1]) - set(rows["base"][-1])
    assert added == {
        "actor/params_norm", "actor/num_zeros_in_grad", "perf/tflops_per_rank",
        "straggler/update_s_fastest", "straggler/update_s_slowest", "straggler/slowest_rank",
    }  # fmt: skip
