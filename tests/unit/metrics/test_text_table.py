"""Tables for the terminal."""

from __future__ import annotations

import io

import pytest

from megatron_rl.metrics.table import can_draw_boxes, format_table


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


def test_box_characters_on_request_and_line_breaks_flattened() -> None:
    table = format_table(["a", "b"], [["x\ny", "z"]], unicode=True)
    assert table.splitlines() == [
        "a   \u2502 b",
        "\u2500\u2500\u2500\u2500\u253c\u2500\u2500",
        "x y \u2502 z",
    ]


def test_rows_must_fit_the_headers() -> None:
    with pytest.raises(ValueError, match="a row of 1 cells under 2 headers"):
        format_table(["a", "b"], [["x"]])


def test_boxes_depend_on_the_encoding() -> None:
    assert can_draw_boxes(io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    assert not can_draw_boxes(io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert not can_draw_boxes(io.StringIO())
