"""Code that has to pass tests: the last Python block of an answer, run in a sandbox (docs/sandbox.md).

Tests are JSON, in the forms in which data sets publish them, or plain Python::

    ["assert add(1, 2) == 3", ...]                                        each on its own
    {"test_list": [..], "test_setup_code": "", "test_imports": []}        MBPP; the last two may be missing
    {"test": "def check(candidate): ..", "entry_point": .., "prompt": ..} HumanEval
    {"inputs": ["1 2\\n", ...], "outputs": ["3\\n", ...]}                   APPS, TACO: standard input and output
    {"inputs": [[1, 2], ...], "outputs": [3, ...], "fn_name": "add"}      the same of a function, or of class Solution
    [{"input": .., "output": .., "fn_name": ..}, ...]                     DeepCoder, LiveCodeBench; or as "test_cases"

What programs print and functions return is compared here, outside: a program that is out to cheat does not see what is
expected. Assertions run in the process of the code that they test, which can therefore cheat them; but a name that it
defines takes the place of no builtin and of nothing that the tests bring.
"""

from __future__ import annotations

import ast
import contextlib
import re
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import chain
from typing import Any

from megatron_rl.environments.grading.fences import imported_by, parsed, python_block
from megatron_rl.environments.grading.text import END_OF_THOUGHT
from megatron_rl.environments.sandbox import Limits, run_python
from megatron_rl.json_text import dumps, loads
from megatron_rl.types import Grade

REWARDS = (0.0, 1.0)
NEEDS_SANDBOX = True
DEADLINE = 60.0
"""Seconds that a grade may take."""
TOTAL_SECONDS = 45.0
"""For all tests of an answer, so that the worker's deadline does not come first."""
LIMITS = Limits(cpu_s=5, wall_s=15.0, output_kb=1024)
"""Of a program."""
MAX_PROGRAMS = 16
"""Of tests by standard input, those with the longest inputs: they are the hardest, and some problems have hundreds."""
MAX_CODE = 100_000
"""Characters."""
MAX_DIGITS = 100_000
"""Of an integer in code, tests and results: some tests have more than the 4,300 that Python reads."""
TOLERANCE = Decimal("1e-6")
"""Of a float, relative to the expected one; an integer has to be equal."""

PACKAGES = ("numpy",)
"""Those that tests may import besides the standard library: HumanEval+ and MBPP+ compare arrays."""

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign)
_WORDS = re.compile(r"\s+|([][(){},;])")
_IN_PROCESS = """
import builtins, json, os, sys
given = json.load(sys.stdin)
results = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
base = {"__builtins__": dict(vars(builtins)), "__name__": "__main__"}
exec("from typing import *\\nimport collections, functools, heapq, itertools, math, re", base)
own = {*base, *base["__builtins__"]}
space = {**base, "__builtins__": builtins, "__name__": "answer"}
with open("answer.py", encoding="utf-8") as file:
    exec(compile(file.read(), "answer.py", "exec"), space)
for number, test in enumerate(given["tests"]):
    try:
        if given["function"]:
            owner = space["Solution"]() if "Solution" in space else None
            function = getattr(owner, given["function"]) if owner else space[given["function"]]
            result = json.dumps(function(*test))
        else:
            code = compile(test, "test", "exec")
            names = {*space} - own
            if names.isdisjoint(code.co_names):  # it tests a function with the name of a builtin, as MBPP's sum
                names = {*space}.intersection(code.co_names)
            exec(code, {**base, **{name: space[name] for name in names}})
            result = "true"
    except Exception:
        continue
    os.write(results, f"\\n{given['key']} {number} {result}".encode())
os.write(results, b"\\n")
"""


@dataclass(frozen=True)
class Tests:
    """Tests of one kind; ``expected`` belongs to the inputs, and is empty for assertions."""

    inputs: tuple[Any, ...]
    expected: tuple[Any, ...] = ()
    function: str = ""
    """The name of the function that is called with the inputs; "" reads them as standard input or runs them."""
    before: str = ""
    """What the answer continues: the beginning of its function, or helpers."""

    @property
    def by_program(self) -> bool:
        """Return whether each input is one of a program of its own."""
        return bool(self.expected) and not self.function


@contextlib.contextmanager
def _long_integers() -> Iterator[None]:
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(MAX_DIGITS)
    try:
        yield
    finally:
        sys.set_int_max_str_digits(before)


@_long_integers()
def judge(completion: str, gold: str) -> Grade:
    """Return the verdict: right where the code passes all tests of ``gold``; ``tests_passed`` is the share.

    Raises:
        ValueError: ``gold`` is of no form above.
        SandboxUnavailable: the machine has no sandbox.
    """
    tests, code = read_tests(gold), code_of(completion)
    if code is None or len(code) > MAX_CODE:
        return Grade(REWARDS[0], {"tests_passed": 0.0}, "no_answer" if code is None else "unparsable")
    passed, late = _programs(code, tests) if tests.by_program else _in_process(code, tests)
    share = sum(passed) / len(passed)
    status = "correct" if share == 1 else "timeout" if late else "wrong"
    return Grade(REWARDS[share == 1], {"tests_passed": share}, status, code)


def code_of(completion: str) -> str | None:
    """Return the Python of a completion, after what it thought; None without any."""
    _, thought, answer = completion.rpartition(END_OF_THOUGHT)
    return None if not thought and answer.lstrip().startswith("<think>") else python_block(answer)


def read_tests(gold: str) -> Tests:
    """Return the tests in a text; ``ValueError`` says what is wrong with it."""
    try:
        found = loads(gold)
    except ValueError:
        if gold.lstrip()[:1] in ("[", "{"):
            raise ValueError("are neither JSON nor Python") from None
        return Tests((gold,))
    match found:
        case {"test_list": _} | {"test": _}:
            return _assertions(found)
        case [*texts] if texts and all(isinstance(text, str) for text in texts):
            return Tests(tuple(texts))
        case [*cases] | {"test_cases": [*cases]} if cases and all(isinstance(case, dict) for case in cases):
            return _inputs_and_outputs(_columns(cases))
        case {}:
            return _inputs_and_outputs(found)
    raise ValueError("are neither a list of assertions nor inputs and outputs")


def _inputs_and_outputs(columns: dict[str, Any]) -> Tests:
    """APPS's and TACO's columns."""
    inputs, outputs, function = columns.get("inputs"), columns.get("outputs"), columns.get("fn_name") or ""
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs or len(inputs) != len(outputs):
        raise ValueError("have no inputs and outputs, as many of the one as of the other")
    if not isinstance(function, str) or (function and not all(isinstance(each, list) for each in inputs)):
        raise ValueError("of a function need its name and a list of arguments each")
    if not function:
        inputs, outputs = map(_as_text, inputs), map(_as_text, outputs)
    return Tests(tuple(inputs), tuple(outputs), function)


def _as_text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


@_long_integers()
def check_tests(gold: str) -> None:
    """Raise ``ValueError`` if no answer, or every answer, would pass the tests in a text."""
    tests = read_tests(gold)
    for text in () if tests.expected else tests.inputs:
        tree = parsed(text)
        if tree is None:
            raise ValueError("are no Python")
        nodes = list(ast.walk(tree))
        run = [node for each in tree.body if not isinstance(each, _DEFINITIONS) for node in ast.walk(each)]
        asserts = any(isinstance(node, ast.Assert | ast.Raise) for node in nodes)
        if not asserts or not any(isinstance(node, ast.Assert | ast.Raise | ast.Call) for node in run):
            raise ValueError("assert nothing when they are run, so that every answer would pass")
        missing = {name.split(".")[0] or name for name in imported_by(tree)} - sys.stdlib_module_names - set(PACKAGES)
        if missing:
            raise ValueError(f"import {', '.join(sorted(missing))}, which the sandbox does not have")


def _assertions(columns: dict[str, Any]) -> Tests:
    """MBPP's or HumanEval's columns as assertions."""
    if "test_list" in columns:
        setup = "\n".join(line for name in ("test_setup_code", "test_imports") for line in _texts(columns.get(name)))
        tests = _texts(columns["test_list"])
        if not tests:
            raise ValueError("are an empty list")
        return Tests(tuple(f"{setup}\n{test}" for test in tests))
    test, tested, prompt = "\n".join(_texts(columns["test"])), columns.get("entry_point"), columns.get("prompt")
    if not tested:
        return Tests((test,))
    if not isinstance(prompt, str) or parsed(prompt) is None:  # a chat, or words
        prompt = ""
    # the prompt's helpers are the tests' own here, and its beginning of the function must not hide the answer's
    return Tests((f"_tested = {tested}\n{prompt}\n{test}\ncheck(_tested)",), before=prompt)


def _texts(value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value or []
    if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts):
        raise ValueError("are neither text nor a list of it")
    return texts


def _columns(cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """DeepCoder's and LiveCodeBench's list of cases as inputs and outputs."""
    if not all({"input", "output"} <= set(case) for case in cases):
        raise ValueError("are a list without input and output in each")
    about = cases[0].get("metadata")
    function = cases[0].get("fn_name") or (about.get("func_name") if isinstance(about, dict) else "")
    if not function and any(case.get("testtype") == "functional" for case in cases):
        raise ValueError("are of a function and do not name it")
    inputs, outputs = [case["input"] for case in cases], [case["output"] for case in cases]
    if function:  # one argument a line, each JSON
        inputs = [[loads(line) for line in each.splitlines()] if isinstance(each, str) else each for each in inputs]
        outputs = [loads(each) if isinstance(each, str) else each for each in outputs]
    return {"inputs": inputs, "outputs": outputs, "fn_name": function}


def _programs(code: str, tests: Tests) -> tuple[list[bool], bool]:
    """Which tests a program passes, one run each, up to the first that takes too long; and whether one did."""
    order = sorted(range(len(tests.inputs)), key=lambda number: -len(tests.inputs[number]))[:MAX_PROGRAMS]
    passed, late, ends = [], False, time.monotonic() + TOTAL_SECONDS
    for number in sorted(order):
        limits = replace(LIMITS, wall_s=min(LIMITS.wall_s, ends - time.monotonic()))
        result = run_python(code, tests.inputs[number], limits)
        late = result.why in ("timeout", "cpu")
        passed.append(result.succeeded and same_output(result.stdout, tests.expected[number]))
        if late or time.monotonic() > ends - 1:
            break
    missing = len(order) - len(passed)
    return passed + [False] * missing, late or missing > 0


def _in_process(code: str, tests: Tests) -> tuple[list[bool], bool]:
    """Which tests the code passes, all in one process that has loaded it."""
    key = secrets.token_hex(16)  # so that what the code prints, or an early end, is no result
    given = dumps({"key": key, "function": tests.function, "tests": tests.inputs})
    text = "" if tests.expected else "\n".join(tests.inputs)
    packages = [name for name in PACKAGES if re.search(rf"\b(?:import|from) {name}\b", text)]
    result = run_python(_IN_PROCESS, given, LIMITS, {"answer.py": f"{tests.before}\n{code}"}, packages)
    results = dict(_results(result.stdout, key))
    if tests.function:
        passed = [
            number in results and _same_value(results[number], want) for number, want in enumerate(tests.expected)
        ]
    else:
        passed = [results.get(number) is True for number in range(len(tests.inputs))]
    return passed, result.why in ("timeout", "cpu")


def _results(printed: str, key: str) -> Iterator[tuple[int, Any]]:
    for line in printed.splitlines():
        word, _, rest = line.partition(" ")
        number, _, value = rest.partition(" ")
        if word == key and number.isdecimal():
            try:
                yield int(number), loads(value)
            except ValueError:
                continue


def _same_value(ours: Any, theirs: Any) -> bool:
    """APPS has some results alone and others in a list of one, and takes either."""
    return _equal(ours, theirs) or (isinstance(theirs, list) and len(theirs) == 1 and _equal(ours, theirs[0]))


def _equal(ours: Any, theirs: Any) -> bool:
    match ours, theirs:
        case list(), list():
            return len(ours) == len(theirs) and all(map(_equal, ours, theirs))
        case dict(), dict():
            return ours.keys() == theirs.keys() and all(_equal(ours[key], value) for key, value in theirs.items())
        case int() | float(), float():
            return _same_number(ours, str(theirs))
    return ours == theirs


def same_output(printed: str, expected: str) -> bool:
    """Compare line by line, spaces around lines and empty ends aside; numbers by value, also in brackets."""
    ours, theirs = ([_WORDS.split(line.strip()) for line in text.strip().splitlines()] for text in (printed, expected))
    if list(map(len, ours)) != list(map(len, theirs)):
        return False
    words = zip(chain(*ours), chain(*theirs), strict=True)
    return all(a == b or _same_number(a, b) for a, b in words)


def _same_number(ours: str | float, theirs: str) -> bool:
    try:
        number, right = Decimal(ours), Decimal(theirs)
        slack = 0 if theirs.lstrip("+-").isdecimal() else TOLERANCE * abs(right)
        return number == right or (right.is_finite() and abs(number - right) <= slack)
    except (ArithmeticError, TypeError):  # no numbers; None is a space
        return False
