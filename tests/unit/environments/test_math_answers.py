"""What the math grader calls equal: spellings of one value, values that nearly agree, and what an answer is."""

from __future__ import annotations

import itertools
import json

import pytest

from megatron_rl.environments.grading import grade

EQUAL = {
    "tiny": [r"1.38\times10^{-23}", r"13.8\times10^{-24}", r"138\cdot 10^{-25}"],
    "factorials": [r"\frac{1}{1500!}", r"\frac{1501}{1501!}"],
    "powers": [r"2^{-60}x", r"\frac{x}{2^{60}}"],
    "decimals": ["0.000001", "10^{-6}", r"\frac{1}{1000000}"],
    "roots of unknowns": [r"\sqrt{xy}", r"\sqrt{x}\sqrt{y}", "(xy)^{1/2}"],
    "cube roots": [r"\sqrt[3]{a}\sqrt[3]{b}", "(ab)^{1/3}"],
    "logarithms": [r"\ln x-\ln y", r"\ln(x/y)", r"\ln\frac{x}{y}"],
    "lists": ["$-2,1$", "-2,1", r"\(1,-2\)"],
    "percent": [r"25\%", "25%", r"\frac14", "0.25", "25 percent"],
    "mixed percent": [r"33\frac13\%", r"\frac13"],
    "half": [r"\frac12", "\u00bd", r"\sfrac12", r"\underline{\frac12}", r"\frac12,", r"= \frac12", "5e-1", r"~\frac12"],
    "pair": ["(1,2)", r"\left (1,~2\right )", r"\bigl(1,\,2\bigr)", r"\mathopen{}(1,2)"],
    "named pair": ["(1,2)", "P(1,2)", r"\text{point }(1,2)"],
    "interval": ["[1,2)", r"\left [1,2\right )", r"\Big[1,2\Big)", r"x\in[1,2)"],
    "set": [r"\{1,2\}", r"\bigl\{2,1\bigr\}", r"\lbrace 1,2\rbrace"],
    "absolute value": ["|x|", r"\left | x \right |", r"\lvert x\rvert", r"\sqrt{x^2}"],
    "e": ["e^2", r"\mathrm{e}^2", r"\operatorname{e}^{2}", r"\exp(2)", r"{\mathrm e}^2"],
    "cube root of 2": [r"\sqrt[3]{2}", r"\sqrt[3]2", r"\sqrt[3] 2", "\u221b2", "2^{1/3}"],
    "root of 3": [r"\sqrt{3}", r"\surd3", "\u221a3", "3^{0.5}", r"\sqrt 3"],
    "sixth of pi": [r"\frac\pi6", r"\pi/6", r"\frac{\pi}6", r"30^\circ", "30\u00b0"],
    "degrees": [r"30^\circ", "30", "30 degrees", r"30\text{ degrees}"],
    "sine": [r"\sin 30^\circ", r"\frac12"],
    "complex": ["3+4i", "3+4 i", "4i+3", r"3+4\cdot i", r"3+4\mathrm{i}"],
    "powers of i": ["i^2", "-1", r"(1+i)(1-i)-3"],
    "unknowns beside i": ["a+bi", "a+b i", r"a+b\cdot i"],
    "mixed number": ["3 1/4", r"\frac{13}{4}", r"3\frac14", "3.25", "3~1/4"],
    "negative mixed number": ["-3 1/4", r"-\frac{13}{4}"],
    "repeating": [r"0.\overline{3}", r"\frac13", "0.333...", r"0.333\ldots", r"0.\dot{3}", r"0.\bar3", "0.(3)"],
    "late repeating": [r"0.1\overline{6}", r"\frac16", "0.1666...", r"0.1\dot6"],
    "long repeating": [r"0.\dot14285\dot7", r"\frac17"],
    "digit groups": ["12000", r"12\ 000", r"12~000", r"12{,}000", r"12\,000"],
    "decimal comma of TeX": ["3{,}14", "3.14"],
    "units": ["12", r"12~cm", r"12\hspace{1mm}\text{m}", r"x~=~12"],
    "base": ["1010_2", "1010_{2}"],
}
"""Each is right where any other of its row is the gold answer."""

DIFFERENT = [
    ("2^{-60}", "2^{-61}"), (r"1.6\times10^{-19}", r"6.63\times10^{-34}"), (r"\frac{1}{6^{25}}", r"\frac{1}{6^{24}}"),
    ("0.0000001", "0.0000003"), ("1.0000001", "1.0000004"), ("1.0000001", "1"), ("10^{-20}", "0"),
    (r"\frac{1}{1500!}", r"\frac{1}{1502!}"), (r"2-2^{-99}", "2-2^{-100}"),
    (r"2^{-60}\sqrt2", r"2^{-61}\sqrt2"), (r"\ln(1+10^{-20})", "0"), (r"\{10^{-20},1\}", r"\{10^{-21},1\}"),
    ("[0,10^{-20}]", "[0,10^{-21}]"),
    ("x=10^{-20}", "x=10^{-21}"), ("2^{-60}x", "2^{-61}x"), (r"\sqrt{x^2}", "x"), (r"\ln|x|", r"\ln x"),
    ("25%", "0.25%"), ("5000%", "50"), ("3 1/4", r"\frac34"), ("3 4", "7"), (r"0.\overline{3}", "0.33"),
    (r"0.\overline{12}", r"0.1\overline{2}"), (r"30^\circ", r"\frac{\pi}{3}"), (r"\frac{\pi}{6}", "30"),
    ("1010_2", "1010_3"), ("1010_{16}", "1010_2"), ("3+4i", "3-4i"), ("i", "1"), (r"\sqrt[3]{5}", r"3\sqrt5"),
    ("(1,2)", "(2,1)"), ("12,0", "12000"),
]  # fmt: skip
"""Neither is right where the other one is the gold answer."""

COMPLETIONS = [
    (r"\boxed{12} (in \boxed{} as requested)", "12", True),
    (r"\boxed{12}. Note: \boxed{...} was required.", "12", True),
    (r"\boxed{12}, i.e. \boxed{\text{your answer}} filled in", "12", True),
    (r"\boxed{12} - put inside \boxed.", "12", True),
    (r"The answer is 12 (without \boxed{}).", "12", True),
    (r"\boxed{\{\}}", r"\emptyset", True),  # no answer is missing here
    (r"\boxed{8}\boxed{7}", "7", False),
    ("\\boxed{8}\n\\boxed{7}", "7", True),
    (r"\boxed{8=7}", "7", False),
    (r"\boxed{3+4=7}", "7", True),
    ("Answer: 7 = 8", "8", False),
    ("The answer is 7 or 8", "7", False),
    ("The answer is 7 or 8", "8,7", True),
    ("The answer is either 7 or 8.", "8", False),
    ("It is 7, or 8.", "8", False),
    ("It is not 73.", "73", False),
    ("The answer is 8, not 7.", "8", True),
    ("It is not hard to see that the answer is 7.", "7", True),
    ("Adding 7 and 8 gives 15.", "15", True),
    ("Adding gives 905. So it is `73`.", "73", True),
    ("So there are *73*.", "73", True),
    ("= 73", "73", True),
    ("<ANSWER>73</ANSWER>", "73", True),
    (r"Therefore the answer is \frac{1}{2}.", "0.5", True),
    ("The answer is 3 1/4.", "13/4", True),
    ("So the probability is 25%.", r"\frac14", True),
    (r"So the angle is $30^\circ$.", r"\frac{\pi}{6}", True),
    ("Answer: $1,2$", r"\frac65", False),
    ("Answer: 1,2", r"\frac65", True),  # outside of TeX a decimal comma
    ("Answer: $3.50", "3.5", True),
    (r"\boxed{0.333333}", r"\frac13", True),
    (r"\boxed{0.333334}", r"\frac13", False),
    (r"\boxed{0.30000000000000004}", "0.3", True),
    (r"\boxed{1.414214}", r"\sqrt2", True),
    (r"\boxed{4}", "<think>Is it 5?</think>\n4 ", True),
]


@pytest.mark.parametrize("kind", EQUAL)
def test_spellings_of_one_value_are_equal(kind):
    first, *others = EQUAL[kind]
    if kind in ("percent", "degrees", "sixth of pi"):  # 25% is 1/4 and 25, which are not equal
        pairs = [(first, other) for other in others] + [(other, first) for other in others]
    else:
        pairs = list(itertools.permutations(EQUAL[kind], 2))
    wrong = [pair for pair in pairs if grade("math", f"\\boxed{{{pair[0]}}}", pair[1]).status != "correct"]
    assert wrong == []


def test_values_that_nearly_agree_are_different():
    pairs = [*DIFFERENT, *((second, first) for first, second in DIFFERENT)]
    assert [pair for pair in pairs if grade("math", f"\\boxed{{{pair[0]}}}", pair[1]).status == "correct"] == []


def test_one_answer_is_found_in_the_text():
    grades = [(*case, grade("math", *case[:2])) for case in COMPLETIONS]
    assert [case for case in grades if (case[3].status == "correct") != case[2]] == []


@pytest.mark.parametrize("kind", ["math", "exact_number", "dapo", "deepscaler", "exact"])
@pytest.mark.parametrize("gold", ["<think>Is it 5?</think>\n12", " 12\n", "</think>12"])
def test_a_thought_and_spaces_in_the_right_answer_do_not_count(kind, gold):
    completion = {"dapo": "Answer: 12", "deepscaler": r"</think>\boxed{12}"}.get(kind, "<think>5</think> 12")
    assert grade(kind, completion, gold).status == "correct"
    assert grade(kind, completion.replace("12", "13"), gold).status == "wrong"


def test_every_public_bug_report_is_judged_rightly(shared_data):
    cases = map(json.loads, (shared_data / "graders/reports.jsonl").read_text(encoding="utf-8").splitlines())
    judged = [(case, grade(case["grader"], case["completion"], case["gold"]).status) for case in cases]
    assert [(case, status) for case, status in judged if (status == "correct") != case["correct"]] == []
