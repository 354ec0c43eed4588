"""Servers of environments that runs of one pytest process share."""

from __future__ import annotations

from tests.support.runs import served_lists

DIGITS = "- environment: tests.support.e2e_environments:Digits\n"


def test_equal_lists_without_paths_share_a_server(tmp_path, monkeypatch):
    commands = []
    for name, text in {"one": DIGITS, "other": DIGITS, "with_path": f"{DIGITS}  count: 4  # ./rows.jsonl\n"}.items():
        (tmp_path / name).write_text(text)
        commands.append(["--lr", "1", "--langrl-env-config", str(tmp_path / name)])
    first = served_lists([commands[0], commands[2]])
    assert list(first) == [DIGITS]
    assert served_lists([commands[1]]) == first
    monkeypatch.setenv("KEY_OF_A_GRADER", "1")
    assert served_lists([commands[1]])[DIGITS] != first[DIGITS]
