"""What ``python -m megatron_rl.environments new`` writes: an environment that works, and its test."""

from __future__ import annotations

_HEAD = '''\
"""Rename me: what is asked, and what counts as right."""

from megatron_rl.environments.base import {base}
from megatron_rl.types import Task


class {class_name}({base}):
    """Says whether a number is even."""

    name = "{name}"

    def __init__(self, *, size: int = 256) -> None:
        self._size = size  # an option: `args: {{size: 1000}}` in the YAML list

    def tasks(self, split):
        for number in range(self._size):
            if (number % 8 == 0) == (split == "test"):  # one in eight is held out
                gold = "no" if number % 2 else "yes"
                yield Task(id=str(number), prompt=f"Is {{number}} even? ", data={{"gold": gold}})
'''

_GRADE = '''
    def grade(self, task, transcript):
        return float(transcript.ended and transcript.text.strip() == task.data["gold"])

    def gold_answer(self, task):
        return task.data["gold"]
'''

_RUN = '''
    def run(self, task, client):
        messages = [{{"role": "user", "content": task.prompt}}]
        for _ in range(2):  # a second try
            answer = client.chat.completions.create(model="policy", messages=messages).choices[0].message
            if (answer.content or "").strip() == task.data["gold"]:
                return 1.0 if len(messages) == 1 else 0.5
            messages += [answer, {{"role": "user", "content": "Are you sure? "}}]
        return 0.0

    def gold_turns(self, task):
        return [task.data["gold"]]
'''

_TEST_HEAD = '''\
"""Run with: pytest {path}"""

from megatron_rl.environments.selftest import {imported}run_checks
{types}
from . import {class_name}


def test_gold_answers_score_the_maximum_and_empty_ones_the_minimum():
    assert [check for check in run_checks({class_name}()) if check.passed is False] == []


'''

_TEST_GRADE = '''\
def test_a_wrong_answer_and_a_cut_one_score_nothing():
    environment = {class_name}()
    task = next(iter(environment.tasks("train")))
    assert environment.grade(task, Transcript("perhaps", "stop", 1)) == 0.0
    assert environment.grade(task, Transcript(environment.gold_answer(task), "length", 1)) == 0.0
'''

_TEST_RUN = '''\
def test_a_second_try_scores_half():
    environment = {class_name}()
    task = next(iter(environment.tasks("train")))
    assert rehearse(environment, task, ["perhaps", task.data["gold"]]).reward == 0.5
'''

KINDS = {
    "grade": (
        _HEAD.replace("{base}", "Environment") + _GRADE,
        _TEST_HEAD.replace("{imported}", "").replace("{types}", "from megatron_rl.types import Transcript\n")
        + _TEST_GRADE,
    ),
    "harness": (
        _HEAD.replace("{base}", "HarnessEnvironment") + _RUN,
        _TEST_HEAD.replace("{imported}", "rehearse, ").replace("{types}", "") + _TEST_RUN,
    ),
}
"""By kind, the module (``{name}``, ``{class_name}``) and its test (``{path}``, ``{class_name}``)."""
