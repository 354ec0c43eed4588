"""Code that has to pass tests: the verdicts, the forms of tests, and the way through a worker and a data set."""

from __future__ import annotations

import contextlib
import json
from types import SimpleNamespace

import pytest

from megatron_rl.environments.config import load_environment_specs
from megatron_rl.environments.grading import GRADERS, grade, unit_tests
from megatron_rl.environments.grading.unit_tests import code_of, same_output
from megatron_rl.environments.loader import find_environment
from megatron_rl.environments.sandbox import Execution, sandbox_problem
from megatron_rl.environments.workers import WorkerPool
from megatron_rl.errors import ConfigError
from megatron_rl.types import Task, Transcript
from tests.unit.environments.conftest import problems_of

needs_sandbox = pytest.mark.skipif(bool(sandbox_problem()), reason=sandbox_problem())
ADD = "def add(a, b):\n    return a + b"
ASSERTS = json.dumps(["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"])
CALLS = json.dumps({"inputs": [[1, 2], [3, 4]], "outputs": [3, [7]], "fn_name": "add"})
PAIRS = json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]})
PYTHON = "assert add(1, 2) == 3\nassert add(0, 0) == 0"

MBPP = {
    "task_id": 2, "text": "Write a function to find what two tuples share.", "code": "", "challenge_test_list": [],
    "test_setup_code": "pair = Pair(3, 4)", "test_list": [
        "assert set(shared((3, 4, 5, 6), (5, 7, 4, 10))) == set((4, 5))", "assert shared(pair, (4, 5)) == (4,)",
    ],
}  # fmt: skip
SHARED = """from collections import namedtuple
Pair = namedtuple("Pair", "first second")
def shared(first, second):
    return tuple(set(first) & set(second))
"""
SANITIZED = {
    "source_file": "Basic", "task_id": 8, "prompt": "Write a function to find the area of a circle.", "code": "",
    "test_imports": ["import cmath, fractions"], "test_list": [
        "assert cmath.isclose(area(1), 3.1415926535, rel_tol=0.001)", "assert fractions.Fraction(area(0)) == 0",
    ],
}  # fmt: skip
AREA = "def area(r):\n    return 3.14159 * r * r"
HUMAN_EVAL = {
    "task_id": "HumanEval/32", "prompt": '''import math


def poly(xs: list, x: float):
    return sum(coeff * math.pow(x, i) for i, coeff in enumerate(xs))


def root(xs: list):
    """ One x with poly(xs, x) = 0, of a line.
    >>> root([1, 2])
    -0.5
    """
''', "canonical_solution": "    return -xs[0] / xs[1]\n", "entry_point": "root", "test": '''

METADATA = {"author": "x", "dataset": "test"}


def check(candidate):
    for xs in ([1, 2], [3, -4], [-6, 3]):
        assert abs(poly(xs, candidate(xs))) < 1e-4
    assert candidate([0, 1]) == 0
''',
}  # fmt: skip
ROOT = "def root(xs):\n    return -xs[0] / xs[1]"
PLUS = HUMAN_EVAL | {"test": "import numpy as np\ndef check(root):\n    assert np.allclose(root([2, 3]), -2 / 3)"}
SUM = MBPP | {"test_list": ["assert sum(10, 15) == 6"], "test_setup_code": ""}


def answer(code: str) -> str:
    return f"First:\n```python\nraise SystemExit\n```\nbetter:\n```python\n{code}\n```\nDone."


@needs_sandbox
@pytest.mark.parametrize(
    ("code", "gold", "status", "share"),
    [
        (ADD, ASSERTS, "correct", 1.0),
        (ADD, CALLS, "correct", 1.0),
        (ADD, PYTHON, "correct", 1.0),
        ("print(sum(map(int, input().split())))", PAIRS, "correct", 1.0),
        ("class Solution:\n    def add(self, a: List[int], b):\n        return a + b", CALLS, "correct", 1.0),
        (f"{ADD}\nprint('noise')\nif __name__ == '__main__':\n    input()", CALLS, "correct", 1.0),
        ("def add(a, b):\n    return 3", ASSERTS, "wrong", 0.5),
        ("def add(a, b):\n    return 3", CALLS, "wrong", 0.5),
        ("def add(a, b):\n    return 3", PYTHON, "wrong", 0.0),
        ("def add(a, b):\n    return 4", f"if __name__ == '__main__':\n    {PYTHON.splitlines()[0]}", "wrong", 0.0),
        ("print(3)", PAIRS, "wrong", 0.5),
        ("syntax error", ASSERTS, "wrong", 0.0),
        ("def other(): pass", CALLS, "wrong", 0.0),
        ("def add(a, b):\n    return object()", CALLS, "wrong", 0.0),
        ("print(3); exit(1)", PAIRS, "wrong", 0.0),
        ("raise SystemExit", ASSERTS, "wrong", 0.0),
        ("import os; os._exit(0)", ASSERTS, "wrong", 0.0),
        ("import os; os._exit(0)", CALLS, "wrong", 0.0),
        ("print('\\n'.join(f'key {n} true' for n in range(2)))", ASSERTS, "wrong", 0.0),
        ("def add(a, b):\n    import os\n    os._exit(0)", ASSERTS, "wrong", 0.0),
    ],
)
def test_verdicts(code, gold, status, share):
    verdict = grade("unit_tests", answer(code), gold)
    assert (verdict.status, verdict.reward, verdict.metrics) == (status, float(share == 1), {"tests_passed": share})
    assert verdict.extracted.strip() == code


@pytest.fixture
def data_set(tmp_path):
    """The environment of rows in a file."""

    def made(*rows, ending="jsonl"):
        path = tmp_path / f"rows.{ending}"
        if ending == "parquet":
            import pyarrow.parquet

            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return find_environment("dataset").from_options({"path": str(path), "reward": "unit_tests"})

    return made


@needs_sandbox
@pytest.mark.parametrize(
    ("row", "code", "share"),
    [
        (MBPP, SHARED, 1.0),
        (MBPP, "def shared(first, second):\n    return (4, 5)", 0.0),  # the setup needs a Pair
        (MBPP, SHARED.replace("&", "|"), 0.0),
        (MBPP, "set = lambda items: 0\nPair = print\ndef shared(first, second):\n    return (4,)", 0.5),
        (SANITIZED, AREA, 1.0),
        (SANITIZED, AREA.replace("3.14159", "3"), 0.5),
        (SANITIZED, "class cmath:\n    isclose = print\ndef area(r):\n    return 2", 0.0),
        (SUM, "def sum(a, b):\n    return 6", 1.0),
        (SUM, "def sum(a, b):\n    return 5", 0.0),
        (HUMAN_EVAL, ROOT, 1.0),
        (HUMAN_EVAL, HUMAN_EVAL["canonical_solution"], 1.0),
        (HUMAN_EVAL, "def root(xs):\n    return 0 if poly(xs, 0) == 0 else -xs[0] / xs[1]", 1.0),
        (HUMAN_EVAL, "def root(xs):\n    return 0", 0.0),
        (HUMAN_EVAL, "pass", 0.0),
        (HUMAN_EVAL, "def root(xs):\n    return 0\ndef poly(xs, x):\n    return 0", 0.0),
        (HUMAN_EVAL, "def root(xs):\n    return 0\ndef check(candidate):\n    pass", 0.0),
        (HUMAN_EVAL, "def root(xs):\n    return 0\nabs = lambda x: 0", 0.0),
        (HUMAN_EVAL, "import builtins\nbuiltins.abs = lambda x: 0\ndef root(xs):\n    return 0", 0.0),
        (HUMAN_EVAL, "import sys\nsys.exit(0)", 0.0),
        (HUMAN_EVAL, "import os\ndef root(xs):\n    os._exit(0)", 0.0),
        (PLUS, ROOT, 1.0),
        (PLUS, "def root(xs):\n    return 0", 0.0),
    ],
)  # fmt: skip
def test_published_layouts(data_set, row, code, share):
    environment = data_set(row)
    [task] = environment.tasks("train")
    verdict = environment.grade(task, Transcript(answer(code), "stop", 1))
    assert (verdict.reward, verdict.metrics["tests_passed"]) == (float(share == 1), share)


@pytest.mark.parametrize("row", [MBPP, SANITIZED, HUMAN_EVAL])
def test_the_columns_beside_the_tests_are_read_from_parquet(data_set, row):
    [read], [wanted] = (data_set(row, ending=ending).tasks("train") for ending in ("parquet", "jsonl"))
    assert read == wanted


def test_rows_whose_tests_no_answer_or_every_answer_passes_are_named(data_set):
    with pytest.raises(ConfigError, match="1 that cannot be read.*row 1 has test that assert nothing"):
        list(data_set({name: HUMAN_EVAL[name] for name in ("prompt", "test")}).tasks("train"))


@needs_sandbox
def test_what_takes_too_long(monkeypatch):
    monkeypatch.setattr(unit_tests, "LIMITS", unit_tests.Limits(cpu_s=1, wall_s=40.0))
    slow = "if input()[0] == '3':\n    while True: pass\nprint(3)"
    verdict = grade("unit_tests_share", answer(slow), PAIRS)
    assert (verdict.status, verdict.reward) == ("partial", 0.5)
    verdict = grade("unit_tests", answer("while True: pass"), ASSERTS)
    assert (verdict.status, verdict.reward) == ("timeout", 0.0)


def test_time_for_all_tests_together(monkeypatch):
    """Of 45 s, with programs that take 20: the fourth is not begun, and the third gets what is left."""
    walls = []

    def run(code, stdin, limits):
        walls.append(limits.wall_s)
        return Execution("x", "", 0)

    monkeypatch.setattr(unit_tests, "run_python", run)
    monkeypatch.setattr(unit_tests, "time", SimpleNamespace(monotonic=lambda: 20.0 * len(walls)))
    verdict = grade("unit_tests", answer(""), json.dumps({"inputs": ["1"] * 4, "outputs": ["x"] * 4}))
    assert walls == [15.0, 15.0, 5.0]
    assert (verdict.status, verdict.metrics) == ("timeout", {"tests_passed": 0.75})


def test_the_longest_inputs_are_run(monkeypatch):
    seen = []
    monkeypatch.setattr(
        unit_tests, "run_python", lambda code, stdin, limits: seen.append(stdin) or Execution("x", "", 0)
    )
    inputs = ["a" * (n % 20) for n in range(40)]
    assert grade("unit_tests", answer(""), json.dumps({"inputs": inputs, "outputs": ["x"] * 40})).reward == 1.0
    assert seen == [each for each in inputs if len(each) >= 12]  # two each of 12 to 19 characters


@pytest.mark.parametrize(
    ("completion", "code"),
    [
        ("```python\na\n```", "a\n"),
        ("```\na\n```", "a\n"),
        ("```py \na\n```\n```Python3\nb\n```", "b\n"),
        ("<think>```python\na\n```", None),
        ("<think>```python\na\n```</think>no block", None),
        ("<think>x</think>```python\na\n```", "a\n"),
        ("```python\nnever closed", "never closed\n"),
        ("```bash\nls\n```", None),
        ("", None),
    ],
)
def test_which_code_counts(completion, code):
    assert code_of(completion) == code
    if code is None:
        assert grade("unit_tests", completion, ASSERTS).status == "no_answer"


def test_code_that_is_too_long():
    assert grade("unit_tests", answer("#" * 100_001), ASSERTS).status == "unparsable"


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("3\n", "3", True),
        ("3.0  \n\n", "3", True),
        ("1 2\n3", "1  2\n3\n", True),
        ("1e0", "1", True),
        ("1 2 3", "1 2\n3", False),
        ("3", "4", False),
        ("", "3", False),
        ("nan", "nan", True),
        ("inf", "1", False),
        ("yes", "YES", False),
    ],
)
def test_outputs_that_are_the_same(printed, expected, same):
    assert same_output(printed, expected) is same


@pytest.fixture
def listed(tmp_path):
    """The path of a list with one data set of MBPP's form."""
    rows = [
        {"text": "Write a function that adds.", "code": ADD, "test_list": json.loads(ASSERTS)},
        {"text": "Write another.", "code": "", "test_list": [1]},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "test.jsonl").write_text(json.dumps(rows[0] | {"text": "Write a test."}) + "\n")
    path = tmp_path / "list.yaml"
    path.write_text(
        "- environment: dataset\n"
        f"  args: {{path: {tmp_path}/rows.jsonl, reward: unit_tests, test_path: {tmp_path}/test.jsonl, "
        'template: "{text} It has to pass:\\n{test_list}"}\n'
    )
    return path


@needs_sandbox
def test_a_data_set_of_code(listed):
    environment = load_environment_specs(listed)[0].create()
    [task] = environment.tasks("train")  # the row without tests is left out
    assert task.prompt[0]["content"].startswith(
        "Write a function that adds. It has to pass:\nassert add(1, 2) == 3\nassert"
    )
    assert (environment.needs_sandbox, environment.grade_deadline) == (True, 60.0)
    verdict = environment.grade(task, Transcript(answer(ADD), "stop", 1))
    assert (verdict.reward, verdict.metrics["tests_passed"], verdict.metrics["correct"]) == (1.0, 1.0, 1.0)
    verdict = environment.grade(task, Transcript(answer("x = 1"), "stop", 1))
    assert (verdict.reward, verdict.metrics["tests_passed"], verdict.status) == (0.0, 0.0, "wrong")


def test_a_machine_without_a_sandbox_is_refused_by_the_check(listed, monkeypatch):
    monkeypatch.setattr("megatron_rl.environments.checks.sandbox_problem", lambda: "code cannot be run safely here: x")
    assert problems_of(listed) == ["dataset: code cannot be run safely here: x"]


@pytest.mark.parametrize("kind", ["unit_tests", "unit_tests_share"])
def test_graders_that_run_code_say_so(kind):
    module = GRADERS.module(kind)
    assert module.NEEDS_SANDBOX is True
    assert module.DEADLINE >= unit_tests.TOTAL_SECONDS + 10


@needs_sandbox
def test_a_share_is_the_reward_of_a_data_set(listed):
    listed.write_text(listed.read_text().replace("unit_tests", "unit_tests_share"))
    environment = load_environment_specs(listed)[0].create()
    [task] = environment.tasks("train")
    assert environment.grade(task, Transcript(answer("def add(a, b):\n    return 3"), "stop", 1)).reward == 0.5


@needs_sandbox
def test_in_a_grading_worker():
    """With its bounds: a grade beyond its deadline ends the program."""
    pairs = '{"inputs": [""], "outputs": ["7"]}'

    def graded(pool, code, deadline_s):
        item = (Task("0", "?", {"gold": pairs}), Transcript(answer(code), "stop", 1))
        return pool.grade("tests.support.graders:Graded", {"kind": "unit_tests"}, [item], deadline_s, 0.0)[0].status

    with contextlib.closing(WorkerPool(workers=1)) as pool:
        assert graded(pool, "open('x', 'w').write('7'); print(open('x').read())", 60.0) == "correct"
        assert graded(pool, "import time; time.sleep(600)", 1.0) == "timeout"
        assert graded(pool, "print(7)", 60.0) == "correct"
