"""The arithmetic environment: its splits, its grader and the habits of its demonstrations."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from megatron_rl.environments.loader import find_environment
from megatron_rl.types import Task, Transcript

Arithmetic = find_environment("arithmetic")
TASK = Task("3+2-3+4+8=", "3+2-3+4+8=", {"answer": 14})
STEP = re.compile(r"(\d+)([+-]\d+)=(\d+)")


def grade(text: str, reason: str = "stop") -> float:
    return Arithmetic().grade(TASK, Transcript(text, reason, len(text))).reward


def test_the_worked_example():
    assert Arithmetic().gold_answer(TASK) == "3+2=5,5-3=2,2+4=6,6+8=14#14"


@pytest.mark.parametrize("text", ["3+2=5,5-3=2,2+4=6,6+8=14#14", "#14", "#3#14", "nonsense#14"])
def test_right_answers(text):
    assert grade(text) == 1.0
    assert grade(text, "length") == 0.0


@pytest.mark.parametrize(
    "text",
    ["", "14", "#", "#14 ", "# 14", "#014", "#+14", "#14#", "#14.0", "#14\n", "#15", "#1", "#\u0661\u0664"],
)
def test_wrong_answers(text):
    assert grade(text) == 0.0


def test_metrics_tell_chains_from_shortcuts():
    grader = Arithmetic().grade
    assert grader(TASK, Transcript("6+8=14#14", "stop", 9)).metrics == {"chain": 1.0}
    assert grader(TASK, Transcript("#14", "stop", 3)).metrics == {"chain": 0.0}


def test_tasks_are_distinct_right_and_repeatable():
    environment = Arithmetic(train_tasks=2000, test_tasks=300)
    tasks = list(environment.tasks("train"))
    assert len({task.id for task in tasks}) == len(tasks) == 2000
    assert tasks == list(environment.tasks("train"))
    assert tasks != list(Arithmetic(train_tasks=2000, seed=1).tasks("train"))
    for task in tasks:
        terms = re.findall(r"[+-]?\d+", task.prompt)
        totals = [sum(map(int, terms[: count + 1])) for count in range(len(terms))]
        assert 3 <= len(terms) <= 5
        assert all(0 <= total <= 19 for total in totals)
        assert all(0 <= abs(int(term)) <= 9 for term in terms)
        assert task.data == {"answer": totals[-1]}
        assert len(task.prompt) <= 16


def test_splits_are_disjoint_under_all_options():
    train, test = set(), set()
    for seed, most in ((0, 5), (1, 5), (0, 4)):
        environment = Arithmetic(
            seed=seed, max_terms=most, train_tasks=1500, test_tasks=150, demonstrations=1500
        )
        train |= {task.prompt for task in environment.tasks("train")}
        train |= {row.task.prompt for row in environment.demonstrations("train")}
        test |= {task.prompt for task in environment.tasks("test")}
    assert not train & test


def test_all_there_are_when_fewer_exist_than_asked_for():
    environment = Arithmetic(
        min_terms=2, max_terms=2, max_operand=2, max_total=3, train_tasks=999, test_tasks=999
    )
    prompts = {task.prompt for split in ("train", "test") for task in environment.tasks(split)}
    pairs = [(a, b) for a in range(3) for b in range(3)]
    plus = {f"{a}+{b}=" for a, b in pairs if a + b <= 3}
    assert prompts == plus | {f"{a}-{b}=" for a, b in pairs if a >= b}


def test_longer_chains():
    environment = Arithmetic(min_terms=6, max_terms=12, max_operand=99, max_total=150, train_tasks=50)
    tasks = list(environment.tasks("train"))
    assert {task.prompt.count("+") + task.prompt.count("-") for task in tasks} <= set(range(5, 12))
    assert all(environment.gold_answer(task).endswith(f"#{task.data['answer']}") for task in tasks)


def test_demonstrations_can_be_taken_up_anywhere():
    environment = Arithmetic(demonstrations=200)
    stream = list(environment.demonstrations("train"))
    assert [environment.demonstration(index) for index in (0, 77, 199)] == [stream[i] for i in (0, 77, 199)]
    assert len(stream) == 200
    assert list(environment.demonstrations("test")) == []


def test_the_curriculum_starts_flawless_and_turns_bad():
    count = 6000
    environment = Arithmetic(demonstrations=count, shortcut_start=0.5)
    rows = list(environment.demonstrations("train"))
    early, late = rows[: count // 2], rows[count // 2 :]
    assert all(row.completion == environment.gold_answer(row.task) for row in early)
    drills = [row for row in rows if len(re.findall(r"\d+", row.task.prompt)) == 2]
    assert len(drills) / count == pytest.approx(0.3, abs=0.03)
    assert {int(re.match(r"\d+", row.task.prompt)[0]) for row in drills} == set(range(20))
    shortcuts = [row for row in late if "=" not in row.completion]
    assert len(shortcuts) / len(late) == pytest.approx(0.6, abs=0.03)
    assert all(row.completion == f"#{row.task.data['answer']}" for row in shortcuts)
    assert any(row in drills for row in shortcuts)


def test_slips_are_carried_to_the_end():
    environment = Arithmetic(demonstrations=4000, shortcut_start=0.0, shortcut_share=0.0)
    slipped = steps = 0
    for row in environment.demonstrations("train"):
        chain = STEP.findall(row.completion)
        if len(chain) == 1:
            assert row.completion == environment.gold_answer(row.task)  # a drill never slips
            continue
        for before, after in pairwise(chain):
            assert after[0] == before[2]
        assert row.completion.endswith(f"#{chain[-1][2]}")
        for value, term, result in chain:
            steps += 1
            off = abs(int(result) - max(0, int(value) + int(term)))
            assert off <= 3
            if off:
                slipped += 1
                assert 0 <= int(result) <= 19
    assert slipped / steps == pytest.approx(0.1, abs=0.015)


@pytest.mark.parametrize(
    "options",
    [{"min_terms": 1}, {"min_terms": 6}, {"slip_rate": 1.5}, {"test_tasks": -1}, {"max_operand": 0}],
)
def test_options_that_make_no_sense(options):
    with pytest.raises(ValueError, match=r"must|shares"):
        Arithmetic(**options)
