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
from itertools import product
from typing import Any

from megatron_rl.environments.grading.bounds import (
    FORMULA,
    GRADE_SECONDS,
    OutOfTime,
    processor_time,
    too_deep,
    too_large,
)
from megatron_rl.environments.grading.tex import normalised, readings
from megatron_rl.environments.grading.text import final_part, last_boxes, marked_line
from megatron_rl.environments.grading.values import same
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
    r"-?\\?[$\u20ac\u00a3]?\s?-?(?:\d{1,3}(?:[ ,]\d{3})+(?:\.\d+)?|\d+(?:[.,]\d+)?|\.\d+)\s?(?:\\?[$\u20ac\u00a3])?\.?"
)
_DECIMAL_COMMA = re.compile(r"-?\d+,(?!\d{3}$)\d+")
_MEMBER = re.compile(r"^\s*[a-zA-Z]\s*(?:\\in(?![a-z])|\u2208)")
_TEX_WORD = re.compile(
    r"\\(?:begin|end|text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s?\{[^{}]*\}|\\[a-zA-Z]+"
)
_WORD = re.compile(r"[^\W\d_]{2,}")
_FUNCTIONS = frozenset(
    ["sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp", "sqrt", "pi", "mod", "and", "or", "dx", "dy", "dt"]
)
_MATH = re.compile(r"(?<!\\)\$|\\\(|\\\[")
_AFTER_IDEOGRAPH = re.compile(r"(?<=[\u3040-\u9fff\uff00-\uffef])(?=[-\d\\])")
_POINT_NAME = re.compile(r"^\s*(?:[A-Z]|\\text\s?\{(?![^{}]*\bnot?\b)[a-zA-Z ]+\})\s*(?=(?:\\left)?\([^()]*,.*\)$)")
_LETTERS = re.compile(
    r"\\(?:text\w*|math\w+|mbox|operatorname)\s?\{[^{}]*\}|\\[a-zA-Z]+|(?<![a-zA-Z])(?!i[fnst])[a-zA-Z]{1,2}(?![a-zA-Z])"
)
_INDEX = re.compile(r"_\s?(?:i|\{[^{}]*i)|(?<![a-zA-Z])i\s?(?:=|\\in|<|\\le)")
_DECORATION = re.compile(r"(?<![\w)])([*`]{1,3})(?=[^\s*`])([^*`\n]{1,80})(?<=\S)\1(?![\w(])")
_NEGATED = re.compile(
    r"(?i)(?:\bnot|\bcannot|n't|\bnever|\binstead of|\brather than)\s(?:(?:be|equal|to|exactly|the|answer)\s){0,3}"
    r"\$?-?[\d.,]+\$?"
)
_SAID = re.compile(r"(?i)(?:\b(?:is|are|be|in|either|equals)\b\s?:?|[=:])(?!\s*[a-z]\()")

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
    gold = final_part(gold)
    if boxes := last_boxes(gold):
        gold = ", ".join(boxes)
    if _too_large(answer):
        return "unparsable"
    answer, right = normalised(answer), normalised(gold)
    wanted = [value for text in readings(right, answer) for value in read_answer(text, bool(boxes))]
    if not wanted:
        raise ValueError(f"the gold answer {gold[:100]!r} cannot be parsed")
    parsed = [value for text in readings(answer, right) for value in read_answer(text, boxed)]
    if not parsed:
        return "unparsable"
    large = any(map(too_large, parsed))
    if large or any(map(too_large, wanted)):  # equal as they stand, or not; nothing is computed
        pairs = [_aligned(*pair) for pair in product(wanted, parsed) if not isinstance(pair[1], str)]
        return "correct" if any(one == other for one, other in pairs) else "unparsable" if large else "wrong"
    searched = not boxed and _MATH.search(_without_delimiters(answer))
    pairs = [(one, other) for one, other in product(wanted, parsed) if searched or _holds(one, other)]
    return "correct" if any(_equal(*_aligned(*pair)) for pair in pairs) else "wrong"


def _answer(text: str) -> tuple[str, bool]:
    """The part of the text that is the answer, and whether it stood in a box.

    It is what the text marks as such, or all of a short text, or the end of a long one.
    """
    boxes = last_boxes(text)
    if boxes:
        return ", ".join(boxes), True
    if "####" in text:
        return text.rpartition("####")[2].strip().partition("\n")[0].strip(), False
    line = marked_line(text)
    return (text[-MAX_PROSE:].strip() if line is None else line), False


def read_answer(answer: str, boxed: bool) -> list[Any]:
    """Return math-verify's readings of an answer: expressions and their text, only the text, or nothing."""
    from math_verify import ExprExtractionConfig, parse

    if _too_large(answer):
        return []
    answer = (answer if boxed else _DECORATION.sub(r"\2", answer)).strip().lstrip("=+ ").rstrip(",;: ")
    bare = _without_delimiters(answer)
    if _NUMBER.fullmatch(bare):
        number = parse(bare.lstrip("\\").rstrip("."), [ExprExtractionConfig()], parsing_timeout=None)
        if not _DECIMAL_COMMA.fullmatch(bare):
            return number
        # "1,5" is a list in TeX; elsewhere it may as well be the number that half of the world writes so
        return _parsed_tex(bare) + ([] if boxed or bare[0] != answer[0] else number)
    spaced = _AFTER_IDEOGRAPH.sub(" ", answer)
    if not boxed and _is_prose(spaced):
        plain = _NEGATED.sub(" ", spaced)
        end = plain[-MAX_ANSWER // 2 :]
        for mark in _SAID.finditer(end):  # "it is 7 or 8", "the point is (3, 4)"
            said = end[mark.end() :]
            expected = end[: mark.start()].endswith("answer ") or (re.search(r"[\d\\]", said) and not _has_words(said))
            if expected and not _is_prose(said) and said.count(")") <= said.count("(") + said.count("["):
                return read_answer(said, False)
        short = FORMULA.sub(lambda found: _with_unit(found[0]) if len(found[0]) <= MAX_ANSWER else " ", plain)
        return parse(short, parsing_timeout=None)
    return _parsed_tex(answer)


def _parsed_tex(answer: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    tex = _POINT_NAME.sub("", _MEMBER.sub("", _without_delimiters(answer))).rstrip("\\").replace("**", "^")
    tex = re.sub(r"^\{([^{}]*,[^{}]*)\}$", r"\\{\1\\}", re.sub(r"(?<=\d)\s+(?=\d)", ", ", tex))
    tex = _with_unit(tex)
    # priority 0 and no other anchor: the box is read as a whole or not at all
    config = LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)
    return parse(f"\\boxed{{{tex}}}", [config], parsing_timeout=None)


def _with_unit(tex: str) -> str:
    """``2i`` and ``bi`` with the parser's name of the imaginary unit, ``I``; words and indices stay."""
    if _INDEX.search(tex):
        return tex
    return _LETTERS.sub(lambda part: part[0] if part[0][0] == "\\" else part[0].replace("i", "{I}"), tex)


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


def _aligned(wanted: Any, found: Any) -> tuple[Any, Any]:
    """What is compared: of an equation, unless the other one is one too, the last right side."""
    from math_verify.grader import is_assignment_relation, is_equation, take_last_relation

    if is_equation(found) and not is_equation(wanted):
        return wanted, take_last_relation(found).rhs
    if is_assignment_relation(wanted) and not is_equation(found):
        return take_last_relation(wanted).rhs, found
    return wanted, found


def _equal(wanted: Any, found: Any) -> bool:
    from math_verify import verify
    from sympy import Symbol

    verdict = same(wanted, found)
    word = isinstance(wanted, Symbol) or isinstance(found, Symbol)  # the other side may have it as a product of letters
    if verdict is not None and (verdict or not word):
        return verdict
    equal = verify([wanted], [found], timeout_seconds=None)
    if word or not equal:
        return equal
    members, others = _members(wanted), _members(found)
    return len(members) != len(others) or all(
        any(same(member, other) is not False for other in others) for member in members
    )


def _members(value: Any) -> list[Any]:
    """What a set, tuple, interval or matrix is made of, and the sides of an assignment."""
    from sympy import Eq, Expr, MatrixBase, Set, Tuple

    if isinstance(value, MatrixBase):
        return value.flat()
    if isinstance(value, (Set, Tuple)) or (isinstance(value, Eq) and value.lhs.is_Symbol):
        return [member for part in value.args for member in _members(part)]
    return [value] if isinstance(value, Expr) else []


def _holds(wanted: Any, found: Any) -> bool:
    """Return whether no numbers are called equal that are not: 8 = 7 is no answer where 7 is wanted."""
    from math_verify.grader import is_equation

    if isinstance(found, str) or not is_equation(found) or is_equation(wanted):
        return True
    sides = [side for equation in getattr(found, "_unsorted_args", [found]) for side in equation.args]
    numbers = [side for side in sides if not side.free_symbols]
    return all(same(numbers[-1], number) is not False for number in numbers)
