"""The scorer DAPO was trained with, to the letter: the last ``Answer:`` line as a normalised string, 1 or -1.

Its quirks are kept on purpose (``34.00`` is not ``34``, ``3 4`` is), so that rewards compare with published
runs: verl's ``math_dapo.py``. Who wants answers judged by their value takes the kind ``math``.
"""

from __future__ import annotations

import re

from megatron_rl.environments.grading.text import without_thought
from megatron_rl.types import Grade

REWARDS = (-1.0, 1.0)
FORM = "Answer: %s"
TAIL = 300
INVALID = "[INVALID]"

# the tables of Lewkowycz et al. 2022 (Minerva), appendix D.1; the order matters
_REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    (r"\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)
_REMOVED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3"),
    *("\\text{\n}", "\\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', "\\dots"),
)
_ANSWER_LINE = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
_SHAPES = (
    (re.compile(r"(.*?)(\$)(.*?)(\$)(.*)"), r"$\3$"),
    (re.compile(r"(\\text\{)(.*?)(\})"), r"\2"),
    (re.compile(r"(\\textbf\{)(.*?)(\})"), r"\2"),
    (re.compile(r"(\\overline\{)(.*?)(\})"), r"\2"),
    (re.compile(r"(\\boxed\{)(.*)(\})"), r"\2"),
    (re.compile(r"(frac)([^{])(.)"), r"frac{\2}{\3}"),
    (re.compile(r"(sqrt)([^{])"), r"sqrt{\2}"),
)


def judge(completion: str, gold: str) -> Grade:
    lines = _ANSWER_LINE.findall(completion[-TAIL:])
    extracted = normalised(lines[-1] if lines else INVALID)
    if extracted == normalised(without_thought(gold)):
        return Grade(REWARDS[1], status="correct", extracted=extracted)
    return Grade(REWARDS[0], status="wrong", extracted=extracted) if lines else Grade(REWARDS[0], status="no_answer")


def normalised(answer: str) -> str:
    """Return the answer as it is compared: what follows the last ``=`` without units, dollars and TeX forms."""
    answer = answer.split("=")[-1]
    for before, after in _REPLACED:
        answer = answer.replace(before, after)
    for removed in _REMOVED:
        answer = answer.replace(removed, "")
    for pattern, replacement in _SHAPES:
        answer = pattern.sub(replacement, answer)
    answer = answer.replace("$", "")
    without_commas = answer.replace(",", "")
    return (without_commas if without_commas.isdigit() else answer).strip()
