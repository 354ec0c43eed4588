"""Experts between Transformer Engine's layers, with a fake one in plain torch. The real one: tests/gpu."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.test_transformer_engine import CASE as DENSE
from tests.parity.test_transformer_engine import ENGINE, FAKE, FP8
from tests.support.ranks import run_ranks

CASE = "tests.parity.engine_experts_case"
EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 32, "qk_layernorm": True}
ROLLOUTS = {
    "taped": {"flags": ENGINE | EXPERTS, "tapes": True}, "fp8": {"flags": FP8 | EXPERTS},
    "copies": {"flags": FP8 | EXPERTS, "recipe": "int8"},
}  # fmt: skip


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return run_ranks(f"{CASE}:on_rank", 1, imported_under=FAKE)[0]


@pytest.fixture(scope="module")
def shared_report() -> list[dict[str, Any]]:
    return run_ranks(f"{CASE}:on_expert_rank", 2, imported_under=FAKE)


@pytest.mark.parametrize("shape", ["experts", "shared", "biased"])
def test_a_checkpoint_of_local_layers_is_the_same_model(report: dict[str, Any], shape: str) -> None:
    """By name, in both formats, and back with an optimizer's state; the same tokens, log-probs and gradients."""
    found = report["same"][shape]
    assert found["loaded"] == 0 and found["same names"]
    ours, theirs = found["tokens"]
    assert ours == theirs
    assert found["gap"] < 1e-5 and found["gradient"] < 1e-4
    assert found["resumed"] < 1e-6


@pytest.mark.parametrize("shape", ["experts", "shared", "biased"])
def test_training_multiplies_in_transformer_engine_and_rollouts_do_not(report: dict[str, Any], shape: str) -> None:
    """Two products of each layer of experts: they need the number of each expert's tokens on the host."""
    assert report["same"][shape]["in rollouts"] == 0
    assert report["same"][shape]["in training"] == 4


def test_fp8_reaches_the_experts_in_training_and_in_rollouts(report: dict[str, Any]) -> None:
    fp8 = report["fp8"]
    assert fp8["recipes"] == ["Float8BlockScaling"]
    assert fp8["in fp8"] > 4 * 9, "two layers, two products, nine tokens"
    assert fp8["finite"] and fp8["moved"] > 0.1
    assert fp8["gap"] < 0.1 * fp8["gap_of_bf16"]


@pytest.mark.parametrize("recipe", ["int8", "fp8_block_pow2"])
def test_8_bit_rollouts_are_those_of_local_layers(report: dict[str, Any], recipe: str) -> None:
    """Greedy tokens, before and after a change of the weights; every linear was seen to run in the format."""
    found = report["quantised"][recipe]
    for ours, theirs in found["tokens"]:
        assert ours == theirs
    local, engine = found["formats"]
    assert local == engine and len(engine) == 2 * (2 + 4 * 2)
    assert found["agree"] and found["same_names"]
    assert found["gap"] < 1e-5


def test_rollouts_on_copies_pad_nothing(report: dict[str, Any]) -> None:
    """In fp8 training they do not ask how many tokens each expert has, which the host would have to read."""
    assert report["padded"] == {"none": True, "int8": False}


def test_hugging_face_files_both_ways(report: dict[str, Any]) -> None:
    assert report["hf"]["score"] < 1e-4
    assert report["hf"]["saved"]


def test_aligned_training_in_int8(report: dict[str, Any]) -> None:
    for metrics in report["steps"]["aligned"]:
        assert metrics["actor/grad_norm"] > 0
        assert metrics["training/rollout_logprob_gap_max"] < 1e-5


@pytest.mark.parametrize(
    ("name", "most"), [("bf16", 0.01), ("fp8", 0.01), ("int8", 0.1), ("fp8 with int8", 0.2), ("replay", 0.1)]
)
def test_a_run_goes_on_with_the_weights_of_its_updates(report: dict[str, Any], name: str, most: float) -> None:
    """In int8 the rollouts round otherwise than the trainer, which then may choose other experts."""
    for metrics in report["steps"][name]:
        assert metrics["actor/skipped_updates"] == 0 and metrics["actor/grad_norm"] > 0
        assert metrics["training/rollout_logprob_gap_mean"] < most


def test_the_trainer_uses_the_experts_of_the_rollout(report: dict[str, Any]) -> None:
    own, replayed = (report["steps"][name][0]["training/rollout_logprob_gap_max"] for name in ("int8", "replay"))
    assert replayed < 0.7 * own


@pytest.mark.long
def test_rollouts_on_stages_are_recorded_where_the_host_reads_nothing() -> None:
    """The tokens and log-probs of one rank; a tape in a graph's place refuses what a capture refuses."""
    stages = {"pipeline_model_parallel_size": 2}
    (alone,) = run_ranks(f"{DENSE}:on_stages", 1, imported_under=FAKE, parallel={}, cases=ROLLOUTS)
    for rank in run_ranks(f"{DENSE}:on_stages", 2, imported_under=FAKE, parallel=stages, cases=ROLLOUTS):
        for case in ROLLOUTS:
            for rollout in (1, 2):
                assert rank[case][f"tokens {rollout}"] == alone[case][f"tokens {rollout}"]
                ours, theirs = (sum(each[case][f"logprobs {rollout}"], []) for each in (rank, alone))
                assert ours == pytest.approx(theirs, abs=1e-5), "an expert's rows may add up in another order"
        assert min(rank["taped"]["replays"]) > 0


def test_ranks_that_share_experts_train_like_local_layers(shared_report: list[dict[str, Any]]) -> None:
    for report in shared_report:
        for ours, theirs in zip(report["local"]["fp32"], report["engine"]["fp32"], strict=True):
            assert theirs["actor/grad_norm"] == pytest.approx(ours["actor/grad_norm"], rel=1e-3)
            assert theirs["training/rollout_logprob_gap_max"] < 1e-5
        for metrics in report["engine"]["int8"]:
            assert 1e-6 < metrics["training/rollout_logprob_gap_mean"] < 0.1


def test_whoever_joins_in_computes_in_fp8_too(shared_report: list[dict[str, Any]]) -> None:
    """A rank without tokens runs its experts on the others', outside of the layers that turn fp8 on."""
    for report in shared_report:
        assert report["fp8"]["in fp8"] > 0 == report["fp8"]["not in fp8"]
        for metrics in report["fp8"]["fp8"]:
            assert metrics["training/rollout_logprob_gap_mean"] < 0.01
