"""The environments of published data sets, on the real data: counts, prompts, answers, rewards."""

from __future__ import annotations

import json
import logging
import re
import time
from collections import Counter
from fractions import Fraction

import pytest

from megatron_rl.environments.checks import survey_tasks
from megatron_rl.environments.config import load_environment_specs
from megatron_rl.environments.data import AFTER, BEFORE
from megatron_rl.environments.loader import find_environment
from megatron_rl.environments.selftest import run_checks
from megatron_rl.errors import ConfigError
from megatron_rl.types import Transcript
from tests.unit.environments.conftest import problems_of

DAPO = "dapo-math-17k/dapo-math-17k.parquet"
REAL = {
    "dapo": {"path": DAPO},
    "aime": {"path": "aime2024/aime-2024.parquet"},
    "gsm8k": {"path": "gsm8k/train.jsonl", "test_path": "gsm8k/test.jsonl"},
    "math500": {"path": "math500/test.jsonl"},
    "countdown": {"path": "countdown/reasoning_gym_countdown_seed42.jsonl"},
}


@pytest.fixture
def real(shared_data):
    """Makes an environment on real data; options that end in ``path`` are below the shared folder."""

    def make(name, **options):
        given = {key: str(shared_data / value) if key.endswith("path") else value for key, value in options.items()}
        return find_environment(name).from_options(given)

    return make


def texts(environment, split):
    return [task.prompt[-1]["content"] for task in environment.tasks(split)]


def answer(text):
    return Transcript(text, "stop", len(text))


class TestDapo:
    def test_repeated_contradictory_and_damaged_rows_are_dropped_and_counted(self, real, caplog):
        caplog.set_level(logging.INFO, "megatron_rl")
        environment = real("dapo", path=DAPO, held_out=0)
        assert survey_tasks(environment).problems == []
        tasks = list(environment.tasks("train"))
        assert len(tasks) == 17_290 - 11 - 5
        # 17,917 rows: 17,274 kept, 22 of 11 problems with two answers, 5 damaged, the rest repeats
        [said] = [record.getMessage() for record in caplog.records]
        assert said.startswith("dapo: 17274 problems of ")
        assert "22 with two answers, 616 repeated, 5 with an answer over 15 digits" in said
        assert 17_274 + 22 + 616 + 5 == 17_917
        assert max(len(task.data["gold"]) for task in tasks) <= 15
        assert sum(task.data["gold"].startswith("-") for task in tasks) > 300

    def test_the_published_prompt_stays(self, real):
        shown = texts(real("dapo", path="dapo-math-17k/sample-200.jsonl", held_out=0), "train")
        assert all(text.startswith(BEFORE) and text.endswith(AFTER) for text in shown)
        assert len(shown) == len(set(shown)) == 198, "two rows repeat a problem"

    def test_one_problem_in_256_is_held_out_whatever_the_order(self, real):
        environment = real("dapo", path=DAPO)
        train, test = (list(environment.tasks(split)) for split in ("train", "test"))
        assert len(train) + len(test) == 17_274
        assert 40 <= len(test) <= 100
        assert not {task.id for task in train} & {task.id for task in test}
        few = real("dapo", path="dapo-math-17k/sample-200.jsonl")
        assert {task.id for task in few.tasks("test")} <= {task.id for task in test}

    def test_problems_of_math_500_can_be_left_out(self, real):
        kept = texts(real("dapo", path=DAPO, held_out=0, exclude_path="math500/test.jsonl"), "train")
        assert len(kept) == 17_274 - 8  # seven problems of MATH-500, one of them in two spellings

    def test_the_reward_is_plus_or_minus_one(self, real):
        environment = real("dapo", path="dapo-math-17k/sample-200.jsonl")
        task = next(iter(environment.tasks("train")))
        assert task.data["gold"] == "34"
        assert environment.grade(task, answer("so\nAnswer: 34")).reward == 1.0
        wrong = environment.grade(task, answer("Answer: 35"))
        assert (wrong.reward, wrong.metrics["correct"], wrong.metrics["no_answer"]) == (-1.0, 0.0, 0.0)
        assert environment.grade(task, answer("")).metrics["no_answer"] == 1.0

    def test_a_format_reward_goes_to_wrong_answers_alone(self, real):
        environment = real("dapo", path="dapo-math-17k/sample-200.jsonl", format_reward=0.5)
        task = next(iter(environment.tasks("train")))
        rewards = [environment.grade(task, answer(text)).reward for text in ("Answer: 34", "Answer: 35", "hm")]
        assert rewards == [1.0, -0.5, -1.0]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"overlong_buffer": 4}, "overlong_buffer is 4 and max_response_tokens 0; give the limit"),
            ({"overlong_buffer": 17, "max_response_tokens": 16}, "overlong_buffer is 17 and max_response_tokens 16"),
            ({"overlong_buffer": -1, "max_response_tokens": 16}, "overlong_buffer is -1"),
            ({"overlong_buffer": 4, "max_response_tokens": 16, "overlong_penalty": 0.0}, "overlong_penalty is 0.0"),
            ({"overlong_penalty": float("inf")}, "overlong_penalty is inf"),
            ({"grader": "maths"}, "grader is 'maths'; use dapo or math"),
            ({"held_out": 1}, "held_out is 1"),
            ({"format_reward": 2.0}, "format_reward is 2.0"),
            ({"pathe": "x"}, "did you mean 'path'"),
        ],
    )
    def test_bad_options(self, options, message):
        with pytest.raises(ConfigError, match=message):
            find_environment("dapo").from_options(options)


class TestAime:
    @pytest.mark.parametrize(
        ("path", "year"),
        [
            ("aime2024/aime-2024.jsonl", 2024),
            ("aime2024/aime-2024.parquet", 2024),
            ("aime2025/aime-2025.jsonl", 2025),
            ("aime2025/aime-2025.parquet", 2025),
        ],
    )
    def test_thirty_problems(self, real, path, year):
        environment = real("aime", path=path, year=year)
        assert survey_tasks(environment).problems == []
        tasks = list(environment.tasks("test"))
        assert len(tasks) == 30
        assert all(0 <= int(task.data["gold"]) <= 999 for task in tasks)
        assert not any(task.data["gold"].startswith("0") for task in tasks)

    def test_it_refuses_training_in_one_line(self, real):
        environment = real("aime", path="aime2024/aime-2024.jsonl")
        with pytest.raises(ConfigError, match="aime cannot be trained on.*evaluation_only: true") as raised:
            environment.tasks("train")
        assert len(raised.value.lines) == 1

    def test_the_list_refuses_training_too(self, tmp_path):
        path = tmp_path / "list.yaml"
        path.write_text("- {agent_type: AIMEAgent, evaluation_only: false}\n")
        [problem] = problems_of(path)
        assert problem.startswith(f"{path}:1: aime cannot be trained on")

    @pytest.mark.parametrize("spelt", ["033", "33", "336^\\circ", "336^{\\circ}", "000"])
    def test_padded_answers_and_degrees_are_plain_integers(self, tmp_path, spelt):
        [task] = written(tmp_path, "aime", [{"problem": "P?", "answer": spelt}]).tasks("test")
        assert task.data["gold"] == str(int(spelt.partition("^")[0]))
        assert task.prompt[0]["content"] == f"{BEFORE}P?{AFTER}"

    @pytest.mark.parametrize("spelt", ["1000", "-3", "3.5", "12 or 13", "x"])
    def test_other_answers_are_refused(self, tmp_path, spelt):
        environment = written(tmp_path, "aime", [{"problem": "P?", "answer": spelt}])
        with pytest.raises(ConfigError, match="row 1 has the answer .*; answers of AIME are integers"):
            environment.tasks("test")

    def test_the_published_file_repeats_every_row(self, tmp_path):
        rows = [{"problem": f"P{index}?", "answer": str(index)} for index in range(3)] * 32
        assert len(list(written(tmp_path, "aime", rows).tasks("test"))) == 3


class TestGsm8k:
    def test_the_published_splits(self, real):
        environment = real("gsm8k", **REAL["gsm8k"])
        assert survey_tasks(environment).problems == []
        assert (len(list(environment.tasks("train"))), len(list(environment.tasks("test")))) == (7473, 1319)

    def test_prompt_answer_and_demonstration_of_the_first_row(self, real):
        environment = real("gsm8k", **REAL["gsm8k"])
        first = next(iter(environment.demonstrations("train")))
        assert first.task.data == {"gold": "72"}
        assert first.task.prompt[0]["content"].startswith("Natalia sold clips")
        assert "####" in first.task.prompt[0]["content"]
        assert first.completion == (
            "Natalia sold 48/2 = 24 clips in May.\n"
            "Natalia sold 48+24 = 72 clips altogether in April and May.\n#### 72"
        )

    def test_no_calculator_mark_and_no_comma_is_left(self, real):
        environment = real("gsm8k", **REAL["gsm8k"])
        rows = [*environment.demonstrations("train"), *environment.demonstrations("test")]
        assert len(rows) == 7473 + 1319
        assert not any("<<" in row.completion or ">>" in row.completion for row in rows)
        assert all(row.completion.endswith(f"\n#### {row.task.data['gold']}") for row in rows)
        assert all(Fraction(row.task.data["gold"]).denominator == 1 for row in rows)

    def test_a_training_file_alone_has_no_test_tasks(self, real):
        assert list(real("gsm8k", path="gsm8k/train.jsonl").tasks("test")) == []

    def test_evaluated_only_it_needs_a_test_file(self, real):
        environment = real("gsm8k", path="gsm8k/test.jsonl")
        environment.evaluation_only = True
        with pytest.raises(ConfigError, match="call it test_path"):
            environment.tasks("test")
        environment = real("gsm8k", test_path="gsm8k/test.jsonl")
        environment.evaluation_only = True
        assert survey_tasks(environment).problems == []

    @pytest.mark.parametrize(
        ("completion", "loose", "strict"),
        [("Six.\n#### 6", 1, 1), ("#### 5", 0, 0), ("\\boxed{6}", 1, 0), ("So it is 6", 1, 0), ("", 0, 0)],
    )
    def test_strictly_only_a_marked_number_counts(self, tmp_path, completion, loose, strict):
        rows = [{"question": "Q?", "answer": "3+3 = 6\n#### 6"}]
        for expected, options in ((loose, {}), (strict, {"strict": True})):
            environment = written(tmp_path, "gsm8k", rows, **options)
            [task] = environment.tasks("train")
            assert environment.grade(task, answer(completion)).reward == expected

    @pytest.mark.parametrize("solution", ["it is 5", "#### five", "#### 5 apples"])
    def test_a_solution_without_a_number_is_refused(self, tmp_path, solution):
        environment = written(tmp_path, "gsm8k", [{"question": "Q?", "answer": solution}])
        with pytest.raises(ConfigError, match="row 1 has an answer without #### and a number"):
            environment.tasks("train")


class TestMath500:
    def test_five_hundred_problems_for_evaluation_only(self, real):
        environment = real("math500", path="math500/test.jsonl")
        assert survey_tasks(environment).problems == []
        tasks = list(environment.tasks("test"))
        assert len(tasks) == 500
        assert tasks[1].data == {"gold": "p - q"}
        assert environment.gold_answer(tasks[1]) == "\\boxed{p - q}"
        with pytest.raises(ConfigError, match="math500 cannot be trained on"):
            environment.tasks("train")


class TestCountdown:
    @pytest.mark.parametrize(
        ("path", "count"),
        [("countdown/reasoning_gym_countdown_seed42.jsonl", 500), ("countdown/d1_countdown_cd3_test.jsonl", 256)],
    )
    def test_both_published_layouts(self, real, path, count):
        environment = real("countdown", path=path)
        assert survey_tasks(environment).problems == []
        tasks = [*environment.tasks("train"), *environment.tasks("test")]
        assert len(tasks) == count
        assert all(solves(environment.gold_answer(task), task) for task in tasks)

    def test_generated_puzzles_are_solvable_and_repeatable(self):
        made = find_environment("CountdownAgent").from_options({"train_tasks": 300, "test_tasks": 40})
        train, test = (list(made.tasks(split)) for split in ("train", "test"))
        assert (len(train), len(test)) == (300, 40)
        assert all(solves(made.gold_answer(task), task) for task in [*train, *test])
        assert not {task.id for task in train} & {task.id for task in test}
        again = find_environment("countdown").from_options({"train_tasks": 300, "test_tasks": 40})
        assert list(again.tasks("train")) == train
        other = find_environment("countdown").from_options({"train_tasks": 300, "seed": 1})
        assert list(other.tasks("train")) != train

    def test_options_too_narrow_are_an_error_and_no_endless_loop(self):
        environment = find_environment("countdown").from_options({"max_number": 2, "max_numbers": 3})
        [problem] = {text.partition("found only")[1] for text in survey_tasks(environment).problems}
        assert problem == "found only"

    @pytest.mark.parametrize(
        ("row", "message"),
        [
            ({"nums": [], "target": 3}, r"has nums \[\]; it must be a list of numbers"),
            ({"nums": [1, 2.5], "target": 3}, "has 2.5 in nums"),
            ({"nums": [1, 2], "target": "three"}, "has 'three' in target"),
            ({"nums": [1, True], "target": 3}, "has True in nums"),
        ],
    )
    def test_bad_rows(self, tmp_path, row, message):
        with pytest.raises(ConfigError, match=message):
            written(tmp_path, "countdown", [row]).tasks("train")


def solves(text, task):
    """Whether the expression has the numbers, each once, and the value asked for."""
    puzzle = json.loads(task.data["gold"])
    expression = text.removeprefix("Answer: ")
    assert set(expression) <= set("0123456789+-*/() ")
    used = Counter(int(number) for number in re.findall(r"\d+", expression))
    exact = re.sub(r"(\d+)", r"Fraction(\1)", expression)
    value = eval(exact, {"Fraction": Fraction})  # noqa: S307 - digits and operators only, checked above
    return used == Counter(puzzle["numbers"]) and value == puzzle["target"]


def written(folder, name, rows, **options):
    """The environment on a file of these rows."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return find_environment(name).from_options({"path": str(path), **options})


@pytest.mark.parametrize("name", sorted(REAL))
def test_the_self_test_passes_on_the_real_data(real, name):
    checks = run_checks(real(name, **REAL[name]), 500)
    assert [check for check in checks if check.passed is False] == []
    assert [check.passed for check in checks if check.name == "gold answers"] == [True]


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("DAPOAgent", "dapo"),
        ("AIMEAgent", "aime"),
        ("GSM8KAgent", "gsm8k"),
        ("MATH500Agent", "math500"),
        ("CountdownAgent", "countdown"),
        ("examples.rl.environments.countdown.countdown_agent.CountdownAgent", "countdown"),
        ("examples.rl.environments.math.gsm8k_agent.GSM8KAgent", "gsm8k"),
    ],
)
def test_megatrons_spelling(tmp_path, spelling, name):
    path = tmp_path / "list.yaml"
    path.write_text(f"- agent_type: {spelling}\n  agent_args: {{format_reward: 0.0}}\n  weight: 1.0\n")
    [spec] = load_environment_specs(path)
    assert (spec.name, spec.weight, spec.options) == (name, 1.0, {"format_reward": 0.0})
    assert spec.evaluation_only == (name in ("aime", "math500"))


def test_check_of_the_whole_set_is_quick(shared_data, tmp_path):
    path = tmp_path / "list.yaml"
    path.write_text(
        f"- {{agent_type: DAPOAgent, agent_args: {{path: '{shared_data / DAPO}'}}, weight: 1.0}}\n"
        f"- {{agent_type: AIMEAgent, agent_args: {{path: '{shared_data}/aime2024/aime-2024.jsonl'}}, "
        "weight: 0.0, evaluation_only: true}\n"
    )
    start = time.process_time()
    assert problems_of(path) == []
    assert time.process_time() - start < 10  # 1.5 s on an idle core
