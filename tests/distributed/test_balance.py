"""Groups are dealt to two ranks by their expected lengths: what changes, and what does not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.ranks import run_ranks

Reports = list[dict[str, Any]]


@pytest.fixture(scope="module")
def reports() -> Reports:
    return run_ranks("tests.distributed.balance_programs:in_turn_and_by_length", 2, timeout=600)


def whole(reports: Reports, kind: str) -> dict[str, Any]:
    """The answers of both ranks; no group is on both."""
    first, second = (report[kind]["answers"] for report in reports)
    assert not first.keys() & second.keys()
    return first | second


def test_the_answers_are_the_same_whichever_rank_gives_them(reports: Reports) -> None:
    assert len(whole(reports, "in_turn")) == 8
    assert whole(reports, "by_length") == whole(reports, "in_turn")


def test_a_skewed_step_becomes_even(reports: Reports) -> None:
    in_turn, by_length = ([report[kind]["tokens"] for report in reports] for kind in ("in_turn", "by_length"))
    assert sum(in_turn) == sum(by_length)
    assert in_turn[0] > 2 * in_turn[1], "the workload is not skewed"
    assert max(by_length) < 1.2 * min(by_length)
    long = [[number for number in report["by_length"]["answers"] if int(number) % 2 == 0] for report in reports]
    assert all(long), "one rank has all long groups"


def test_samples_keep_their_numbers_and_rewards(reports: Reports) -> None:
    """Ids as one rank would number them: group 3's four samples are 12 to 15 on either rank."""
    in_turn, by_length = (sorted(reports[0]["ids"][at] + reports[1]["ids"][at]) for at in (0, 1))
    assert in_turn == by_length
    assert len({number for number, _ in in_turn}) == len(in_turn) > 8
    own = {int(number) for number in reports[1]["by_length"]["answers"]}
    assert {number // 4 for number, _ in reports[1]["ids"][1]} <= own


def test_both_ranks_know_the_same(reports: Reports) -> None:
    assert reports[0]["state"] == reports[1]["state"]
    assert reports[0]["state"]["toy"]["groups"] == 3 * 8
    assert reports[0]["idle"] == reports[1]["idle"]


def test_every_step_says_how_idle_the_ranks_were(reports: Reports) -> None:
    for row in (reports[0]["idle"], *reports[0]["steps"]):
        first, second = (row[f"perf/rollout_idle_share/rank_{rank}"] for rank in (0, 1))
        assert min(first, second) == 0.0
        assert max(first, second) < 1.0
        assert row["perf/rollout_idle_share"] == pytest.approx((first + second) / 2)
