"""The environment for any data set: columns, templates, chats, rewards of one's own, and what is wrong with them."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from megatron_rl.environments.results import judge
from megatron_rl.environments.selftest import run_checks
from megatron_rl.types import Demonstration, LaterTurn, Transcript
from tests.support.dataset_files import NO_TEST, SUM, assistant, grade, make, problems, train, user, write

EXAMPLES = Path(__file__).parents[3] / "examples" / "environments"


class TestPrompts:
    def test_published_layouts_need_no_columns(self, folder):
        [task] = train([{"problem": "P?", "answer": "7", "solution": ""}], reward="math")
        assert (task.prompt, task.data) == ((user("P?"),), {"gold": "7"})

    def test_named_columns_and_fields(self, folder):
        row = {"q": {"text": "P?"}, "a": 7, "answer": "no", "problem": "no"}
        [task] = train([row], prompt="q.text", answer="a", reward="exact_number")
        assert (task.prompt, task.data["gold"]) == ((user("P?"),), "7")

    @pytest.mark.parametrize(
        ("value", "gold"),
        [(0.5, "0.5"), (33.0, "33"), (-1e-7, "-0.0000001"), (10**30, "1" + "0" * 30), (Decimal("12.50"), "12.50"),
         (Decimal("7.00"), "7"), (Decimal("1E+3"), "1000")],
    )  # fmt: skip
    def test_answers_that_are_numbers(self, folder, value, gold):
        if isinstance(value, Decimal):
            table = pyarrow.Table.from_pylist([{"problem": "P?", "answer": value}])
            pyarrow.parquet.write_table(table, "rows.parquet")
            [task] = train(path="rows.parquet", reward="math", template="{problem} {answer}")
        else:
            [task] = train([{"problem": "P?", "answer": value}], reward="math", template="{problem} {answer}")
        assert (task.prompt, task.data["gold"]) == ((user(f"P? {gold}"),), gold)

    def test_a_prompt_that_ends_with_the_assistant_is_left_out_with_a_line(self, folder, caplog):
        caplog.set_level("INFO")
        talk = [user("1+1?"), assistant("2"), user("2+2?")]
        rows = [{"prompt": [*talk, assistant("Let me")], "label": "4"}, {"prompt": talk, "label": "4"}]
        [task] = train(rows, reward="math")
        assert task.prompt == tuple(talk), "whole, and not cut at what the assistant said"
        assert "1 that cannot be read" in caplog.text
        assert "row 1 has a prompt that ends with the assistant" in caplog.text
        [shown] = make([{"messages": talk[:2]}]).demonstrations("train")
        assert shown.completion == "2"

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
