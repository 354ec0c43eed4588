"""The math grader computes no number beyond its bounds, and a grade ends when its time is over."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import signal
import sys
import time

import pytest

from megatron_rl.environments.grading import bounds
from megatron_rl.environments.grading import math as grader
from tests.unit.environments.hostile_answers import ACCEPTED, COSTLY, REFUSED

BESIDE_FUNCTIONS = r"\frac{\sqrt3}{2}+\sin(x)"
GOLDS = ("6", BESIDE_FUNCTIONS, "x=y^2+1", r"\{a_1,a_2\}", "(1,2]", "x^2+1")
CPU_SECONDS = 2 * bounds.GRADE_SECONDS + 0.7
"""A first grade that imports is tried twice, and an operation at the end cannot be stopped."""


@pytest.mark.parametrize("answer", REFUSED)
def test_a_number_too_large_is_refused_unseen(answer, monkeypatch):
    monkeypatch.setattr("math_verify.verify", lambda *_, **__: pytest.fail("it was compared"))
    monkeypatch.setattr(grader, "GRADE_SECONDS", 60.0)  # a processor may be shared
    assert grader.judge(f"\\boxed{{{answer}}}", "6").status == "unparsable"


@pytest.mark.parametrize("answer", ACCEPTED)
def test_a_usual_answer_is_right_against_itself(answer):
    assert grader.judge(f"\\boxed{{{answer}}}", answer).status == "correct"
    assert not any(map(bounds.too_large, grader.read_answer(answer, True)))


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        (r"\sum_{k=1}^{n} k", r"\frac{n(n+1)}{2}"),
        (r"\sum_{k=1}^{2020} k", "2041210"),
        (r"\sum_{k=0}^{\infty} \frac{1}{2^k}", "2"),
        (r"\int_0^1 x dx", r"\frac{1}{2}"),
        (r"\sin x+2^{1000}", r"2^{1000}+\sin x"),  # bounds beside functions refused what is longer than 500 digits
        (r"\cos 1+\cos 2+\cos 3+\cos 4+\cos 5+\cos 6", r"\cos 6+\cos 1+\cos 2+\cos 3+\cos 4+\cos 5"),
        (r"1012 \cdot 2023!", r"\frac{2024!}{2}"),
        (",".join(f"x_{{{n}}}" for n in range(9)), ",".join(f"x_{n}" for n in range(9))),
    ],
)
def test_no_bound_costs_a_right_answer_of_ordinary_length(answer, gold):
    assert grader.judge(f"\\boxed{{{answer}}}", gold).status == "correct"


def test_a_first_grade_is_not_cut_short_by_its_imports(monkeypatch):
    """A try that imported something and ran out of time is tried once more; one that imported nothing is not."""
    tries = []

    @contextlib.contextmanager
    def out_of_time(_: float):
        tries.append(1)
        if len(tries) == 1:
            monkeypatch.setitem(sys.modules, "imported_by_the_first_grade", sys)
            raise bounds.OutOfTime
        yield

    monkeypatch.setattr(grader, "processor_time", out_of_time)
    assert grader.judge(r"\boxed{6}", "6").status == "correct"
    assert len(tries) == 2

    def always(_: float):
        tries.append(1)
        raise bounds.OutOfTime

    monkeypatch.setattr(grader, "processor_time", always)
    assert grader.judge(r"\boxed{6}", "6").status == "timeout"
    assert len(tries) == 3


def test_an_answer_too_large_to_compare_is_right_when_it_is_the_gold_answer_as_it_stands():
    assert grader.judge(r"\boxed{10^{10^{10}}}", "10^{10^{10}}").status == "correct"
    assert grader.judge(r"\boxed{x=10^{10^{10}}}", "10^{10^{10}}").status == "correct"
    assert grader.judge(r"\boxed{10^{10^{11}}}", "10^{10^{10}}").status == "unparsable"


def names(first: str, last: str) -> str:
    return r"\{" + ",".join(f"{letter}_{{{n}}}" for letter in first + last for n in range(15)) + r"\}"


@pytest.mark.parametrize(("answer", "gold"), [(r"\int x^x dx", BESIDE_FUNCTIONS), (names("xy", "z"), r"\{1,2\}")])
def test_a_grade_ends_when_its_time_is_over(answer, gold, monkeypatch):
    """And leaves nothing behind: neither a timer and its handler nor half of what it knew of x."""
    monkeypatch.setattr(grader, "GRADE_SECONDS", 0.25)
    before = signal.getsignal(signal.SIGPROF)
    start = time.process_time()
    assert grader.judge(f"\\boxed{{{answer}}}", gold).status == "timeout"
    assert time.process_time() - start < 4  # a first grade imports, and one operation at the end cannot be stopped
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGPROF) is before
    monkeypatch.undo()
    assert grader.judge(r"\boxed{x^2+2x+1}", "(x+1)^2").status == "correct"


@pytest.mark.parametrize(
    ("tex", "bits"),
    [
        ("2^{10}", 2 * 10),  # 2 has two binary digits
        ("2^{10}+2^{10}", 2 * 10 + 1),
        ("3 \\cdot 2^{10}", 2 + 2 * 10),
        ("(x+1)^{3}", 2 * 3),  # a symbol counts as 2, of one digit
        ("1E+3", 10 + 1),
    ],
)
def test_bounds_by_hand(tex, bits):
    [expression, _] = grader.read_answer(tex, True)
    assert bounds.bits(expression) == pytest.approx(bits)


@pytest.mark.parametrize("size", ["x" * 500, "=".join("x" * 9)])
def test_formulas_in_prose_are_bounded(size):
    prose = f"so we find ${size}$ in the end, and it is $7$ then"
    assert grader.judge(prose, "7").status == "correct"


def _judge_all(answer: str) -> None:
    texts = [(f"\\boxed{{{answer}}}", gold) for gold in GOLDS]
    for text, gold in [*texts, (f"So the answer must be ${answer}$ as we have seen", "6")]:
        start = time.process_time()
        status = grader.judge(text, gold).status
        assert time.process_time() - start < CPU_SECONDS, (text, gold, status)


@pytest.mark.long
@pytest.mark.parametrize("answer", [*REFUSED, *COSTLY, *ACCEPTED])
def test_no_answer_costs_much_against_any_gold_answer(answer):
    importlib.import_module("math_verify")
    process = multiprocessing.get_context("fork").Process(target=_judge_all, args=(answer,))
    process.start()
    process.join()
    assert process.exitcode == 0
