"""The benchmark of the balance: the workload, and what it makes of costs."""

from __future__ import annotations

import pytest

from tools.benchmark.balance import make_steps, measure, parse, run, summarise, tokens_of

COUNT = ["--count", "--groups", "12", "--tasks", "12", "--steps", "8"]


def test_environments_take_turns_and_epochs_are_whole() -> None:
    steps = make_steps(parse([*COUNT, "--medians", "16,64"]))
    sources = [group.request.source for step in steps for group in step]
    assert [source.environment[-1] for source in sources] == ["0", "1"] * 48
    first = [source.task.id for source in sources[:24:2]]
    assert sorted(first, key=int) == [str(task) for task in range(12)]
    sequences = steps[1][2].sequences()
    assert [one.sampling.max_new_tokens for one in sequences] == list(steps[1][2].lengths)
    assert [one.index for one in sequences] == list(range(16, 24))


def test_summary_by_hand() -> None:
    """Three steps, two of them in the first epoch."""
    idle = {"in turn": (0.5, 0.3, 0.4), "by length": (0.5, 0.1, 0.2)}
    slowest = {"in turn": (4.0, 5.0, 2.0), "by length": (4.0, 4.0, 1.0)}
    found = [{name: {"idle": idle[name][at], "slowest": slowest[name][at]} for name in idle} for at in range(3)]
    assert summarise(found, first_epoch=2) == {
        "in turn": {"first step": 0.5, "first epoch": 0.3, "later epochs": 0.4, "slowest rank": 1.0},
        "by length": {
            "first step": 0.5, "first epoch": 0.1, "later epochs": 0.2,
            "slowest rank": pytest.approx((1 + 0.8 + 0.5) / 3),
        },
    }  # fmt: skip


def test_the_idle_share_of_tokens_falls_with_what_is_learned() -> None:
    record = run(parse(COUNT))
    in_turn, by_length = (record["dealt"][name] for name in ("in turn", "by length"))
    assert by_length["later epochs"] < 0.5 * in_turn["later epochs"]
    assert by_length["slowest rank"] < 0.9
    assert record["settings"]["ranks"] == 2


def test_every_group_is_on_one_rank() -> None:
    """The costs of a step add up to the same, however it is dealt."""
    arguments = parse(COUNT)
    for row, groups in zip(measure(arguments, tokens_of), make_steps(arguments), strict=True):
        totals = [2 * one["slowest"] * (1 - one["idle"]) for one in row.values()]
        assert totals == pytest.approx([tokens_of(groups)] * 3)
