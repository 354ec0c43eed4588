"""Both engines on two tensor-parallel ranks: the tokens and log-probs of one rank."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_rl.platform.groups import ParallelGroups
from tests.parity.tensor_parallel_case import MODELS, fingerprints_of, report_of
from tests.support.ranks import run_ranks


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, dict[str, Any]]]:
    """The report of each of the two ranks."""
    return run_ranks("tests.parity.tensor_parallel_case:on_ranks", 2, tensor_size=2)


def test_ranks_that_pad_the_vocabulary_alike_draw_the_same_weights(
    one_rank: ParallelGroups, two_ranks: list[dict[str, Any]]
) -> None:
    """32 tokens are padded to 40 rows by 40 on one rank and by 20 on two."""
    first, second = (report["fingerprints"] for report in two_ranks)
    assert first == second == fingerprints_of(one_rank, {})


@pytest.mark.parametrize("model", MODELS)
def test_two_ranks_generate_what_one_does(
    one_rank: ParallelGroups, two_ranks: list[dict[str, dict[str, Any]]], model: str
) -> None:
    first, second = (report[model] for report in two_ranks)
    assert first == second, "the ranks disagree"
    for case, alone in report_of(one_rank, MODELS[model]).items():
        # The last digit of a sum over ranks can move a key to the next fp8 number.
        tolerance = 1e-2 if case.startswith("fp8") else 1e-5
        assert first[case]["tokens"] == alone["tokens"], case
        assert first[case]["logprobs"] == pytest.approx(alone["logprobs"], abs=tolerance), case
        assert first[case]["gap"] < tolerance, case
    assert first["rollout greedy"]["tokens"] == first.get("mcore greedy", first["rollout greedy"])["tokens"]


def test_recurrent_layers_are_quantised_on_both_ranks(two_ranks: list[dict[str, dict[str, Any]]]) -> None:
    first, second = (report["int8"] for report in two_ranks)
    assert first == second, "the ranks disagree"
    wanted = {f"layers.{layer}.self_attention.{name}_proj" for layer in (0, 1) for name in ("in", "out")}
    assert wanted < first["ran"].keys()
    assert set(first["ran"].values()) == {"int8, channel x token"}
    assert first["gap"] < 1e-5  # one of the last bits of a state may round to another code
