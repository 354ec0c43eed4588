"""The environment for any data set: columns, templates, chats, rewards of one's own, and what is wrong with them."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import yaml

from megatron_rl.environments.__main__ import main
from megatron_rl.environments.checks import survey_tasks
from megatron_rl.environments.loader import find_environment
from megatron_rl.environments.results import judge
from megatron_rl.environments.selftest import run_checks
from megatron_rl.errors import ConfigError
from megatron_rl.metrics.rollouts import gold_answer
from megatron_rl.types import Demonstration, LaterTurn, Task, Transcript

EXAMPLES = Path(__file__).parents[3] / "examples" / "environments"
NO_TEST = {"held_out": 0}
REWARDS = '''
"""Rewards of a user."""
from megatron_rl.types import Grade

REWARDS = (-2.0, 3.0)

def share(completion, row):
    return row["words"][0].count(completion) / row["number"]

def not_a_number(completion, row):
    return float("nan")

def raises(completion, row):
    return row["nothing"]

def graded(completion, row):
    return Grade(0.5, {"length": len(completion)}, "wrong", completion)

def alone(completion):
    return 0.0

constant = 3
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current directory."""
    monkeypatch.chdir(tmp_path)
    Path("rewards.py").write_text(REWARDS)
    return tmp_path


def write(name, rows):
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def make(rows=None, **options):
    if rows is not None:
        options = {"path": write("rows.jsonl", rows), **options}
    return find_environment("dataset").from_options(options)


def train(rows=None, **options):
    return list(make(rows, **options).tasks("train"))


def problems(rows=None, **options):
    """What is wrong with the options or the tasks; each a line."""
    try:
        found = survey_tasks(make(rows, **options)).problems
    except ConfigError as error:
        found = error.lines
    assert not any("\n" in line for line in found)
    return found


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def grade(environment, text, **data):
    [task] = environment.tasks("train")
    return judge(environment, (task, Transcript(text, "stop", len(text))))


SUM = {"question": "1+1?", "answer": "2", "extra": {"kind": "sum", "of": 2}}


class TestPrompts:
    def test_published_layouts_need_no_columns(self, folder):
        [task] = train([{"problem": "P?", "answer": "7", "solution": ""}], reward="math")
        assert (task.prompt, task.data) == ((user("P?"),), {"gold": "7"})

    def test_named_columns_and_fields(self, folder):
        row = {"q": {"text": "P?"}, "a": 7, "answer": "no", "problem": "no"}
        [task] = train([row], prompt="q.text", answer="a", reward="exact_number")
        assert (task.prompt, task.data["gold"]) == ((user("P?"),), "7")

    def test_a_template_has_columns_in_braces_and_tex_stays(self, folder):
        template = "{extra.kind} of {extra.of}: {question} Write \\boxed{answer}, \\frac{1}{2} or {}."
        [task] = train([SUM], reward="math", template=template)
        assert task.prompt == (user("sum of 2: 1+1? Write \\boxed{answer}, \\frac{1}{2} or {}."),)

    def test_a_template_and_a_function_need_no_other_column(self, folder):
        [task] = train([{"q": "1+1", "n": 2}], template="{q}=", chat=False, reward="rewards.py:share")
        assert (task.prompt, task.data["row"]) == ("1+1=", {"q": "1+1", "n": 2})

    def test_a_column_beside_the_problem_may_be_empty(self, folder):
        apps = {"input_output": json.dumps({"inputs": ["1"], "outputs": ["1"]}), "difficulty": "interview"}
        rows = [apps | {"question": "P?", "starter_code": ""}, apps | {"question": "", "starter_code": "def f():"}]
        [task] = train(rows, reward="unit_tests", template="{question}\n{starter_code}")
        assert task.prompt == (user("P?\n"),), "a row without a problem is left out"

    def test_deepscaler_as_published(self, folder):
        [entry] = yaml.safe_load((EXAMPLES / "deepscaler.yaml").read_text())
        row = {"problem": "P?", "answer": "-\\frac{2}{3}", "solution": ""}
        environment = make([row], **{name: value for name, value in entry["args"].items() if name != "path"} | NO_TEST)
        [task] = environment.tasks("train")
        assert task.prompt == (user("P? Let's think step by step and output the final answer within \\boxed{}."),)
        assert grade(environment, "</think>It is $\\boxed{-2/3}$.").reward == 1.0
        assert grade(environment, "It is $\\boxed{-2/3}$.").reward == 0.0

    def test_a_system_prompt_comes_first_where_the_row_has_none(self, folder):
        [task] = train([SUM], reward="math", system="Be brief.")
        assert task.prompt == ({"role": "system", "content": "Be brief."}, user("1+1?"))
        own = {"role": "system", "content": "Be long."}
        [task] = train([{"prompt": [own, user("1+1?")], "label": "2"}], reward="math", system="Be brief.")
        assert task.prompt == (own, user("1+1?"))

    def test_plain_text(self, folder):
        [task] = train([{"question": "1+1=", "answer": "2"}], reward="exact", chat=False)
        assert task.prompt == "1+1="
        [line] = problems([{"prompt": [user("a"), assistant("b"), user("c")], "label": "2"}], reward="math", chat=False)
        assert line.endswith("row 1 has a chat in prompt, which is no plain text; leave out chat: false")

    def test_a_chat_with_earlier_turns_is_a_prompt(self, folder):
        turns = [user("a"), assistant("b"), user("c")]
        [task] = train([{"messages": turns, "gold": "1"}], prompt="messages", answer="gold", reward="exact")
        assert task.prompt == tuple(turns)


class TestLearning:
    def test_completions_of_one_prompt_are_all_learnt(self, folder):
        rows = [{"prompt": "Q?", "completion": text} for text in ("a", "b", "a")]
        environment = make(rows)
        assert [task.data["gold"] for task in environment.tasks("train")] == ["a"]
        shown = list(environment.demonstrations("train"))
        assert [row.completion for row in shown] == ["a", "b", "a"]
        assert all(row.task.prompt == (user("Q?"),) for row in shown)

    def test_a_chat_is_learnt_turn_by_turn(self, folder):
        system = {"role": "system", "content": "s"}
        turns = [system, user("a"), assistant("b"), user("c"), assistant("d")]
        [shown] = make([{"messages": turns}]).demonstrations("train")
        assert shown.task.prompt == (system, user("a"))
        assert (shown.completion, shown.later) == ("b", (LaterTurn((user("c"),), "d"),))

    def test_prompt_and_completion_may_both_be_chats(self, folder):
        [shown] = make([{"prompt": [user("a")], "completion": [assistant("b")]}]).demonstrations("train")
        assert (shown.task.prompt, shown.completion) == ((user("a"),), "b")

    @pytest.mark.parametrize(
        "turns", [[assistant("b")], [user("a"), assistant("b"), assistant("c")]], ids=["first", "twice"]
    )
    def test_chats_that_cannot_be_learnt(self, folder, turns):
        [line] = problems([{"messages": turns}])
        assert line.endswith("row 1 has a chat in which the assistant speaks first, or twice in a row")

    def test_completions_beside_a_reward(self, folder):
        row = {"question": "1+1?", "answer": "2", "worked": "1 and 1 is \\boxed{2}"}
        environment = make([row], prompt="question", answer="answer", completion="worked", reward="math")
        [shown] = environment.demonstrations("train")
        assert isinstance(shown, Demonstration) and shown.completion == row["worked"]
        assert shown.task == next(iter(environment.tasks("train")))
        assert [check for check in run_checks(environment) if check.passed is False] == []


class TestSplits:
    ROWS = [{"prompt": f"{n}?", "completion": str(n)} for n in range(64)]

    def test_held_out_rows_are_neither_trained_on_nor_learnt(self, folder):
        environment = make(self.ROWS, held_out=4)
        parts = {split: {task.id for task in environment.tasks(split)} for split in ("train", "test")}
        assert len(parts["train"]) + len(parts["test"]) == 64 and 4 < len(parts["test"]) < 32
        for split, ids in parts.items():
            assert {row.task.id for row in environment.demonstrations(split)} == ids

    def test_a_file_of_its_own(self, folder):
        environment = make(self.ROWS[:3], test_path=write("test.jsonl", self.ROWS[3:5]))
        assert [len(list(environment.tasks(split))) for split in ("train", "test")] == [3, 2]
        assert [row.completion for row in environment.demonstrations("test")] == ["3", "4"]

    def test_without_either_there_is_no_test_split(self, folder):
        assert list(make(self.ROWS).tasks("test")) == []

    def test_evaluated_only_all_of_it_is(self, folder):
        environment = make(self.ROWS)
        environment.evaluation_only = True
        assert len(list(environment.tasks("test"))) == 64

    @pytest.fixture
    def folder_of_splits(self, folder, monkeypatch):
        """What a clone of a data set is; ``datasets`` reads it as it reads the hub."""
        import datasets

        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
        Path("cloned").mkdir()
        write("cloned/train.jsonl", self.ROWS[:5])
        write("cloned/test.jsonl", self.ROWS[5:7])
        return "cloned"

    def test_splits_by_datasets(self, folder_of_splits):
        environment = make(path=folder_of_splits, test_split="test")
        assert [len(list(environment.tasks(split))) for split in ("train", "test")] == [5, 2]

    def test_a_folder_of_a_whole_disk_is_refused_before_it_is_looked_through(self, folder_of_splits, monkeypatch):
        monkeypatch.setattr("megatron_rl.environments.data.rows.MAX_FILES", 1)
        assert problems(path=folder_of_splits) == ["cloned is a folder with more than 1 files; name one of them"]

    def test_a_split_that_is_not_there(self, folder_of_splits):
        [line] = problems(path=folder_of_splits, split="validation")
        assert line.startswith("cannot read cloned (")
        assert "validation" in line and "train" in line and "test" in line
        assert line.endswith("use another split or config")


class TestRewards:
    ROW = {"prompt": "Q?", "words": ["aab"], "number": 2}

    def test_a_function_gets_the_completion_and_the_row(self, folder):
        environment = make([self.ROW], reward="rewards.py:share")
        assert environment.reward_range == (-2.0, 3.0)
        assert [grade(environment, text).reward for text in ("a", "b", "c")] == [1.0, 0.5, 0.0]

    def test_a_function_may_grade(self, folder):
        result = grade(make([self.ROW], reward="rewards.py:graded"), "abc")
        assert (result.reward, result.metrics) == (0.5, {"length": 3.0})
        assert (result.status, result.extracted) == ("wrong", "abc")

    @pytest.mark.parametrize(
        ("function", "code"), [("not_a_number", "invalid_reward"), ("raises", "environment_exception")]
    )
    def test_a_reward_that_is_none_is_masked(self, folder, function, code):
        result = grade(make([self.ROW], reward=f"rewards.py:{function}"), "a")
        assert result.failed and result.code == code

    def test_length_and_thought_hold_for_functions_too(self, folder):
        options = {"overlong_buffer": 4, "max_response_tokens": 16, "thinking": True}
        environment = make([self.ROW], reward="rewards.py:share", **options)
        [task] = environment.tasks("train")
        grades = [environment.grade(task, Transcript(text, "stop", 14)) for text in ("b</think>a", "a")]
        assert grades[0].reward == 0.0 - 0.5  # what is graded begins with the end of the thought
        assert grades[0].metrics == {"overlong_penalty": -0.5}

    @pytest.mark.parametrize(
        ("stated", "rewards", "right"),
        [
            ("", [1.0, 0.5, 0.0], [True, False, False]),
            ("REWARDS = (-1.0, 0.0)", [0.0, -1.0], [True, False]),
            ("REWARDS = (0.0, None)", [0.0, 7.5], [None, None]),
            ("", [0.0, -1.0, 2.0], [False, None, None]),
        ],
    )
    def test_right_is_the_highest_reward_of_the_file_whatever_the_length_costs(self, folder, stated, rewards, right):
        Path("other.py").write_text(f"{stated}\n\ndef f(completion, row):\n    return float(completion)\n")
        for options in ({}, {"overlong_buffer": 4, "max_response_tokens": 16}):
            environment = make([self.ROW], reward="other.py:f", **options)
            [task] = environment.tasks("train")
            found = [judge(environment, (task, Transcript(str(reward), "stop", 14))) for reward in rewards]
            assert [each.correct for each in found] == right

    def test_what_json_cannot_say_reaches_a_function_as_text_or_none(self, folder):
        import datetime

        import pyarrow.parquet

        row = {"prompt": "Q?", "date": datetime.date(2026, 1, 2), "share": float("nan"), "raw": b"x", "none": None}
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), "rows.parquet")
        [task] = train(path="rows.parquet", reward="rewards.py:share")
        assert task.data["row"] == {"prompt": "Q?", "date": "2026-01-02", "share": None, "raw": "b'x'", "none": None}

    @pytest.mark.parametrize(
        ("reward", "gold", "right"),
        [("math", "1/2", "\\boxed{0.5}"), ("dapo", "5", "Answer: 5"), ("deepscaler", "5", "x</think>\\boxed{5}"),
         ("exact_number", "5", "#### 5"), ("exact", "Oslo", " Oslo ")],
    )  # fmt: skip
    def test_graders_by_name(self, folder, reward, gold, right):
        environment = make([{"question": "?", "answer": gold}], reward=reward)
        lowest, highest = environment.reward_range
        assert grade(environment, right).reward == highest
        assert grade(environment, "6").reward == lowest
        assert [check for check in run_checks(environment) if check.passed is False] == []


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
    first, again = (train(TestSplits.ROWS[:4]) for _ in range(2))
    assert first == again and isinstance(first[0], Task)
