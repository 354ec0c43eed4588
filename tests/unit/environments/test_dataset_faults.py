"""What is wrong with a data set, its rows and rewards, and what the commands say of it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from megatron_rl.environments.__main__ import main
from megatron_rl.environments.selftest import run_checks
from megatron_rl.metrics.rollouts import gold_answer
from megatron_rl.types import Task
from tests.support.dataset_files import SUM, make, problems, train, write

EXAMPLES = Path(__file__).parents[3] / "examples" / "environments"
ROWS = [SUM]


@pytest.mark.parametrize(
    ("rows", "options", "wanted"),
    [
        (None, {}, "ValueError: path is missing; give a file, or the name of a data set on the Hugging Face hub"),
        (None, {"path": "none.jsonl"}, "none.jsonl cannot be read (No such file or directory)"),
        (ROWS, {"reward": "maths"}, "there is no grader 'maths': did you mean math?"),
        (ROWS, {"reward": "rewards.py:shares"}, "'rewards.py:shares': its file defines no 'shares': did you mean"),
        (ROWS, {"reward": "reward.py:share"}, "grader 'reward.py:share' cannot be imported from"),
        (ROWS, {"reward": "rewards.py:alone"}, "reward rewards.py:alone cannot be called as function(completion, row)"),
        (ROWS, {"reward": "rewards.py:constant"}, "reward rewards.py:constant cannot be called as function("),
        (ROWS, {}, "question, answer, extra have nothing to learn; set reward: math, or file.py:function"),
        ([{"a": 1}], {"reward": "math"}, "it has a; or name its columns: prompt, and answer or completion"),
        (ROWS, {"prompt": "quest", "answer": "answer", "reward": "math"}, "needs the columns quest, answer; it has"),
        (ROWS, {"prompt": "question", "reward": "math"}, "reward math compares with the right answer; give its"),
        (ROWS, {"answer": "answer", "reward": "math"}, "name a column, and nothing the prompt; give prompt or"),
        (ROWS, {"template": "Solve it.", "reward": "math"}, "template names no column in braces"),
        (ROWS, {"template": "{quest}", "reward": "math"}, "question, answer, quest or "),
        (ROWS, {"held_out": 1}, "held_out is 1; use 0, or at least 2"),
        (ROWS, {"held_out": 4, "test_path": "x.jsonl"}, "held_out is 4; use 0, or at least 2 where"),
        (ROWS, {"test_split": "test"}, "test_split is of a data set with splits, and path is a file; use test_path"),
        (ROWS, {"system": "s", "chat": False}, "system is a message of a chat, and chat is false"),
        (ROWS, {"reward": "rewards.py:share", "format_reward": 0.1}, "format_reward is for graders"),
        (ROWS, {"prompts": "question"}, "dataset has no option 'prompts'; did you mean 'prompt'?"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line(folder, rows, options, wanted):
    [line] = problems(rows, **options)
    assert wanted in line


@pytest.mark.parametrize("stated", ["(1.0, 0.0)", "(0.0,)", "'ab'", "(0, float('nan'))", "(True, 2)", "(None, 1.0)"])
def test_a_range_of_rewards_that_is_none(folder, stated):
    Path("other.py").write_text(f"REWARDS = {stated}\n\ndef f(completion, row):\n    return 0.0\n")
    [line] = problems(ROWS, reward="other.py:f")
    assert "REWARDS beside reward other.py:f is" in line and "; write (lowest, highest), or (lowest, None)" in line


def test_no_more_is_read_than_a_run_takes(folder, monkeypatch):
    """`test` read three million rows for minutes before it said so; repeated ones do not count."""
    parsed = []
    monkeypatch.setattr("megatron_rl.environments.data.MAX_ROWS", 50)
    rows = [{"question": f"{number}+1=", "answer": "1"} for number in range(400)]
    assert len(train(rows[:50] * 3, reward="math")) == 50
    wanted = "train rows.jsonl has more than {} different problems; give fewer"
    assert problems(rows, reward="math") == [wanted.format(50)]
    assert problems(rows, reward="math", held_out=4) == [wanted.format(100)]
    environment = make(rows, reward="math")
    parse = environment.parse
    monkeypatch.setattr(environment, "parse", lambda row: parsed.append(row) or parse(row))
    assert run_checks(environment)[0].detail == wanted.format(50)
    assert len(parsed) < 60, "of 400"


def test_bad_rows_are_counted_and_left_out(folder, caplog):
    caplog.set_level(logging.INFO, "megatron_rl")
    rows = [SUM, {"question": "2+2?", "answer": None}, {"question": "", "answer": "1"}, {"question": "3?"}]
    assert len(train(rows, reward="math")) == 1
    [said] = [record.getMessage() for record in caplog.records]
    assert said.startswith("dataset: 1 problems of rows.jsonl; dropped: 3 that cannot be read; the first of these: ")
    assert said.endswith("rows.jsonl: row 2 has answer of type NoneType (None); it must be text")
    [line] = problems(rows[1:], reward="math")
    assert line.startswith("rows.jsonl has no usable row; dropped of 3 rows: 3 that cannot be read; the first")


def test_the_self_test_of_the_command(folder, capsys):
    write("rows.jsonl", [SUM, {"question": "2+2?", "answer": "4"}])
    assert main(["test", "dataset", "--option", "path=rows.jsonl", "--option", "reward=math"]) == 0
    assert "gold answers    ok    2 at 1" in capsys.readouterr().out
    assert main(["test", "dataset", "--option", "path=rows.jsonl", "--option", "reward=rewards.py:shares"]) == 1
    assert "its file defines no" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "options", "gold"),
    [
        ({"q": "1+1", "sum": 2}, {"prompt": "q", "answer": "sum"}, "2"),
        ({"q": "1+1", "sum": 2.5}, {"prompt": "q", "answer": "sum"}, "2.5"),
        ({"q": "1+1", "sum": ["2", "II"]}, {"prompt": "q", "answer": "sum"}, '["2", "II"]'),
        ({"q": "1+1", "sum": None}, {"prompt": "q", "answer": "sum"}, None),
        ({"question": "1+1?", "answer": "2"}, {}, "2"),
        ({"prompt": "1+1?", "completion": "2"}, {}, "2"),
        ({"q": "1+1"}, {"prompt": "q"}, None),
    ],
)
def test_the_right_answer_is_shown_beside_a_function(folder, row, options, gold):
    [task] = train([row], reward="rewards.py:share", **options)
    assert gold_answer(task) == gold
    assert task.data["row"] == row


@pytest.mark.parametrize(
    ("column", "code", "passed"),
    [
        ("sum", "completion.strip() == row['sum']", True),
        ("sum", "'#### ' + row['sum'] in completion", True),
        ("sum", "completion == 'So it is ' + row['sum']", False),
        ("wrong", "completion.strip() == row['sum']", False),
    ],
)
def test_the_self_test_gives_the_right_answer_to_a_function(folder, column, code, passed):
    Path("other.py").write_text(f"def f(completion, row):\n    return float({code})\n")
    rows = [{"q": f"{n}+0", "sum": str(n), "wrong": str(n + 1)} for n in range(3)]
    options = {"prompt": "q", "answer": column, "reward": "other.py:f"}
    [check] = [check for check in run_checks(make(rows, **options)) if check.name == "gold answers"]
    assert check.passed is passed
    assert passed or check.detail.endswith("write FORM = '... %s' beside the function")
    if "So it" in code:
        Path("formed.py").write_text(f"FORM = 'So it is %s'\n{Path('other.py').read_text()}")
        checks = run_checks(make(rows, **{**options, "reward": "formed.py:f"}))
        assert [check.passed for check in checks if check.name == "gold answers"] == [True]


def test_a_template_on_the_command_line_wants_quotes(folder, capsys):
    write("rows.jsonl", [{"q": "1+1"}])
    options = ["path=rows.jsonl", "chat=false", "reward=rewards.py:graded"]
    command = ["test", "dataset", *(word for option in options for word in ("--option", option)), "--option"]
    main([*command, 'template="{q}="'])
    assert "tasks           ok    the first 1 of train, test" in capsys.readouterr().out
    assert main([*command, "template={q}="]) == 1
    assert capsys.readouterr().err == (
        "error: --option template='{q}=' is no value of YAML; put a text with braces or colons into quotes, as in "
        "--option 'template=\"...\"'\n"
    )


def test_tasks_are_the_same_in_every_process(folder):
    rows = [{"prompt": f"{n}?", "completion": str(n)} for n in range(4)]
    first, again = (train(rows) for _ in range(2))
    assert first == again and isinstance(first[0], Task)
