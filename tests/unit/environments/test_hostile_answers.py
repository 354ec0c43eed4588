"""The math grader computes nothing for an answer beyond its bounds; those within are compared."""

from __future__ import annotations

import importlib
import multiprocessing
import resource

import pytest

from megatron_rl.environments.grading import bounds
from megatron_rl.environments.grading import math as grader
from tests.unit.environments.hostile_answers import ACCEPTED, REFUSED

GOLDS = ("6", r"\frac{\pi}{2}+\sin(x)", "x=y^2+1", r"\sqrt{2}+\sqrt{3}", "(1,2]", "x^2+1")
CPU_SECONDS = 10


@pytest.mark.parametrize("answer", REFUSED)
def test_a_costly_answer_is_refused_unseen(answer, monkeypatch):
    monkeypatch.setattr("math_verify.verify", lambda *_, **__: pytest.fail("it was compared"))
    assert grader.judge(f"\\boxed{{{answer}}}", "6").status == "unparsable"


@pytest.mark.parametrize("answer", ACCEPTED)
def test_a_usual_answer_is_right_against_itself(answer):
    assert grader.judge(f"\\boxed{{{answer}}}", answer).status == "correct"
    assert not bounds.text_too_costly(answer)
    assert not any(map(bounds.too_costly, grader.read_answer(answer, True)))


def test_an_answer_too_costly_to_compare_is_right_when_it_is_the_gold_answer_as_it_stands():
    assert grader.judge(r"\boxed{10^{10^{10}}}", "10^{10^{10}}").status == "correct"
    assert grader.judge(r"\boxed{10^{10^{11}}}", "10^{10^{10}}").status == "unparsable"


@pytest.mark.parametrize("answer", ["2^{2019}-1", "(1+x)^{100}"])
def test_what_is_long_is_not_simplified_beside_functions_of_symbols(answer, monkeypatch):
    monkeypatch.setattr("math_verify.verify", lambda *_, **__: pytest.fail("it was compared"))
    assert grader.judge(f"\\boxed{{{answer}}}", r"\frac{\pi}{2}+\sin(x)").status == "unparsable"
    assert not bounds.has_functions(grader.read_gold(r"\sin(2)")[0])


@pytest.mark.parametrize(
    ("tex", "bits", "terms"),
    [
        ("2^{10}", 2 * 10, 1),  # 2 has two binary digits
        ("2^{10}+2^{10}", 2 * 10 + 1, 2),
        ("3 \\cdot 2^{10}", 2 + 2 * 10, 1),
        ("(x+1)^{3}", 2 * 3, 4),  # x^3 + 3x^2 + 3x + 1
        ("(x+y+z)^{2}", (1 + 1.584962500721156) * 2, 6),
        ("(x+1)(y+1)", 4, 4),
    ],
)
def test_bounds_by_hand(tex, bits, terms):
    [expression, _] = grader.read_answer(tex, True)
    assert bounds.Meter().measure(expression) == pytest.approx((bits, terms))


@pytest.mark.parametrize("size", ["x" * 500, "=".join("x" * 9)])
def test_formulas_in_prose_are_bounded(size):
    prose = f"so we find ${size}$ in the end, and it is $7$ then"
    assert grader.judge(prose, "7").status == "correct"


def _judge_all(answer: str) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    for gold in GOLDS:
        grader.judge(f"\\boxed{{{answer}}}", gold)
        grader.judge(f"So the answer must be ${answer}$ as we have seen", gold)


@pytest.mark.long
@pytest.mark.parametrize("answer", [*REFUSED, *ACCEPTED])
def test_no_answer_costs_much_against_any_gold_answer(answer):
    """Twelve grades within ten seconds of processor time, of which the parser's start takes a part."""
    importlib.import_module("math_verify")
    process = multiprocessing.get_context("fork").Process(target=_judge_all, args=(answer,))
    process.start()
    process.join()
    assert process.exitcode == 0
