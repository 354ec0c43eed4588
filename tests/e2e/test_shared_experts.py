"""RL with experts over two ranks: as on two replicas that have all of them, and the same run after kills."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.checkpoints import differences
from tests.support.kills import KILLED, Kill, Story, tell
from tests.support.runs import rows_of, run_many

RANKS, STEPS = 2, 4
MIXTURE = {
    "num_experts": 4, "moe_ffn_hidden_size": 24, "add_qkv_bias": None, "qk_layernorm": True, "train_iters": STEPS,
    "use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True,
    "grpo_iterations": 2, "global_batch_size": 8, "grpo_kl_beta": 0.01, "save_interval": 2, "eval_interval": 2,
    "rl_prompts_per_eval": 3, "rl_samples_per_eval_prompt": 2, "rl_keep_zero_variance_groups": True, "resume": True,
    "log_params_norm": True,
}  # fmt: skip
SHARED = MIXTURE | {"expert_model_parallel_size": 2}
FEW = {"train_iters": 2, "grpo_prompts_per_step": 1, "global_batch_size": None, "grpo_kl_beta": None,
       "moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1}  # fmt: skip
"""One group: of two ranks one generates nothing. With a loss of the routers' own."""
INT8 = {"rl_rollout_quantization": "int8", "rl_router_replay": True, "train_iters": 2, "rl_mismatch_interval": 1,
        "rl_mismatch_max_kl": 1.0, "rl_mismatch_action": "stop"}
KILLS = [Kill(0, "journal_written", 3), Kill(1, "optimizer_due", 3)]
LAST = Path("checkpoints") / f"step_{STEPS:07d}"


class Told:
    """The runs by name, and the logs of their launches."""

    def __init__(self, workshop, with_long: bool) -> None:
        self.workshop, self.logs = workshop, workshop.folder / "logs"
        flags = {
            "replicas": MIXTURE, "shared": SHARED, "replicas_few": MIXTURE | FEW, "shared_few": SHARED | FEW,
            "replayed": SHARED | {"rl_router_replay": True, "train_iters": 2},
            "int8": SHARED | INT8,
        }  # fmt: skip
        if with_long:
            flags["smooth"] = SHARED | INT8 | {"rl_rollout_quantization": "int8_smooth"}
        for outcome in run_many([workshop.rl(name, **own) for name, own in flags.items()], RANKS):
            outcome.check()
        story = Story("killed", workshop.rl("killed", **SHARED), KILLS)
        self.codes = tell([story], self.logs, RANKS, timeout=900)["killed"]

    def output(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-3000:] for path in sorted(self.logs.glob("killed.*.log")))


@pytest.fixture(scope="module")
def told(workshop, request: pytest.FixtureRequest) -> Told:
    return Told(workshop, request.config.getoption("--long"))


@pytest.mark.parametrize("suffix", ["", "_few"])
def test_as_on_two_replicas(told: Told, suffix: str) -> None:
    replicas, shared = (rows_of(told.workshop.run_dir(name + suffix)) for name in ("replicas", "shared"))
    assert len(shared) == len(replicas)
    for own, wanted in zip(shared, replicas, strict=True):
        for name in ("critic/rewards/mean", "perf/total_num_tokens", "actor/pg_loss", "actor/grad_norm",
                     "actor/params_norm", "actor/load_balancing_loss", "actor/expert_load_max",
                     "training/rollout_logprob_gap_mean"):  # fmt: skip
            if name in wanted:
                assert own[name] == pytest.approx(wanted[name], rel=1e-3, abs=1e-5), (name, wanted["step"])
        validation = {name: value for name, value in wanted.items() if name.startswith("val/")}
        assert {name: own[name] for name in validation} == pytest.approx(validation, rel=1e-3, abs=1e-5)


def test_killed_and_started_again_it_is_the_same_run(told: Told) -> None:
    assert told.codes[-1] == [0] * RANKS, told.output()
    for kill, codes in zip(KILLS, told.codes, strict=False):
        assert codes[kill.rank] == KILLED, f"{kill} was never reached\n{told.output()}"
    whole, killed = told.workshop.run_dir("shared"), told.workshop.run_dir("killed")
    assert differences(whole / LAST, killed / LAST) == []
    for own, wanted in zip(rows_of(killed), rows_of(whole), strict=True):
        # With other groups in its batch an expert multiplies other numbers of rows, and a CPU rounds otherwise.
        drawn = {name for name in wanted if name.startswith(("rollout/", "rollout_corr/", "training/rollout_"))}
        assert {k: v for k, v in own.items() if k not in drawn} == {k: v for k, v in wanted.items() if k not in drawn}
        for name in drawn:
            assert own[name] == pytest.approx(wanted[name], abs=1e-6)


def test_the_trainer_goes_where_the_rollout_went(told: Told) -> None:
    """The first updates are on what was drawn; the next ones choose other experts without replay than with it."""
    replayed, shared = (rows_of(told.workshop.run_dir(name)) for name in ("replayed", "shared"))
    assert replayed[1]["critic/rewards/mean"] == shared[1]["critic/rewards/mean"]
    assert replayed[1]["actor/grad_norm"] != pytest.approx(shared[1]["actor/grad_norm"], rel=1e-3)
    assert all(row["training/rollout_logprob_gap_max"] < 1e-4 for row in replayed if row["step"])


@pytest.mark.parametrize("recipe", ["int8", pytest.param("smooth", marks=pytest.mark.long)])
def test_quantised_rollouts(told: Told, recipe: str) -> None:
    """The parity gate's own quantised forward pass, over the same ranks, is what the engine ran."""
    run_dir = told.workshop.run_dir(recipe)
    rows = [row for row in rows_of(run_dir) if row["step"]]
    assert len(rows) == 2
    for row in rows:
        assert 1e-4 < row["training/rollout_logprob_gap_mean"] < 0.05
        assert row["parity/emulation_gap_mean"] < 1e-4
    layers = json.loads((run_dir / "quantization.json").read_text())["layers"]
    assert len(layers) == 2 * (2 + 4 * 2)
    assert all(layer["agrees"] for layer in layers)
