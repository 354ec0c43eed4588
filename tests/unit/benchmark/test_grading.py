"""The grading benchmark: its texts, its shares by hand, and one small turn through a real server."""

from __future__ import annotations

import json
from itertools import islice

import pytest
import yaml

from megatron_rl.environments.config import load_environment_specs
from megatron_rl.registry import GRADERS
from tools.benchmark.grading import main
from tools.benchmark.grading_texts import ENVIRONMENTS, environment_entry, groups_of, split_of


def test_every_kind_of_grader_is_measured():
    # the math grader behind a search for a box, a comparison of texts, and the time of sandboxes (docs/sandbox.md)
    by_others = {"deepscaler", "exact", "unit_tests", "unit_tests_share"}
    assert set(ENVIRONMENTS) == {*GRADERS.names(), "arithmetic"} - by_others


@pytest.mark.parametrize("kind", ENVIRONMENTS)
def test_texts_are_long_and_no_two_alike(tmp_path, kind):
    (tmp_path / "list.yaml").write_text(yaml.safe_dump([environment_entry(kind, tmp_path)]))
    environment = load_environment_specs(tmp_path / "list.yaml")[0].create()
    tasks = list(environment.tasks(split_of(environment)))
    groups = list(islice(groups_of(environment, tasks, 16, 2000, seed=1), 3))
    texts = [transcript.text for group in groups for _, transcript in group]
    assert len(set(texts)) == len(texts) == 48
    assert all(2000 <= len(text) < 2300 for text in texts)
    right = [bool(environment.gold_answer(task)) and text.text.endswith(environment.gold_answer(task))
             for task, text in groups[0]]  # fmt: skip
    assert right[:8] == [True] * 8
    assert not right[-1]
    again = islice(groups_of(environment, tasks, 16, 2000, seed=2), 1)
    assert {transcript.text for group in again for _, transcript in group}.isdisjoint(texts)


def test_a_turn_through_the_server(tmp_path, capsys):
    sizes = ["--rounds=1", "--groups=1", "--characters=300"]
    main(["--graders", "dapo", "arithmetic", *sizes, "--json", str(tmp_path / "record.json")])
    record = json.loads((tmp_path / "record.json").read_text())
    assert set(record["groups_per_second"]) == {"dapo", "arithmetic"}
    assert all(rate > 0 for ways in record["groups_per_second"].values() for rate in ways["median"].values())
    assert record["command"].startswith("python -m tools.benchmark.grading")
    assert "one by one" in capsys.readouterr().out
