"""Which code of an answer is tested, and which outputs and results are equal to those expected."""

from __future__ import annotations

import json
import time

import pytest

from megatron_rl.environments.grading import grade
from megatron_rl.environments.grading.unit_tests import check_tests, code_of, same_output
from megatron_rl.environments.sandbox import sandbox_problem

needs_sandbox = pytest.mark.skipif(bool(sandbox_problem()), reason=sandbox_problem())
F = "```"
ADD = "def add(a, b):\n    return a + b\n"
BLOCK = f"{F}python\n{ADD}{F}"
DOCUMENTED = f'def add(a, b):\n    """\n    {F}\n    add(1, 2)\n    {F}\n    """\n    return a + b\n'
SHALLOW = DOCUMENTED.replace("    ", "  ")
TEMPLATE = f'PAGE = """\n{F}python\nadd(1, 2)\n{F}\n"""\n{ADD}'
LONG = "1" + "0" * 5000


def indented(text: str, by: str) -> str:
    return "".join(by + line for line in text.splitlines(keepends=True))


@pytest.mark.parametrize(
    "answer",
    [
        *(f"{F}{other}\nx\n{F}\n\n{BLOCK}" for other in ("json", "cpp", "c++", "pseudo", "diff", "bash", "text", "")),
        *(f"{BLOCK}\nIt prints:\n{F}{other}\n3\n{F}" for other in ("bash", "text", "output", "pycon", "console", "")),
        f"{BLOCK}\n{F}python\n>>> add(1, 2)\n3\n{F}",
        f"{F}diff\n-a\n{F}\n\nText\n\n{BLOCK}\n\n{F}bash\nx\n{F}",
        f"{F}\n{ADD}{F}\nIt prints:\n{F}\n[1, 2]\n{F}",
        f"{F}html\n<b>\n{F}\n{F}\n{ADD}{F}",
        f"````markdown\n{F}python\nx\n{F}\n````\n{BLOCK}",
        *(BLOCK.replace("python", word) for word in ("Python3", "py", " python", "{.python}", 'python title="a.py"')),
        BLOCK.replace(F, "~~~"),
        BLOCK.replace(F, "`````"),
        f"{F}bash\nx\n{F}\n{BLOCK}\n{F}text\n3\n{F}".replace("\n", "\r\n"),
        indented(BLOCK, "   "),
        f"1. Write:\n\n{indented(BLOCK, '   ')}\n2. Run:\n   {F}bash\n   x\n   {F}",
        f"1. Write:\n   - this:\n\n{indented(BLOCK, '     ')}",
        f"1. Write:\n{indented(BLOCK, chr(9))}",
        f"1. Write:\n   {F}python\n{ADD}   {F}",
        "- " + indented(BLOCK, "  ").lstrip(),
        indented(BLOCK, "> "),
        BLOCK.removesuffix(F),
        f"Write it as {F}python, or `code`.\n{BLOCK}",
        f"The answer: {BLOCK}",
        f"{BLOCK} is the answer.",
        BLOCK.replace(f"\n{F}", F),
        f"{F}python\ndef (\n{F}\nbetter:\n{BLOCK}",
        ADD,
    ],
)
def test_the_python_block_is_found(answer):
    assert code_of(answer) in (ADD, ADD.replace("\n", "\r\n"))


@pytest.mark.parametrize(
    "code",
    [
        f"print('{F}')\n{ADD}", f"# {F}\n{ADD}", f"# as {F} or {F}bash\n{ADD}", DOCUMENTED, SHALLOW, TEMPLATE,
        f"TAGS = ['<think>', '{F}python']\n{ADD}",
    ],
)  # fmt: skip
def test_fences_in_strings_and_comments_are_code(code):
    assert code_of(f"{F}bash\nx\n{F}\n{F}python\n{code}{F}\nIt prints:\n{F}\n3\n{F}") == code


@pytest.mark.parametrize("answer", ["yes", "3", "I do not know.", f"{F}python\n{F}", f"{F}text\nx = 1\n{F}", "# no"])
def test_an_answer_without_a_program(answer):
    assert code_of(answer) is None


@pytest.mark.parametrize("text", [f"{F}\n" * 9999, "`" * 10**5 + "x`", f"{F}python\ndef (\n{F}\n" * 2000, "> " * 10**5])
def test_fences_are_found_in_linear_time(text):
    begin = time.process_time()
    code_of(text)
    assert time.process_time() - begin < 10  # 1 s at most on an idle machine


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("0.3333333333333333", "0.333333333333", True),
        ("0.666667", "0.66666667", True),
        ("0.30000000000000004", "0.3", True),
        ("[0.1, 0.30000000000000004]", "[0.1, 0.3]", True),
        ("3", "3.0000001", True),
        ("-0.0", "0.0", True),
        ("0.66667", "0.66666667", False),
        ("2e-10", "1e-10", False),
        ("1000000006", "1000000007", False),
        ("1000000006.0", "1000000007", False),
        ("5", "inf", False),
        ("1.5", "nan", False),
        ("1e999999999", "1.5", False),
        ("1.4", "1.5e999999999999999999", False),
        (LONG, LONG, True),
        (f"{LONG}.0", LONG, True),
        (LONG[:-1] + "1", LONG, False),
        ("[1,2]", "[1, 2]", False),
    ],
)
def test_numbers_in_outputs(printed, expected, same):
    assert same_output(f"x {printed}\n", f"x {expected}") is same


@needs_sandbox
@pytest.mark.parametrize(
    ("code", "tests", "status"),
    [
        ("def f(x): return [0.1 + 0.2]", '{"inputs": [[1]], "outputs": [[0.3]], "fn_name": "f"}', "correct"),
        ("def f(x): return {'a': 0.1 + 0.2}", '{"inputs": [[1]], "outputs": [{"a": 0.3}], "fn_name": "f"}', "correct"),
        ("def f(x): return 0.31", '{"inputs": [[1]], "outputs": [0.3], "fn_name": "f"}', "wrong"),
        ("def f(x): return 10**9 + 1", '{"inputs": [[1]], "outputs": [1000000000], "fn_name": "f"}', "wrong"),
        ("def f(x): return 10**x", f'{{"inputs": [[5000]], "outputs": [{LONG}], "fn_name": "f"}}', "correct"),
        ("def f(x): return x + 1", f'{{"inputs": [[{LONG}]], "outputs": [{LONG[:-1]}1], "fn_name": "f"}}', "correct"),
        ("def f(x): return 10**x + 1", f'{{"inputs": [[5000]], "outputs": [{LONG}], "fn_name": "f"}}', "wrong"),
        ("def f(x): return 10**x", f"assert f(5000) == {LONG}", "correct"),
        ("print(10**5000)", json.dumps({"inputs": [""], "outputs": [LONG]}), "correct"),
        ("print(1 / 3)", '{"inputs": [""], "outputs": ["0.333333333333\\n"]}', "correct"),
    ],
)
def test_floats_and_long_integers(code, tests, status):
    check_tests(tests)
    assert grade("unit_tests", f"{F}python\n{code}\n{F}", tests).status == status
