"""Tables for the terminal."""

from __future__ import annotations

import io

import pytest

from megatron_rl.metrics.console import format_table, print_table


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


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


def test_brackets_and_emoji_names_are_text_and_long_cells_stay_whole() -> None:
    table = format_table(["a"], [["[bold]x[/bold] :smile: " + "y" * 200]])
    assert table.splitlines()[2] == "[bold]x[/bold] :smile: " + "y" * 200


def test_a_terminal_gets_a_frame_and_a_file_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        print_table(stream, ["environment", "pass@1"], [["[i]aime", 0.5]])
    assert file.getvalue() == "environment | pass@1\n------------+-------\n[i]aime     |    0.5\n"
    assert "╭" in terminal.getvalue() and "[i]aime" in terminal.getvalue()
