"""What is around Transformer Engine's layers, with a fake one in plain torch. The real one: tests/gpu."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks

FAKE = {"PYTHONPATH": str(Path(__file__).parents[1] / "support" / "fake_transformer_engine")}
CASE = "tests.parity.transformer_engine_case"
ENGINE = {"transformer_impl": "transformer_engine"}
FP8 = ENGINE | {"bf16": True, "fp8_format": "hybrid", "fp8_recipe": "blockwise"}
ROLLOUTS = {"fp32": {"flags": ENGINE}, "taped": {"flags": ENGINE, "tapes": True}, "fp8": {"flags": FP8}}


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """Which Transformer Engine there is, megatron-core asks once."""
    return run_ranks(f"{CASE}:on_rank", 1, imported_under=FAKE)[0]


def test_the_layers_are_transformer_engines_with_our_attention(report: dict[str, Any]) -> None:
    modules = set(report["same"]["modules"])
    assert {"TELayerNormColumnParallelLinear", "TERowParallelLinear", "HeadAttention"} <= modules
    assert not {"ColumnParallelLinear", "WholeColumnLinear", "TorchNorm", "TEDotProductAttention"} & modules
    assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in report["same"]["parameters"]


def test_context_parallel_ranks_share_a_batch() -> None:
    for differences in run_ranks(f"{CASE}:on_context_rank", 2, imported_under=FAKE):
        assert max(differences.values()) < 1e-4, differences


@pytest.fixture(scope="module")
def rolled_out_alone() -> dict[str, Any]:
    return run_ranks(f"{CASE}:on_stages", 1, imported_under=FAKE, parallel={}, cases=ROLLOUTS)[0]


@pytest.mark.parametrize("chunks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_rollouts_on_stages(rolled_out_alone: dict[str, Any], chunks: int) -> None:
    """The tokens and log-probs of one rank, to the bit in fp32; in fp8 too, and with a tape in a graph's place."""
    stages = {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": chunks}
    for rank in run_ranks(f"{CASE}:on_stages", 2, imported_under=FAKE, parallel=stages, cases=ROLLOUTS):
        for case in ROLLOUTS:
            for what in ("tokens 1", "logprobs 1", "tokens 2", "logprobs 2"):
                assert rank[case][what] == rolled_out_alone[case][what]
        assert min(rank["taped"]["replays"]) > 0


def test_a_checkpoint_of_local_layers_is_the_same_model(report: dict[str, Any]) -> None:
    ours, theirs = report["same"]["tokens"]
    assert ours == theirs
    assert report["same"]["gap"] < 1e-5
    assert report["same"]["gradient"] < 1e-4 and report["same"]["norm_gradient"] < 1e-4


def test_local_layers_go_on_with_the_optimizers_state(report: dict[str, Any]) -> None:
    assert report["same"]["after_resume"] < 1e-6


def test_hugging_face_files_both_ways(report: dict[str, Any]) -> None:
    assert report["hf"]["score"] < 1e-4
    assert report["hf"]["saved"]


def test_fp8_runs_in_the_recipe_asked_for_on_any_number_of_tokens(report: dict[str, Any]) -> None:
    fp8 = report["fp8"]
    assert fp8["recipes"] == ["Float8BlockScaling"] and fp8["formats"] == ["hybrid"]
    assert fp8["tokens"] % 8
    assert fp8["finite"]
    assert fp8["gap"] < 0.1 * fp8["gap_of_bf16"]


def test_fp8_weights_are_not_those_of_the_pass_before(report: dict[str, Any]) -> None:
    assert report["fp8"]["moved"] > 0.1


def test_the_torch_format_goes_by_names_too(report: dict[str, Any]) -> None:
    assert report["same"]["by_name"]


@pytest.mark.parametrize("recipe", ["int8", "int8_smooth", "fp8_block_pow2"])
def test_8_bit_rollouts_are_those_of_local_layers(report: dict[str, Any], recipe: str) -> None:
    """Greedy tokens, before and after a change of the weights; every linear was seen to run in the format."""
    found = report["quantised"][recipe]
    for ours, theirs in found["tokens"]:
        assert ours == theirs
    local, engine = found["formats"]
    assert local == engine and len(engine) == 8
    assert found["agree"]
    assert found["gap"] < 1e-5
    assert found["same_names"]


def test_aligned_training_in_int8(report: dict[str, Any]) -> None:
    for metrics in report["steps"]["aligned"]:
        assert metrics["actor/grad_norm"] > 0
        assert metrics["training/rollout_logprob_gap_max"] < 1e-5


@pytest.mark.parametrize("name", ["bf16", "fp8", "int8", "fp8 with int8"])
def test_a_run_goes_on_with_the_weights_of_its_updates(report: dict[str, Any], name: str) -> None:
    for metrics in report["steps"][name]:
        assert metrics["actor/skipped_updates"] == 0 and metrics["actor/grad_norm"] > 0
        # In int8 the rollouts round otherwise than the trainer.
        assert metrics["training/rollout_logprob_gap_mean"] < (0.1 if "int8" in name else 0.01)
