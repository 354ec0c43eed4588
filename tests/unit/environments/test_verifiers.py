"""The bridge to ``verifiers``: packages as anyone has them, run by the bridge in processes of samples."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_rl.environments.base import split_of
from megatron_rl.environments.loader import find_environment
from megatron_rl.environments.sandbox import sandbox_problem
from megatron_rl.environments.selftest import always, scripted_model
from megatron_rl.environments.workers import WorkerPool
from megatron_rl.errors import ConfigError
from megatron_rl.types import HarnessRun

pytest.importorskip("verifiers", reason="pip install 'megatron-rl[verifiers]'")
HERE = Path(__file__).parent
PACKAGES = (HERE, HERE.parents[2] / "examples/bridges", HERE.parents[2] / "examples/agent_tools")
FAULTY, DIGITS = {"package": "faulty_vf"}, {"package": "digits_vf", "args": {"size": 40}}


@pytest.fixture(scope="module", autouse=True)
def packages() -> Iterator[None]:
    """Makes them importable, here and in the processes of samples."""
    with pytest.MonkeyPatch.context() as patch:
        for folder in PACKAGES:
            patch.syspath_prepend(str(folder))
        yield


@pytest.fixture(scope="module")
def pool(packages: None) -> Iterator[WorkerPool]:
    with closing(WorkerPool.for_harnesses(8, [("verifiers", FAULTY), ("verifiers", DIGITS)])) as made:
        yield made


def bridge(**options):
    return find_environment("verifiers").from_options(options)


def run(pool, options, tasks, answer="3"):
    with scripted_model(always(answer)) as url:
        runs = [HarnessRun(task, 0, url, "a-key") for task in tasks]
        return pool.run("verifiers", options, runs, 120.0, lambda: False)


def test_tasks_are_the_tasksets_split_by_their_ids():
    environment = bridge(**DIGITS)
    splits = {split: list(environment.tasks(split)) for split in ("train", "test")}
    assert sorted(task.id for tasks in splits.values() for task in tasks) == sorted(f"digit-{n}" for n in range(40))
    assert all(split_of(task.id) == split for split, tasks in splits.items() for task in tasks) and splits["test"]
    first = splits["train"][0]
    number = first.id.removeprefix("digit-")
    assert first.prompt == ({"role": "user", "content": number},)
    assert first.data["task"] == {"idx": int(number), "id": first.id, "prompt": number, "wanted": "02468"}


def test_held_out_tasks_with_settings_of_their_own():
    environment = bridge(**FAULTY, test_args={"split": "val"})
    train, test = (list(environment.tasks(split)) for split in ("train", "test"))
    assert [task.id.partition("-")[0] for task in (train[0], test[0])] == ["train", "val"] and len(train) == len(test)
    assert train[0].prompt[0] == {"role": "system", "content": "Be short."}


def test_a_taskset_without_an_end_is_cut():
    tasks = list(bridge(**FAULTY, args={"endless": True}, test_args={}, max_tasks=50).tasks("train"))
    assert len(tasks) == 50


def test_the_plain_chat_loop_runs_an_unchanged_package(pool):
    """verifiers' own harness is a program of its own, which streams."""
    tasks = list(bridge(**DIGITS).tasks("train"))[:3]
    for result in run(pool, DIGITS, tasks, "24x5"):
        assert result.reward == 0.5, result.message
        assert (dict(result.metrics), result.status) == ({"length": 4.0}, "agent_completed")


def test_rewards_are_weighed_and_failures_masked_with_their_reason(pool):
    tasks = {task.data["task"]["fault"]: task for task in bridge(**FAULTY, test_args={}).tasks("train")}
    results = dict(zip(tasks, run(pool, FAULTY, tasks.values()), strict=True))
    assert results["none"].reward == 3.0 + 0.5 * 2.0
    assert dict(results["none"].metrics) == {"said": 3.0, "bonus": 2.0}
    wanted = {"raise": "ValueError: no bonus today", "late": "timed out", "exit": "bad end"}
    for fault, words in wanted.items():
        assert results[fault].code == "environment_exception" and words in results[fault].message
    assert results["nan"].code == "invalid_reward"
    assert results["silent"].reward == 1.0  # that nothing was sampled is the trainer's to say


def test_what_the_endpoint_refuses_masks_the_sample(pool):
    task = next(bridge(**FAULTY, test_args={}).tasks("train"))
    with scripted_model(lambda number: None) as url:
        (result,) = pool.run("verifiers", FAULTY, [HarnessRun(task, 0, url, "a-key")], 120.0, lambda: False)
    assert result.code == "environment_exception" and "the script ends after 0 turns" in result.message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "package names none"),
        ({"package": "no_such_vf"}, "taskset 'no_such_vf' not found"),
        ({"package": "digits_vf", "args": {"sise": 3}}, "sise"),
        ({"package": "digits_vf", "args": {"size": "many"}}, "taskset.size"),
        ({"package": "digits_vf", "env": {"id": "user_sim"}}, "would all be the policy"),
        ({"package": "digits_vf", "env": {"agent": {"harness": {"id": "nil"}}}}, "nil"),
    ],
)
def test_bad_options_are_one_line(options, words):
    with pytest.raises(ConfigError) as caught:
        bridge(**options)
    assert len(caught.value.lines) == 1 and words in caught.value.lines[0] and "\n" not in caught.value.lines[0]


def test_without_the_package_one_line_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers", None)
    monkeypatch.delitem(sys.modules, "verifiers.v1", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'megatron-rl\[verifiers\]'"):
        bridge(**DIGITS)


@pytest.mark.skipif(bool(sandbox_problem()), reason=sandbox_problem())
@pytest.mark.parametrize(("sandbox", "read"), [(False, "?"), (True, "6")])
def test_the_examples_shop_runs_code_in_the_sandbox_that_its_option_asks_for(sandbox, read):
    shop = importlib.import_module("shop_vf")
    taskset = shop.ShopTaskset(shop.ShopConfig(shop={"sandbox": sandbox, "train_tasks": 1}))
    [task] = taskset.load()
    called = SimpleNamespace(name="python", arguments=json.dumps({"code": "print(sum(range(4)))"}))
    assert shop.result_of(task.data, called) == read
