"""Data files, a user's rewards, and the environment `dataset` over them, for tests."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_rl.environments.checks import survey_tasks
from megatron_rl.environments.loader import find_environment
from megatron_rl.environments.results import judge
from megatron_rl.errors import ConfigError
from megatron_rl.types import Transcript

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
