"""``python -m megatron_rl.environments``: list, test and new."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest

from megatron_rl.environments import selftest
from megatron_rl.environments.__main__ import main


def test_list_shows_names_and_descriptions(capsys):
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = (line for line in lines if line.startswith("arithmetic "))
    assert line.partition(" ")[2].strip().startswith("Adds and subtracts small numbers")
    columns = {len(line) - len(line.partition(" ")[2].lstrip()) for line in lines}
    assert len(columns) == 1, "descriptions do not stand in a column"


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
        ("Slow", "speed           FAIL"),
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


def test_list_names_a_broken_environment_among_the_others(capsys, monkeypatch):
    torn = {"torn": ("cannot be imported: KeyError: 'gold'", "Traceback ...")}
    found = {"arithmetic": "Adds."}, torn
    monkeypatch.setattr("megatron_rl.environments.__main__.list_environments", lambda seconds: found)
    assert main(["list"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "arithmetic  Adds.\ntorn        cannot be imported: KeyError: 'gold'\n"
    assert "Traceback" in captured.err


def test_the_speed_is_shown(capsys):
    assert main(["test", "arithmetic", "--limit", "20"]) == 0
    [row] = [line for line in capsys.readouterr().out.splitlines() if "speed" in line]
    assert row.split()[1] == "ok"
    assert int(row.split()[2].replace(",", "")) > selftest.SLOWEST


def test_new_writes_an_environment_whose_test_passes(capsys, tmp_path):
    assert main(["new", "odd_or_even", "--dir", str(tmp_path)]) == 0
    module = tmp_path / "odd_or_even" / "__init__.py"
    printed = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("check it:"))
    assert shlex.split(printed)[2:] == ["python", "-m", "megatron_rl.environments", "test", f"{module}:OddOrEven"]
    assert len(module.read_text().splitlines()) <= 26
    assert main(shlex.split(printed)[5:]) == 0
    assert "FAIL" not in capsys.readouterr().out
    run = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(module.with_name("test_odd_or_even.py"))]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("arithmetic", "an environment 'arithmetic' exists"),
        ("arithmetic_agent", "an environment 'arithmetic' exists, and 'arithmetic_agent' would select it"),
        ("there", "there exists already"),
        ("file", "exists already"),
        ("megatron_rl", "is an installed module"),
        ("torch", "is an installed module"),
        ("json", "is an installed module"),
        ("Odd", "cannot name an environment"),
        ("class", "cannot name an environment"),
        ("1st", "cannot name an environment"),
        ("../up", "cannot name an environment"),
        ("_hidden", "cannot name an environment"),
        ("a" * 41, "cannot name an environment"),
        ("", "cannot name an environment"),
    ],
)
def test_new_refuses_a_name_in_one_line(capsys, tmp_path, name, message):
    (tmp_path / "there").mkdir()
    (tmp_path / "file.py").touch()
    assert main(["new", name, "--dir", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.py", "there"]


def test_new_refuses_a_folder_that_is_a_file(capsys, tmp_path):
    (tmp_path / "file").touch()
    assert main(["new", "fine", "--dir", str(tmp_path / "file")]) == 1
    assert "cannot write" in capsys.readouterr().err
