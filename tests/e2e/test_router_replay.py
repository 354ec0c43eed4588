"""Whole runs of a model with experts on int8 rollouts, whose choice of experts the trainer uses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checkpoints import differences
from tests.support.kills import KILLED, Kill, Story, tell
from tests.support.runs import rows_of, run_many

MIXTURE = {
    "num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 24, "add_qkv_bias": None, "qk_layernorm": True,
    "rl_rollout_quantization": "int8", "rl_mismatch_max_kl": 10.0, "rl_mismatch_max_gap": 10.0,
    "rl_mismatch_interval": 1, "grpo_kl_beta": 0.01, "global_batch_size": 8, "save_interval": 2, "resume": True,
    "rl_keep_zero_variance_groups": True,
}  # fmt: skip
REPLAY = MIXTURE | {"rl_router_replay": True}
STAGES = REPLAY | {"pipeline_model_parallel_size": 2}
RUNS = {"plain": MIXTURE | {"train_iters": 1}, "whole": REPLAY, "stages": STAGES}
RANKS = 2


@pytest.fixture(scope="module")
def runs(workshop) -> None:
    """All of `RUNS`."""
    for outcome in run_many([workshop.rl(name, **flags) for name, flags in RUNS.items()], RANKS):
        outcome.check()


def test_the_gap_is_smaller(workshop, runs) -> None:
    """The first step's samples are the same: drawn from the same weights, with the same numbers."""
    plain, replayed = (rows_of(workshop.run_dir(name)) for name in ("plain", "whole"))
    assert replayed[0]["critic/rewards/mean"] == plain[0]["critic/rewards/mean"]
    assert replayed[0]["perf/total_num_tokens"] == plain[0]["perf/total_num_tokens"]
    assert replayed[0]["training/rollout_logprob_gap_mean"] < plain[0]["training/rollout_logprob_gap_mean"]
    for name in ("training/rollout_logprob_gap_max", "parity/k3_kl"):  # of tokens whose experts were others
        assert replayed[0][name] < 0.3 * plain[0][name], name
    for row in replayed:
        assert row["parity/emulation_gap_max"] < 1e-4
        assert row["actor/grad_norm"] > 0


def test_stages_know_the_experts_of_their_layers(workshop, runs) -> None:
    """The first step is that of two replicas with a whole model each, before the last bits of an update matter."""
    whole, stages = (rows_of(workshop.run_dir(name))[0] for name in ("whole", "stages"))
    for name in ("training/rollout_logprob_gap_mean", "training/rollout_logprob_gap_max", "parity/k3_kl"):
        assert stages[name] == pytest.approx(whole[name], rel=1e-3)


@pytest.mark.parametrize("undisturbed", ["stages", pytest.param("whole", marks=pytest.mark.long)])
def test_it_goes_on_as_if_nothing_had_happened(workshop, runs, undisturbed: str) -> None:
    """Killed in the third step, of which the journal then has groups with their experts, and a checkpoint nothing."""
    killed, logs = f"{undisturbed}_killed", workshop.folder / "logs"
    story = Story(killed, workshop.rl(killed, **RUNS[undisturbed]), [Kill(1, "journal_closed", 3)])
    codes = tell([story], logs, RANKS, timeout=600)[killed]
    output = "\n".join(path.read_text(errors="replace") for path in sorted(logs.glob(f"{killed}.*.log")))
    assert KILLED in codes[0] and codes[-1] == [0] * RANKS, output[-6000:]
    assert "groups were answered before" in output
    whole, other = workshop.run_dir(undisturbed), workshop.run_dir(killed)
    last = Path("checkpoints") / "step_0000004"
    assert differences(whole / last, other / last) == []
    assert rows_of(other) == rows_of(whole)
