"""Tables for the terminal."""

from __future__ import annotations

from megatron_rl.metrics.table import format_table


def test_numbers_are_aligned_right_and_text_left() -> None:
    table = format_table(["environment", "pass@1", "n"], [["arithmetic", 0.51234, 200], ["aime", None, 5]])
    assert table.splitlines() == [
        "environment | pass@1 |   n",
        "------------+--------+----",
        "arithmetic  | 0.5123 | 200",
        "aime        |      - |   5",
    ]


def test_wide_characters_take_two_cells() -> None:
    lines = format_table(["a", "b"], [["数学", "x"], ["ab", "y"]]).splitlines()
    assert lines[2:] == ["数学 | x", "ab   | y"]


def test_line_breaks_are_flattened() -> None:
    assert format_table(["a", "b"], [["x\ny", "z"]]).splitlines() == ["a   | b", "----+--", "x y | z"]
