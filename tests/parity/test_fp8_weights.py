"""Weights that are fp8 codes (`--fp8-param-gather`), with a fake Transformer Engine. The real one was never tried."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parity.test_transformer_engine import FAKE
from tests.support.ranks import run_ranks

CASE = "tests.parity.fp8_weights_case"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two_ranks")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(f"{CASE}:on_two_ranks", 2, imported_under=FAKE, folder=str(folder))


@pytest.fixture(scope="module")
def report(ranks: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    return run_ranks(f"{CASE}:on_rank", 1, imported_under=FAKE, of_two=str(folder))[0]


def test_weights_of_linears_are_a_byte_a_number(report: dict[str, Any]) -> None:
    start = report["start"]["blockwise"]
    assert start["kinds"] == ["Float8BlockwiseQTensor"] and len(start["names"]) == 8
    assert start["buffers"]["torch.uint8"] == start["numbers"]
    assert report["start"]["tensorwise"]["kinds"] == ["Float8Tensor"]


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise"])
def test_main_parameters_begin_as_the_weights_and_not_as_the_codes(report: dict[str, Any], recipe: str) -> None:
    assert report["start"][recipe]["main"] == 0
    assert report["start"][recipe]["rounding"] > 0.001


def test_codes_are_the_weights_rounded_by_hand(report: dict[str, Any]) -> None:
    assert report["start"]["blockwise"]["by_hand"] == 0


def test_steps_are_those_of_bf16_weights_that_every_product_rounds(report: dict[str, Any]) -> None:
    """To the bit, rollouts included: main parameters are rounded to bf16 on the way to codes."""
    assert report["steps"]["codes"]["metrics"] == report["steps"]["bf16"]["metrics"]
    assert all(metrics["actor/grad_norm"] > 0 for metrics in report["steps"]["codes"]["metrics"])


@pytest.mark.parametrize("recipe", ["fp8_block_pow2", "int8"])
def test_rollouts_run_on_copies_of_the_codes(report: dict[str, Any], recipe: str) -> None:
    for metrics in report["steps"][recipe]["metrics"]:
        assert 0 < metrics["training/rollout_logprob_gap_mean"] < 0.05
    assert report["steps"][recipe]["plain"], "a kernel would read codes as bf16"
    assert report["steps"][recipe]["copies"] < (0.002 if recipe == "int8" else 1e-12)


def test_weights_stay_in_rollouts(report: dict[str, Any]) -> None:
    assert report["start"]["blockwise"]["can_leave"] is False


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_saved_weights_are_main_parameters_in_bf16(report: dict[str, Any], with_optimizer: bool) -> None:
    assert report["saved"][f"weights {with_optimizer}"] == 0


def test_a_resumed_run_goes_on_to_the_bit(report: dict[str, Any]) -> None:
    assert report["saved"]["resumed"] == [0, 0, 0]
    assert report["saved"]["after"] == [0, 0, 0]


def test_without_the_optimizers_state_main_parameters_begin_as_the_saved_weights(report: dict[str, Any]) -> None:
    assert report["saved"]["begun_again"] == 0


def test_hugging_face_files_lose_nothing(report: dict[str, Any]) -> None:
    files = report["files"]
    assert files["begun"] == 0 and files["moved"] > 0
    assert files["trained"] == 0


def test_two_ranks_are_one(ranks: list[dict[str, Any]], report: dict[str, Any]) -> None:
    """Main parameters and codes after two updates; and after the second alone, from the checkpoint of two ranks."""
    alone, from_two = report["two"]
    assert ranks[0]["two"] == ranks[1]["two"] == alone == from_two


def test_steps_of_two_ranks(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["steps"]["main"] == ranks[1]["steps"]["main"]
    for rank in ranks:
        for metrics in rank["steps"]["metrics"]:
            assert metrics["training/rollout_logprob_gap_mean"] < 1e-5 and metrics["actor/grad_norm"] > 0


@pytest.mark.parametrize("layout", ["tensor", pytest.param("experts", marks=pytest.mark.long)])
def test_two_ranks_with_different_parts(tmp_path: Path, layout: str) -> None:
    """Experts stay in bf16. The norm alone is added up in another order than that of bf16 weights."""
    reports = run_ranks(f"{CASE}:on_parts", 2, imported_under=FAKE, folder=str(tmp_path), layout=layout)
    assert (reports[0]["two"] == reports[1]["two"]) == (layout == "experts"), "which share all that are codes"
    for report in reports:
        for found, wanted in zip(report["codes"]["metrics"], report["bf16"]["metrics"], strict=True):
            assert found.pop("actor/grad_norm") == pytest.approx(wanted.pop("actor/grad_norm"), rel=1e-6)
            assert found == wanted
        assert layout == "experts" or report["fp8_block_pow2"]["copies"] < 1e-12
        whole, resumed = report["two"]
        assert whole == resumed


def test_graphs_outlive_an_update_but_not_a_move(report: dict[str, Any]) -> None:
    """They go by the addresses of codes, as a quantised tensor has none of its own."""
    eager, graphs, eager_after, graphs_after, *_ = report["replayed"]["tokens"]
    assert eager == graphs and eager_after == graphs_after and eager != eager_after
    before, after, moved = report["replayed"]["graphs"]
    assert moved == 2 * after == 2 * before > 0
