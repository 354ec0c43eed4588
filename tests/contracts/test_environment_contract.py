"""What every environment that is discovered must keep to."""

from __future__ import annotations

import ast
import importlib
from itertools import islice
from pathlib import Path

import pytest

from megatron_rl.environments.base import HarnessEnvironment
from megatron_rl.environments.checks import survey_tasks
from megatron_rl.environments.config import load_environment_specs
from megatron_rl.environments.data import DatasetEnvironment
from megatron_rl.environments.loader import PACKAGE, discover
from megatron_rl.environments.results import judge
from megatron_rl.environments.selftest import run_checks
from megatron_rl.environments.wire import demonstration_from_json, demonstration_to_json, task_from_json
from megatron_rl.json_text import dumps, loads
from megatron_rl.types import Transcript

ROOT = Path(__file__).parents[2]
ENVIRONMENTS, BROKEN = discover()
ALLOWED_IMPORTS = {
    "megatron_rl.environments.base",
    "megatron_rl.environments.data",
    "megatron_rl.environments.data.layouts",
    "megatron_rl.environments.grading",
    "megatron_rl.environments.grading.unit_tests",
    "megatron_rl.environments.judging",
    "megatron_rl.environments.ranking",
    "megatron_rl.environments.rewards",
    "megatron_rl.environments.tools",
    "megatron_rl.errors",
    "megatron_rl.environments.tool_calls",
    "megatron_rl.environments.sandbox",
    "megatron_rl.types",
}
SAMPLE = 50
FEWER = {"demonstrations": 2_000, "practice": 1_000}
"""Of the options that an environment has; a warm start draws ten thousands."""
BRIDGES = {
    "verifiers": ("verifiers", {"package": "digits_vf"}),
    "openenv": ("openai", {"url": "http://127.0.0.1:1", "seeds": 64}),
}
"""The package that a bridge needs, and options that lead somewhere."""



@pytest.fixture(scope="module", autouse=True)
def bridged_packages():
    """Makes the examples' packages importable."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples/bridges"))
        yield


every_environment = pytest.mark.parametrize("name", sorted(ENVIRONMENTS))


def folder_of(name):
    module = Path(importlib.import_module(ENVIRONMENTS[name].__module__).__file__)
    return module.parent if module.name == "__init__.py" else None


def make(name):
    """With the rows of ``sample.jsonl`` in the environment's folder, where its data is elsewhere, a bridge with
    something to lead to, and a warm start with fewer demonstrations."""
    if name in BRIDGES:
        package, options = BRIDGES[name]
        pytest.importorskip(package, reason=f"pip install 'megatron-rl[{name}]'")
        return ENVIRONMENTS[name].from_options(options)
    folder = folder_of(name)
    sample = folder / "sample.jsonl" if folder else None
    given = {"path": str(sample)} if sample is not None and sample.is_file() else {}
    fewer = {option: count for option, count in FEWER.items() if option in ENVIRONMENTS[name].options()}
    return ENVIRONMENTS[name].from_options(given | fewer)


def test_every_environment_imports():
    assert BROKEN == {}
    assert ENVIRONMENTS


@every_environment
def test_name_and_description(name):
    environment = ENVIRONMENTS[name]
    module = environment.__module__.removeprefix(f"{PACKAGE}.").partition(".")[0]
    assert environment.name == name == module
    assert environment.description().endswith(".")
    lowest, highest = environment.reward_range
    assert highest is None or lowest < highest


@every_environment
def test_options_can_be_written_in_yaml(name):
    for option in ENVIRONMENTS[name].options().values():
        assert option.default is not option.empty, f"{option.name} needs a default"
        dumps(option.default)


@every_environment
def test_imports_only_the_base_class_and_the_types(name):
    module = Path(importlib.import_module(ENVIRONMENTS[name].__module__).__file__)
    folder = folder_of(name)
    files = folder.rglob("*.py") if folder else [module]
    for file in (file for file in files if not file.name.startswith("test_")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                imported = [node.module or ""]
            elif isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            else:
                continue
            ours = {path for path in imported if path.partition(".")[0] == "megatron_rl"}
            assert ours <= ALLOWED_IMPORTS, f"{file.name} imports {ours}"
            assert "torch" not in {path.partition(".")[0] for path in imported}


@every_environment
def test_tasks_are_usable_repeatable_and_survive_json(name):
    environment = make(name)
    assert survey_tasks(environment).problems == []  # ids unique over both splits, prompts not empty, data JSON
    split = "test" if environment.evaluation_only else "train"
    first = list(islice(environment.tasks(split), SAMPLE))
    assert first == list(islice(make(name).tasks(split), SAMPLE))
    assert [task_from_json(loads(dumps(vars(task)))) for task in first] == first


@every_environment
def test_a_data_set_has_a_sample_of_its_columns(name):
    environment = ENVIRONMENTS[name]
    if not issubclass(environment, DatasetEnvironment):
        pytest.skip("reads no data set")
    assert (folder_of(name) / "sample.jsonl").is_file()


@every_environment
def test_no_prompt_is_in_both_splits(name):
    environment = make(name)
    if environment.evaluation_only:
        pytest.skip("never trained on")
    train = {repr(task.prompt) for task in environment.tasks("train")}
    train |= {repr(row.task.prompt) for row in environment.demonstrations("train")}
    assert not train & {repr(task.prompt) for task in environment.tasks("test")}


@every_environment
def test_demonstrations_survive_json_and_get_a_valid_reward(name):
    environment = make(name)
    rows = list(environment.demonstrations("train"))
    lowest, highest = environment.reward_range
    for row in rows[:: max(1, len(rows) // SAMPLE)]:  # all along the curriculum
        assert demonstration_from_json(loads(dumps(demonstration_to_json(row)))) == row
        if isinstance(environment, HarnessEnvironment):
            continue  # its self-test runs some of them
        transcript = Transcript(row.completion, "stop", len(row.completion))
        result = judge(environment, (row.task, transcript))
        assert not result.failed
        assert lowest <= result.reward
        assert highest is None or result.reward <= highest


@every_environment
def test_self_test_passes(name):
    """Gold and first demonstrations get the maximum, empty answers the minimum, and grades repeat."""
    if name in BRIDGES:
        pytest.skip("what its samples are worth is for the package to say")
    assert [check for check in run_checks(make(name), SAMPLE) if check.passed is False] == []


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples/environments").glob("*.yaml")), ids=lambda p: p.name
)
def test_every_shipped_list_loads(path):
    assert load_environment_specs(path)
