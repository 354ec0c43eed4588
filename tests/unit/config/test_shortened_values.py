"""Values in messages: whole when short, cut when not, and never worked out when they are endless."""

from __future__ import annotations

import pytest

from megatron_rl.errors import MAX_PROBLEM, MAX_VALUE, one_line, shorten
from megatron_rl.main import main

ANCHORED: list = ["x"] * 10
for _ in range(30):  # 10**31 items, as YAML's anchors make them
    ANCHORED = [ANCHORED] * 10
DEEP: list = []
for _ in range(100_000):
    DEEP = [DEEP]
ENDLESS: list = []
ENDLESS.append(ENDLESS)


@pytest.mark.parametrize("value", [7, -1.5, "text", None, True, [1, 2], {"a": [1, {"b": "c"}]}, ("x",), "a  b"])
def test_a_short_value_is_its_repr(value):
    assert shorten(value) == repr(value)


@pytest.mark.parametrize(
    "value",
    [ANCHORED, DEEP, ENDLESS, "x" * 10**6, 10**5000, [10**5000], list(range(10**6))],
    ids=["anchored", "deep", "endless", "text", "digits", "digits in a list", "list"],
)
def test_a_long_value_is_cut(value):
    assert 2 < len(shorten(value)) <= MAX_VALUE


def test_the_beginning_and_the_end_of_a_text_stay():
    assert one_line("a" * 600 + "b" * 400, 20) == "aaaaaaaaaa ... bbbbb"
    assert one_line("first\n  second\tthird") == "first second third"
    assert one_line("red \x1b[31mtext") == "red  [31mtext"
    assert one_line("x" * 500) == "x" * 500


def test_all_that_is_wrong_with_a_command_line_is_shown(capsys):
    assert main(["train_rl.py", *(f"--flag.{n}" for n in range(76))]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert sum("is not a flag; --help-all lists all flags" in line for line in lines) == 76


def test_what_no_person_has_written_is_cut(capsys):
    wrong = [f"--flag-{n}\n{'x' * 10**4}" for n in range(10)]
    assert main(["train_rl.py", *wrong, "--lr", "9" * 10**6]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert max(map(len, lines)) <= 2 + MAX_PROBLEM
