"""Whole runs of a model with experts on int8 rollouts, whose choice of experts the trainer uses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checkpoints import differences
from tests.support.kills import KILLED, Kill, Story, tell
from tests.support.runs import rows_of

MIXTURE = {
    "num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 24, "add_qkv_bias": None, "qk_layernorm": True,
    "rl_rollout_quantization": "int8", "rl_mismatch_max_kl": 10.0, "rl_mismatch_max_gap": 10.0,
    "rl_mismatch_interval": 1, "grpo_kl_beta": 0.01, "global_batch_size": 8, "save_interval": 2, "resume": True,
    "rl_keep_zero_variance_groups": True,
}  # fmt: skip
REPLAY = MIXTURE | {"rl_router_replay": True}
STAGES = REPLAY | {"pipeline_model_parallel_size": 2}
RANKS = 2


class Told:
    """The runs by name, and the logs of their launches."""

    def __init__(self, workshop) -> None:
        self.workshop, self.logs = workshop, workshop.folder / "logs"
        stories = [
            Story("plain", self._argv("plain", MIXTURE)),
            Story("whole", self._argv("whole", REPLAY)),
            # In the third step, of which the journal then has a group of each rank, and a checkpoint nothing.
            Story("killed", self._argv("killed", REPLAY), [Kill(1, "journal_closed", 3)]),
            Story("stages", self._argv("stages", STAGES)),
            Story("stages_killed", self._argv("stages_killed", STAGES), [Kill(1, "journal_closed", 3)]),
        ]
        self.codes = {}
        for number, story in enumerate(stories):
            self.codes[number] = tell([story], self.logs / str(number), RANKS, timeout=600)[story.name]

    def _argv(self, name: str, flags: dict[str, object]) -> list[str]:
        return [str(word) for word in self.workshop.rl(name, **flags)]

    def output(self, number: int) -> str:
        return "\n".join(path.read_text(errors="replace") for path in sorted((self.logs / str(number)).glob("*.log")))


@pytest.fixture(scope="module")
def told(workshop) -> Told:
    runs = Told(workshop)
    for number, codes in runs.codes.items():
        assert codes[-1] == [0] * RANKS, runs.output(number)[-6000:]
    return runs


def test_the_gap_is_smaller(told: Told) -> None:
    """The first step's samples are the same: drawn from the same weights, with the same numbers."""
    plain, replayed = (rows_of(told.workshop.run_dir(name)) for name in ("plain", "whole"))
    assert replayed[0]["critic/rewards/mean"] == plain[0]["critic/rewards/mean"]
    assert replayed[0]["perf/total_num_tokens"] == plain[0]["perf/total_num_tokens"]
    assert replayed[0]["training/rollout_logprob_gap_mean"] < plain[0]["training/rollout_logprob_gap_mean"]
    for name in ("training/rollout_logprob_gap_max", "parity/k3_kl"):  # of tokens whose experts were others
        assert replayed[0][name] < 0.3 * plain[0][name], name
    for row in replayed:
        assert row["parity/emulation_gap_max"] < 1e-4
        assert row["actor/grad_norm"] > 0


def test_stages_know_the_experts_of_their_layers(told: Told) -> None:
    """The first step is that of two replicas with a whole model each, before the last bits of an update matter."""
    whole, stages = (rows_of(told.workshop.run_dir(name))[0] for name in ("whole", "stages"))
    for name in ("training/rollout_logprob_gap_mean", "training/rollout_logprob_gap_max", "parity/k3_kl"):
        assert stages[name] == pytest.approx(whole[name], rel=1e-3)


@pytest.mark.parametrize(("undisturbed", "name"), [("whole", "killed"), ("stages", "stages_killed")])
def test_it_goes_on_as_if_nothing_had_happened(told: Told, undisturbed: str, name: str) -> None:
    whole, other = told.workshop.run_dir(undisturbed), told.workshop.run_dir(name)
    last = Path("checkpoints") / "step_0000004"
    assert differences(whole / last, other / last) == []
    assert rows_of(other) == rows_of(whole)


def test_the_journal_had_the_experts(told: Told) -> None:
    for number in (2, 4):
        assert KILLED in told.codes[number][0]
        assert "groups were answered before" in told.output(number)
