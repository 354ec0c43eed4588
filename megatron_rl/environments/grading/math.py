"""Mathematical equality by math-verify, of the answer this module finds in the text.

math-verify looks for answers too, but falls back to any earlier number when the last does not parse, and reads
a bare ``x^2+2x+1`` as 1. So what is marked as the answer (a box, an ``Answer:`` line, ``####``) and what is
nothing but an answer is cut out here and parsed as a whole; its own search is left the prose without a mark.

Runs in a worker process only: nothing in here can be interrupted.
"""

from __future__ import annotations

import logging
import re
import sys
from typing import Any

from megatron_rl.environments.grading.bounds import (
    GRADE_SECONDS,
    OutOfTime,
    processor_time,
    text_of_short_formulas,
    too_deep,
    too_large,
)
from megatron_rl.environments.grading.text import final_part, last_boxes, marked_line, plain_signs
from megatron_rl.types import Grade

REWARDS = (0.0, 1.0)
FORM = "\\boxed{%s}"
PRELOAD = ("sympy", "math_verify", "latex2sympy2_extended.latex2sympy2")

MAX_ANSWER = 400
"""Characters of an answer; the longest of MATH-500 has 53, and parse time grows with the square."""
MAX_PROSE = 4_000
"""Characters that are searched when nothing marks the answer."""
MAX_DIGITS = 1_000

_NUMBER = re.compile(
    r"-?\\?[$\u20ac\u00a3]?\s?-?(?:\d{1,3}(?:[ ,]\d{3})+(?:\.\d+)?|\d+(?:[.,]\d+)?|\.\d+)"
    r"\s?(?:[$\u20ac\u00a3]|\\?%|percent\w*|pct)?\.?"
)
_DECIMAL_COMMA = re.compile(r"-?\d+,(?!\d{3}$)\d+")
_DIGIT_GROUP = re.compile(r"(?<=\d)(?:\{,\}|,?\\[!,:;]|,\\ )\s?(?=\d{3})")
_MEMBER = re.compile(r"^\s*[a-zA-Z]\s*(?:\\in(?![a-z])|\u2208)")
_BRACKETED = re.compile(r"(?<![\\\w(\[])\[\s?(-?[\d./]{1,40})\s?\]")
_LEADING_PLUS = re.compile(r"(?:^|(?<=[=:])|(?<=\*\*)|(?<=[=:]\s)|(?<=[^\W\d_]{2}\s))\+(?=[\d.])")
_LAST_TUPLE = re.compile(r"(?<![^\s=:])(?:\\?\{|[(\[])[^()\[\]]{1,120},[^()\[\]]{1,120}[)\]}](?=[\s.]*$)")
_ENDS = re.compile(r"\d|\\infty|\u221e")
_TEX_WORD = re.compile(
    r"\\(?:begin|end|text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s?\{[^{}]*\}|\\[a-zA-Z]+"
)
_WORD = re.compile(r"[^\W\d_]{2,}")
_FUNCTIONS = frozenset(
    ["sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp", "sqrt", "pi", "mod", "and", "or", "dx", "dy", "dt"]
)
_MATH = re.compile(r"\$|\\\(|\\\[")
_AFTER_IDEOGRAPH = re.compile(r"(?<=[\u3040-\u9fff\uff00-\uffef])(?=[-\d\\])")
_SIGNS = str.maketrans(
    {
        "\u00d7": "\\times ", "\u00f7": "/", "\u00b7": "\\cdot ", "\u03c0": "\\pi ", "\u221e": "\\infty ",
        "\u2264": "\\le ", "\u2265": "\\ge ", "\u2260": "\\ne ", "\u222a": "\\cup ", "\u2229": "\\cap ",
        "\u00b1": "\\pm ", "\u00b2": "^{2}", "\u00b3": "^{3}", "\u00b0": "^{\\circ}", "\u2208": "\\in ",
    }
)  # fmt: skip
_ROOT = re.compile(r"\u221a\s?(?:\(([^()]{1,80})\)|(\w+))")

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timeout is off


def judge(completion: str, gold: str) -> Grade:
    """Return the verdict on a completion; ``gold`` is an answer, bare or in TeX, or a solution that ends in one."""
    from math_verify import parse  # noqa: F401 - its import takes a second, which is no part of the grade's

    answer, boxed = _answer(final_part(completion))
    if not answer:
        return Grade(REWARDS[0], status="no_answer")
    known = len(sys.modules)
    status = _timed_status(answer, boxed, gold)
    if status == "timeout" and len(sys.modules) > known:
        # sympy imports on first use, up to a second on a slow processor; the second try has these modules.
        status = _timed_status(answer, boxed, gold)
    return Grade(REWARDS[status == "correct"], status=status, extracted=answer)


def _timed_status(answer: str, boxed: bool, gold: str) -> str:
    from sympy.core.cache import clear_cache

    try:
        with processor_time(GRADE_SECONDS):
            return _status(answer, boxed, gold)
    except OutOfTime:
        clear_cache()  # while sympy asks whether x is positive, it has noted "unknown" for x, which would stay
        return "timeout"


def _status(answer: str, boxed: bool, gold: str) -> str:
    parsed = read_answer(answer, boxed)
    if not parsed:
        return "unparsable"
    wanted = read_gold(gold)
    compared = [_compared(found, wanted) for found in parsed]
    if any(map(too_large, compared)) and not _same(wanted, compared):
        return "unparsable"
    return "correct" if _equal(wanted, parsed) else "wrong"


def _answer(text: str) -> tuple[str, bool]:
    """The part of the text that is the answer, and whether it stood in a box.

    It is what the text marks as such, or all of a short text, or the end of a long one.
    """
    boxes = last_boxes(text)
    if boxes:
        return (", ".join(boxes) if all(boxes) else ""), True
    if "####" in text:
        return text.rpartition("####")[2].strip().partition("\n")[0].strip(), False
    line = marked_line(text)
    return (text[-MAX_PROSE:].strip() if line is None else line), False


def read_gold(gold: str) -> list[Any]:
    """Return the gold answer, parsed; its text when that is all it is."""
    gold = plain_signs(gold).strip()
    boxes = last_boxes(gold)
    parsed = read_answer(", ".join(boxes), True) if boxes else read_answer(gold, False)
    if not parsed:
        raise ValueError(f"the gold answer {gold[:100]!r} cannot be parsed")
    return parsed


def read_answer(answer: str, boxed: bool) -> list[Any]:
    """Return math-verify's readings of an answer: expressions and their text, only the text, or nothing."""
    from math_verify import ExprExtractionConfig, parse

    if _too_large(answer):
        return []
    answer = _DIGIT_GROUP.sub(",", answer)
    if _NUMBER.fullmatch(answer):
        number = parse(answer.lstrip("\\").rstrip("."), [ExprExtractionConfig()], parsing_timeout=None)
        if not _DECIMAL_COMMA.fullmatch(answer):
            return number
        # "1,5" is a list in a box; elsewhere it may as well be the number that half of the world writes so
        return _parsed_tex(answer) + ([] if boxed else number)
    spaced = _AFTER_IDEOGRAPH.sub(" ", answer)
    if not boxed and _is_prose(spaced):
        if found := _last_tuple(spaced):
            return _parsed_tex(found)
        plain = _LEADING_PLUS.sub("", _BRACKETED.sub(r" \1 ", spaced))
        return parse(text_of_short_formulas(plain, MAX_ANSWER), parsing_timeout=None)
    return _parsed_tex(answer)


def _last_tuple(prose: str) -> str:
    """The pair, interval or set of numbers that ends a sentence without formulas; "" where there is none.

    math-verify searches such prose for numbers alone.
    """
    found = None if _MATH.search(prose) else _LAST_TUPLE.search(prose)
    if not found or not _ENDS.search(found[0]) or _NUMBER.fullmatch(found[0][1:-1]) or _has_words(found[0]):
        return ""
    return "\\" * (found[0][0] == "{") + found[0][:-1].rstrip("\\") + "\\" * (found[0][-1] == "}") + found[0][-1]


def _parsed_tex(answer: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    tex = _ROOT.sub(lambda root: f"\\sqrt{{{root[1] or root[2]}}}", _without_delimiters(answer)).translate(_SIGNS)
    tex = _MEMBER.sub("", tex).rstrip("\\").replace("**", "^")
    # priority 0 and no other anchor: the box is read as a whole or not at all
    config = LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)
    return parse(f"\\boxed{{{tex}}}", [config], parsing_timeout=None)


def _is_prose(answer: str) -> bool:
    """Return whether the answer is a sentence to be searched rather than one expression."""
    if _MATH.search(_without_delimiters(answer)):
        return True
    return _has_words(answer) and len(_TEX_WORD.sub(" ", answer).split()) > 1


def _has_words(answer: str) -> bool:
    return any(word.lower() not in _FUNCTIONS for word in _WORD.findall(_TEX_WORD.sub(" ", answer)))


def _without_delimiters(answer: str) -> str:
    """``$x$``, ``\\(x\\)`` and ``\\[x\\]`` as ``x``; the sentence's full stop goes too."""
    bare = answer.strip().rstrip(".").strip()
    for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        inner = bare.removeprefix(opening).removesuffix(closing)
        if len(inner) == len(bare) - len(opening) - len(closing) and opening[-1] not in inner.replace("\\$", ""):
            return inner.strip()
    return bare


def _too_large(answer: str) -> bool:
    longest = MAX_PROSE if _is_prose(answer[: MAX_PROSE + 1]) else MAX_ANSWER
    return len(answer) > longest or too_deep(answer) or bool(re.search(rf"\d{{{MAX_DIGITS}}}", answer))


def _equal(gold: list[Any], parsed: list[Any]) -> bool:
    from math_verify import verify

    if any(_almost(wanted, found) for wanted in gold[:1] for found in parsed[:1]):
        return False
    return bool(verify(gold, parsed, timeout_seconds=None))


def _compared(found: Any, wanted: list[Any]) -> Any:
    """What math-verify compares: of an equation, unless one is wanted, the last right side."""
    from math_verify.grader import is_equation, take_last_relation

    if is_equation(found) and not any(map(is_equation, wanted)):
        return take_last_relation(found).rhs
    return found


def _same(gold: list[Any], parsed: list[Any]) -> bool:
    """Return whether an answer with too large numbers to compare equals the gold answer as text, without computing."""
    return any(wanted == found for wanted in gold for found in parsed if not isinstance(found, str))


def _almost(wanted: Any, found: Any) -> bool:
    """Two numbers that differ though rounding would call them equal: an integer has no tolerance."""
    from sympy import Float, Integer

    return isinstance(wanted, Integer) and isinstance(found, (Integer, Float)) and not (found - wanted).is_zero
