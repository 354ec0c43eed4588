"""The graders on cases picked by hand; what is expected was worked out, not copied from a run."""

from __future__ import annotations

import json
import threading

import pytest

from megatron_rl.environments.data import Overlong
from megatron_rl.environments.grading import GRADERS, grade
from megatron_rl.errors import ConfigError
from tests.support.graders import grade_many


def puzzle(*numbers: int, target: int) -> str:
    return json.dumps({"numbers": numbers, "target": target})


MATH = [
    (r"Therefore $\boxed{\frac{2}{4}}$.", "0.5", "correct"),
    (r"\boxed{3} is wrong, so $\boxed{4}$.", "4", "correct"),
    (r"\boxed{4} is wrong, so $\boxed{3}$.", "4", "wrong"),
    (r"\boxed{4} and $\boxed{\garbage{{}$.", "4", "correct"),  # a box that never closes is none
    (r"\boxed{1} and \boxed{-2}", "-2,1", "correct"),
    (r"\boxed{4} and \boxed{5}", "4", "wrong"),  # both at once is not an answer
    (r"\boxed{4 \text{ or } 5}", "4", "wrong"),
    (r"\boxed{4, 5, 6}", "5", "wrong"),
    (r"\boxed{}", "0", "no_answer"),
    ("", "0", "no_answer"),
    ("   \n", "0", "no_answer"),
    ("I do not know.", "7", "no_answer|unparsable"),
    ("Answer: 34", "34", "correct"),
    ("Answer: 33\nAnswer: 34", "34", "correct"),
    ("Answer: 34\nAnswer: 33", "34", "wrong"),
    ("**Answer:** $34$", "34", "correct"),
    ("Answer\uff1a\uff13\uff14", "34", "correct"),  # full-width colon and digits
    ("\u7b54\u6848\u662f\uff1a\u7b54\u6848:34\u3002", "34", "correct"),
    ("Answer: \u22125", "-5", "correct"),
    ("Answer: \u22125", "5", "wrong"),
    ("Answer: 5", "-5", "wrong"),
    ("x+1", "1", "wrong"),  # a bare expression is not its last number
    ("1", "x+1", "wrong"),
    ("(x+1)^2", "x^2+2x+1", "correct"),
    ("x**2 + 1", "x^2+1", "correct"),
    (r"\boxed{[0,1)}", "(0,1]", "wrong"),
    (r"\boxed{105263157894736848}", "105263157894736842", "wrong"),
    (r"\boxed{34.0}", "34", "correct"),
    (r"\boxed{33.99999999}", "34", "wrong"),
    (r"\boxed{0.333333}", r"\frac{1}{3}", "correct"),
    (r"\boxed{12{,}345}", "12345", "correct"),
    (r"\boxed{\$32,\!348}", "32348", "correct"),
    (r"\boxed{x \in [-2,7]}", "[-2,7]", "correct"),
    (r"\boxed{\text{Evelyn}}", "Evelyn", "correct"),
    (r"\boxed{\text{Evelyn}}", "Carla", "wrong"),
    (r"<think>\boxed{5}</think> So \boxed{6}", "6", "correct"),
    (r"<think>\boxed{5}</think> Well.", "5", "wrong"),
    (r"<think>It must be \boxed{5}", "5", "no_answer"),  # cut off while it thought
    ("<answer> 5 </answer>", "5", "correct"),
    (r"\boxed{42}<|im_end|>", "42", "correct"),
    (r"\boxed{3\sqrt{2}}", "\u221a18", "correct"),
    ("The answer is +7.", "7", "correct"),
    ("the answer is: +1,234 degrees", "1234", "correct"),
    ("so it is **+0.5**", r"\frac{1}{2}", "correct"),
    ("Add 5 +7 to get 12", "12", "correct"),
    ("Therefore the point is (3, 4).", "(3,4)", "correct"),
    (r"So the solution is (x, y) = (\frac{1}{2}, +3)", "(0.5,3)", "correct"),
    ("Therefore the point is (3, 4).", "4", "wrong"),
    ("x lies in (-\u221e, 3].", r"(-\infty,3]", "correct"),
    ("The solution set is {1, 2}.", r"\{1,2\}", "correct"),
    ("It has 1234 (1,234).", "1234", "correct"),
    ("The answer is 7 (see 3, 4).", "7", "correct"),
    ("The value is f(3, 4).", "4", "correct"),
    (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"\begin{bmatrix} 1 \\ 2 \end{bmatrix}", "correct"),
]


def test_math():
    grades = grade_many("math", [case[:2] for case in MATH], deadline_s=20.0)
    told = [
        (*case, result)
        for case, result in zip(MATH, grades, strict=True)
        if result.status not in case[2].split("|") or result.reward != (result.status == "correct")
    ]
    assert told == []


@pytest.mark.parametrize(
    ("completion", "gold", "status", "extracted"),
    [
        ("so\nAnswer: $34$.", "34", "correct", "34"),
        ("Answer: 34\nso it is 35", "34", "correct", "34"),
        ("Answer: 34\nAnswer: 35", "34", "wrong", "35"),
        ("Answer: 34.00", "34", "wrong", "34.00"),  # verl compares strings
        ("Answer: 3 4", "34", "correct", "34"),
        ("Answer\uff1a34", "34", "no_answer", None),
        (r"\boxed{34}", "34", "no_answer", None),
        ("Answer: 34" + " " * 300, "34", "no_answer", None),
        ("", "34", "no_answer", None),
    ],
)
def test_dapo(completion, gold, status, extracted):
    result = grade("dapo", completion, gold)
    assert (result.status, result.extracted) == (status, extracted)
    assert result.reward == (1.0 if status == "correct" else -1.0)


@pytest.mark.parametrize(
    ("completion", "gold", "status"),
    [
        ("He has 5 - 3 = 2.\n#### 2", "2", "correct"),
        ("#### 2\nor #### 3", "2", "wrong"),
        ("#### 2 or 3", "2", "unparsable"),
        ("#### none", "2", "unparsable"),
        ("#### $1,234.50 dollars.", "1234.5", "correct"),
        ("#### -$5", "-5", "correct"),
        ("#### \u22125", "-5", "correct"),
        ("#### \u22125", "5", "wrong"),
        ("#### \uff11\uff12", "12", "correct"),
        ("#### 007", "7", "correct"),
        ("#### 50%", "50", "correct"),
        ("#### 3 * 4 = 12", "12", "correct"),
        ("#### 105263157894736848", "105263157894736842", "wrong"),
        ("#### 0.1", "0.10", "correct"),
        ("#### 1/2", "0.5", "correct"),
        ("#### 1/0", "0", "unparsable"),
        ("The answer is 5-3.", "3", "correct"),
        ("The answer is 5-3.", "-3", "wrong"),
        ("In all 12 apples.", "12", "correct"),
        ("It covers 30 m2", "30", "correct"),
        ("- 7", "7", "correct"),  # an item of a list, not a minus
        (r"It is \boxed{72} in 2 months", "72", "correct"),
        ("1e999999999", "1", "no_answer"),
        ("9" * 5000, "9", "no_answer"),
        ("no number", "2", "no_answer"),
        ("", "2", "no_answer"),
    ],
)
def test_exact_number(completion, gold, status):
    result = grade("exact_number", completion, gold)
    assert result.status in status.split("|"), result
    assert result.reward == (result.status == "correct")


def test_a_gold_answer_without_a_number_is_a_fault_of_the_data():
    with pytest.raises(ValueError, match="not one number"):
        grade("exact_number", "#### 5", "many")


@pytest.mark.parametrize(
    ("completion", "status"),
    [
        ("Answer: (100 - 30) / 7", "correct"),
        ("<answer>(100-30)/7</answer>", "correct"),
        (r"\boxed{(100 - 30) \div 7 = 10}", "correct"),
        (r"$\boxed{\frac{100-30}{7}}$", "correct"),
        ("I tried.\n(100 \u2212 30) \u00f7 7 = 10", "correct"),
        ("Answer: -(30 - 100)/7", "correct"),
        ("Answer: (100 - 30) / 7 = 11", "wrong"),  # claims something else
        ("Answer: 10", "wrong"),
        ("Answer: 7 + 3", "wrong"),  # other numbers
        ("Answer: (100 - 30) / 7 + 7 - 7", "wrong"),  # a number twice
        ("Answer: (100 - 30) / (7 - 7)", "wrong"),
        ("Answer: (100 - 30) ** 7", "unparsable"),
        ("Answer: (100 - 30 / 7", "unparsable"),
        ("Answer: 100.0 - 30", "unparsable"),
        ("Answer: __import__('os').getpid()", "unparsable"),
        ("Answer: 9**9**9**9", "unparsable"),
        ("Answer: " + "(" * 10_000 + "1" + ")" * 10_000, "unparsable"),
        ("no idea", "no_answer"),
        ("", "no_answer"),
    ],
)
def test_countdown(completion, status):
    result = grade("countdown", completion, puzzle(100, 30, 7, target=10))
    assert result.status == status, result
    assert result.reward == (status == "correct")


def test_countdown_is_exact():
    assert grade("countdown", "8/(3-8/3)", puzzle(8, 3, 8, 3, target=24)).reward == 1.0
    with pytest.raises(ValueError, match="JSON"):
        grade("countdown", "1+2", "3")


DEEPSCALER = [
    (r"<think>\boxed{5}</think> So \boxed{6}.", "6", "correct"),
    (r"\boxed{5}</think> So \boxed{6}.", "6", "correct"),  # the chat template began the thought
    (r"<think>\boxed{6}</think> So \boxed{5}.", "6", "wrong"),
    (r"</think>a</think>\boxed{\frac{2}{4}}", "0.5", "correct"),
    (r"So \boxed{6}.", "6", "no_answer"),  # it did not think, or was cut while it thought
    (r"<think>So \boxed{6}.", "6", "no_answer"),
    ("<think>hm</think> Answer: 6", "6", "no_answer"),  # no box
    (r"<think>hm</think> \boxed{6", "6", "no_answer"),
    (r"<think>hm</think> \boxed{6} and then </think>", "6", "no_answer"),
    ("", "6", "no_answer"),
]


@pytest.mark.parametrize(("completion", "gold", "status"), DEEPSCALER)
def test_deepscaler(completion, gold, status):
    result = grade("deepscaler", completion, gold)
    assert (result.status, result.reward) == (status, float(status == "correct"))


@pytest.mark.parametrize(
    ("completion", "status"),
    [(" Paris\n", "correct"), ("<think>Rome?</think>\nParis", "correct"), ("paris", "wrong"), ("  ", "no_answer")],
)
def test_exact(completion, status):
    result = grade("exact", completion, "Paris ")
    assert (result.status, result.reward) == (status, float(status == "correct"))


def test_the_overlong_penalty():
    lengths = (100, 12288, 14336, 16384, 20000)  # 14336 is half way through the buffer; beyond the end it stays
    assert [Overlong(4096, 0.5, 16384).penalty(n) for n in lengths] == [0.0, 0.0, -0.25, -0.5, -0.5]
    with pytest.raises(ValueError, match="buffer"):
        Overlong(11, 1.0, 10)


def test_kinds_are_found_by_their_files():
    assert {"math", "dapo", "exact_number", "countdown", "exact", "deepscaler"} <= set(GRADERS.names())
    for name in GRADERS.names():
        lowest, highest = GRADERS.module(name).REWARDS
        assert lowest < highest
    with pytest.raises(ConfigError, match="did you mean math"):
        grade("maths", "1", "1")


def test_any_thread_may_grade():
    """math-verify alone raises off the main thread, or calls correct answers wrong."""
    rewards: dict[int, tuple[float, float]] = {}

    def work(number: int) -> None:
        half = rf"\boxed{{\frac{{{number}}}{{2}}}}"
        rewards[number] = grade("math", half, str(number / 2)).reward, grade("math", half, "-1").reward

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert rewards == {number: (1.0, 0.0) for number in range(8)}


def test_a_gold_answer_that_is_none_is_a_fault_not_a_reward():
    with pytest.raises(ValueError, match="gold answer"):
        grade("math", r"\boxed{1}", "")
