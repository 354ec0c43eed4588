"""``python -m megatron_rl.environments``: list and test."""

from __future__ import annotations

import pytest

from megatron_rl.environments.__main__ import main


def test_list_shows_names_and_descriptions(capsys):
    assert main(["list"]) == 0
    assert "arithmetic  Adds and subtracts small numbers" in capsys.readouterr().out


def test_a_good_environment_passes(capsys):
    assert main(["test", "arithmetic", "--option", "max_terms=8", "--limit", "20"]) == 0
    rows = [line.split()[:3] for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[:-1] for row in rows][1] == ["gold", "answers"]
    assert all("ok" in row for row in rows)


@pytest.mark.parametrize(
    ("reference", "row"),
    [
        ("Unkind", "gold answers    FAIL  '4' to task 'train-0' gets 0.0, not 1"),
        ("Fickle", "graded twice    FAIL"),
        ("Fickle", "demonstrations  -     the environment has none"),
        ("BadRows", "tasks           FAIL  train row 1 is a dict"),
        ("NoTasks", "tasks           FAIL  there are no train tasks"),
    ],
)
def test_a_bad_environment_fails(capsys, hostile_path, reference, row):
    assert main(["test", f"hostile_environments:{reference}"]) == 1
    assert row in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["arithmatic"], "did you mean 'arithmetic'"),
        (["arithmetic", "--option", "seed"], "write KEY=VALUE"),
        (["arithmetic", "--option", "sed=1"], "did you mean 'seed'"),
    ],
)
def test_mistakes_are_one_line(capsys, arguments, message):
    assert main(["test", *arguments]) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
