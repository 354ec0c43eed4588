"""One exact number: what follows ``####`` (GSM8K), else the boxed one, else the last of the text.

Numbers are compared as fractions, never as floats: 105263157894736842 is not 105263157894736848.
"""

from __future__ import annotations

import re
from fractions import Fraction

from megatron_rl.environments.grading.text import final_part, last_boxes
from megatron_rl.types import Grade

REWARDS = (0.0, 1.0)
FORM = "#### %s"
MAX_EXPONENT = 5
"""Characters of ``e+999``: a billion there would be as many digits here."""

# no sign after a digit or a bracket: in "5-3" stand 5 and 3; no digits after a letter: in "m2" stands none
_NUMBER = re.compile(
    r"(?<![\w.])(?P<sign>(?:(?<![\w)\]}])[-+])?)(?:\\?[$\u20ac\u00a3\u00a5]\s?)?(?P<inner>-?)"
    r"(?P<whole>\d{1,3}(?:,\d{3}){1,300}(?!,?\d)|\d{1,1000}(?!\d))?"
    r"(?P<decimals>\.\d{1,1000}(?!\d))?(?P<exponent>[eE][+-]?\d{1,1000})?"
    r"(?:\s?/\s?(?P<divisor>\d{1,100}(?![\d.])))?"
)
_FRACTION = re.compile(r"\\[dt]?frac\s?\{(\d{1,100})\}\s?\{(\d{1,100})\}")


def judge(completion: str, gold: str) -> Grade:
    """Return the verdict on a completion; ``ValueError`` for a gold answer without a number."""
    gold = final_part(gold)
    wanted = _distinct(_marked(gold) or gold)
    if len(wanted) != 1:
        raise ValueError(f"the gold answer {gold[:100]!r} is not one number")
    text = final_part(completion)
    segment = _marked(text)
    if segment is None:
        numbers = _numbers(_last_words(text)) or _numbers(text)
        segment = numbers[-1][0] if numbers else None
    if segment is None:
        return Grade(REWARDS[0], status="no_answer")
    found = _distinct(segment)
    if len(found) != 1:  # none, or a choice of several: not an answer
        return Grade(REWARDS[0], status="unparsable", extracted=segment)
    right = found == wanted
    return Grade(REWARDS[right], status="correct" if right else "wrong", extracted=segment)


def _marked(text: str) -> str | None:
    """The segment that the text itself marks as its answer."""
    if "####" in text:
        return text.rpartition("####")[2].strip().partition("\n")[0].rpartition("=")[2].strip()
    boxes = last_boxes(text)
    return " ; ".join(boxes).rpartition("=")[2].strip() if boxes else None


def _last_words(text: str) -> str:
    """The end of a long text from a space on, where its last number most likely stands: a tenth of the time."""
    return text[-400:].partition(" ")[2] if len(text) > 400 else text


def _distinct(segment: str) -> set[Fraction]:
    return {value for _, value in _numbers(segment[:3000])}


def _numbers(text: str) -> list[tuple[str, Fraction]]:
    """All numbers of a text with their spelling, in order."""
    text = _FRACTION.sub(r"\1/\2", text.replace("{,}", ",").replace("\\,", "").replace("\\!", ""))
    numbers = []
    for match in _NUMBER.finditer(text):
        whole, decimals = match["whole"] or "", match["decimals"] or ""
        exponent = match["exponent"] or ""
        if not (whole or decimals) or len(exponent) > MAX_EXPONENT:
            continue
        value = Fraction((whole.replace(",", "") or "0") + decimals + exponent)
        if match["divisor"]:
            if not int(match["divisor"]):
                continue
            value /= int(match["divisor"])
        negative = match["sign"].startswith("-") != (match["inner"] == "-")
        numbers.append((match[0].strip(), -value if negative else value))
    return numbers
