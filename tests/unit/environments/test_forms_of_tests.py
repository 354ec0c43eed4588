"""The forms in which data sets publish tests of code, and what is wrong with some."""

from __future__ import annotations

import json

import pytest

from megatron_rl.environments.grading import unit_tests
from megatron_rl.environments.grading.unit_tests import check_tests, read_tests


def test_forms_of_tests():
    cases = [{"input": "1\n2", "output": "3", "metadata": {"func_name": "add"}}]
    assert read_tests(json.dumps(cases)) == unit_tests.Tests(([1, 2],), (3,), "add")
    cases = [{"input": "1 2", "output": "3", "type": "stdin_stdout", "fn_name": None}]
    wanted = unit_tests.Tests(("1 2",), ("3",))
    assert read_tests(json.dumps(cases)) == read_tests(json.dumps({"test_cases": cases})) == wanted
    assert read_tests('{"inputs": [["1", "2"], 3], "outputs": ["3", 4]}') == unit_tests.Tests(("1\n2", "3"), ("3", "4"))
    many = {"inputs": [f"{n}" * (n + 1) for n in range(40)], "outputs": ["x"] * 40}
    assert len(read_tests(json.dumps(many)).inputs) == 40


@pytest.mark.parametrize(
    ("gold", "message"),
    [
        ("[1]", "neither a list of assertions nor inputs"),
        ("[]", "neither a list of assertions nor inputs"),
        ('{"inputs": [], "outputs": []}', "no inputs and outputs"),
        ('{"inputs": ["1"], "outputs": []}', "no inputs and outputs"),
        ('{"inputs": [1], "outputs": [2], "fn_name": "f"}', "a list of arguments each"),
        ('[{"input": "1"}]', "without input and output"),
        ('{"inputs": [', "neither JSON nor Python"),
    ],
)
def test_tests_that_are_none(gold, message):
    with pytest.raises(ValueError, match=message):
        read_tests(gold)


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ("assert add(1, 2 == 3", "are no Python"),
        (["assert add(1, 2) == 3", "1 2"], "are no Python"),
        ("def test_add():\n    assert add(1, 2) == 3", "assert nothing when they are run"),
        ('"""Tests."""\ndef test_add():\n    assert add(1, 2) == 3', "assert nothing when they are run"),
        ("result = add(1, 2)", "assert nothing when they are run"),
        ("print(add(1, 2))", "assert nothing when they are run"),
        ("from solution import add\nassert add(1, 2) == 3", "import solution, which the sandbox does not have"),
        ("from . import add\nassert add(1, 2) == 3", r"import \., which the sandbox does not have"),
        ({"test": "def check(candidate):\n    pass", "entry_point": "add"}, "assert nothing when they are run"),
        ({"test": "assert add(1, 2) == 3", "entry_point": "add("}, "are no Python"),
        ({"test_list": ["assert add(1, 2) == 3"], "test_setup_code": "x ="}, "are no Python"),
        ({"test_list": []}, "are an empty list"),
        ({"test_list": [1]}, "neither text nor a list of it"),
        ({"test_list": ["assert 1"], "test_imports": 1}, "neither text nor a list of it"),
        ([{"input": "[1]", "output": "1", "testtype": "functional"}], "are of a function and do not name it"),
    ],
)
def test_tests_that_are_broken(tests, message):
    with pytest.raises(ValueError, match=message):
        check_tests(tests if isinstance(tests, str) else json.dumps(tests))
