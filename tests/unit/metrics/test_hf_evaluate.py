"""The Hugging Face metric, offline and without a cache."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.metrics.evaluation import pass_at_k

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("evaluate") is None, reason="pip install 'megatron-rl[evaluate]'"
)
REPOSITORY = Path(__file__).parents[3]
KS = [1, 2, 4, 8]
PROGRAM = """
import json, sys
from megatron_rl.metrics.hf_evaluate import PassAtK
cases = json.loads(sys.argv[1])
print(json.dumps([PassAtK().compute(**case) for case in cases]))
"""


def rewards() -> list[list[float]]:
    draw = random.Random(3)
    return [[float(draw.random() < share) for _ in range(8)] for share in (0.0, 0.1, 0.3, 0.5, 0.9, 1.0)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def results(home: Path) -> list[dict[str, float]]:
    """One process for all cases: the import takes seconds, and must see an empty home."""
    cases = [
        {"predictions": rewards(), "k": KS},
        {"predictions": [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0]], "k": [1, 2, 4]},
        {"predictions": [[1.0, None, -1.0], [None, None]], "k": [1, 2]},
        {"predictions": [[1.0, 0.5, 0.7 + 0.2 + 0.1, 0.0]], "k": [1]},
        {"predictions": [[0.0, -1.0, 0.0, 0.0]], "k": [1], "highest": 0.0},
    ]
    environment = {**os.environ, "HOME": str(home), "HF_HOME": str(home / "hf"), "PYTHONPATH": str(REPOSITORY)}
    environment |= {"HF_HUB_OFFLINE": "1", "http_proxy": "http://127.0.0.1:1", "https_proxy": "http://127.0.0.1:1"}
    command = [sys.executable, "-c", PROGRAM, json.dumps(cases)]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert finished.returncode == 0, finished.stderr[-2000:]
    return json.loads(finished.stdout)


def test_equals_the_estimate_of_our_evaluations(results: list[dict[str, float]]) -> None:
    correct = [sum(values) for values in rewards()]
    expected = {f"pass@{k}": pass_at_k(8, correct, k).mean() for k in KS}
    assert results[0] == pytest.approx(expected | {"accuracy": sum(correct) / 48}, abs=1e-12)
    assert len(set(results[0].values())) > 3


def test_by_hand(results: list[dict[str, float]]) -> None:
    # 1 of 4 and 2 of 2: (1/4 + 1) / 2; (1/2 + 1) / 2; only the first task has 4 answers.
    assert results[1] == {"accuracy": 0.625, "pass@1": 0.625, "pass@2": 0.75, "pass@4": 1.0}


def test_failed_grades_are_left_out(results: list[dict[str, float]]) -> None:
    assert results[2] == {"accuracy": 0.5, "pass@1": 0.5, "pass@2": 1.0}


def test_right_is_the_highest_reward(results: list[dict[str, float]]) -> None:
    assert results[3:] == [{"accuracy": 0.5, "pass@1": 0.5}, {"accuracy": 0.75, "pass@1": 0.75}]


def test_nothing_is_written(results: list[dict[str, float]], home: Path) -> None:
    assert [path for path in home.rglob("*") if path.is_file()] == []
    assert not any(path.name in ("metrics", "pass_at_k", "passatk") for path in home.rglob("*"))
