"""Where the answer stands in a completion: plain text work, linear in its length, shared by the graders."""

from __future__ import annotations

import re

TAIL = 20_000
"""Characters of a completion that are read: answers stand at the end, and a megabyte of text costs seconds."""
END_OF_THOUGHT = "</think>"
"""Ends the reasoning of a model that thinks before it answers."""
MAX_BOXES = 64
"""Boxes looked at, from the end: thousands that never close would take time quadratic in their number."""

_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}  # digits, letters and signs of East Asian text
_DASHES = dict.fromkeys(map(ord, "\u2212\u2010\u2011\u2012\u2013\ufe63"), "-")
_SPACES = dict.fromkeys(map(ord, "\u00a0\u2002\u2003\u2007\u2009\u200a\u202f\u3000"), " ")
_INVISIBLE = dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff"), None)
_SIGNS = _FULL_WIDTH | _DASHES | _SPACES | _INVISIBLE | {0x3002: "."}

_SPECIAL_TOKEN = re.compile(r"<\|\w{1,32}\|>")
_ANSWER_TAG = re.compile(r"(?i)<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_BOX = re.compile(r"\\(?:f?boxed|fbox)\s{0,4}")
_BLANK = (
    r"(?:[\s.?_\u2026\[\]<>]|\\(?:[lc]?dots|cdot)|\\[_,;:! ]|\\q?quad|\\square"
    r"|\b(?:the|your|my|final|correct|answer|result|solution|value|number|expression|here)\b){0,40}"
)
# a box that is named or shown, not filled in: "put it inside \boxed.", "\boxed{}", "\boxed{...}", "\boxed{your answer}"
_PLACEHOLDER = re.compile(
    rf"(?i)\\(?:f?boxed|fbox)(?:\s{{0,4}}\{{(?:{_BLANK}|\s?\\text\s?\{{{_BLANK}\}}\s?)\}}"
    r"|(?![a-z]|\s{0,4}(?:\{|[-+.]?\d|(?!a\b|i\b)[a-z]\b)))"
)
_BRACKET = re.compile(r"\\.|[{}]", re.DOTALL)
_BETWEEN_BOXES = re.compile(
    r"(?:[\s$,;.]|\\[()\[\]]|\\q?quad|\\[,;:! ]|and|or|&|\\text\{[^{}]{0,40}\b(?:and|or)\b[^{}]{0,40}\}){0,60}"
)
_CONNECTOR = re.compile(r"and|or|[,;&]")
_WORD = re.compile(r"[-+\w./]{1,40}")
_ANSWER_MARK = re.compile(r"(?i)\b(?:answer|r\u00e9ponse|respuesta|antwort)\**\s{0,4}:|(?:\u7b54\u6848|\u7b54)\s{0,4}:")


def plain_signs(text: str) -> str:
    """Return the text with ASCII for Unicode's minus signs, full-width characters and odd spaces."""
    return text.translate(_SIGNS)


def without_thought(text: str) -> str:
    """Return what follows the reasoning, without the spaces around it."""
    return text.rpartition(END_OF_THOUGHT)[2].strip()


def final_part(completion: str) -> str:
    """Return the end of the completion that can hold the answer: after the reasoning, inside the last answer tag.

    Boxes without an answer in them are left out.
    Reasoning that was opened and never closed holds no answer: the model was cut off while it thought.
    """
    text = _PLACEHOLDER.sub("", plain_signs(completion[-TAIL:]))
    _, closed, after = text.rpartition(END_OF_THOUGHT)
    if closed:
        text = after
    elif "<think>" in completion:
        return ""
    tagged = _ANSWER_TAG.findall(text)
    return _SPECIAL_TOKEN.sub("\n", tagged[-1] if tagged else text).strip()


def last_boxes(text: str) -> list[str]:
    """Return what the last ``\\boxed{}`` holds, and those before it that only "and" or a comma keeps apart."""
    boxes: list[tuple[int, str, int]] = []
    for mark in list(_BOX.finditer(text))[-MAX_BOXES:]:
        content, end = _box_content(text, mark.end())
        is_inside = bool(boxes) and mark.start() < boxes[-1][2]  # then it belongs to the outer box
        if content is not None and not is_inside:
            boxes.append((mark.start(), content.strip(), end))
    run: list[str] = []
    next_start = None
    for start, content, end in reversed(boxes):
        if next_start is not None and not _connects(text[end:next_start]):
            break
        if content not in run:
            run.insert(0, content)
        next_start = start
    return run


def _connects(between: str) -> bool:
    """Return whether two boxes with this between them are one answer: side by side, or with a comma or an "and"."""
    if len(between) >= 400 or not _BETWEEN_BOXES.fullmatch(between):
        return False
    return bool(_CONNECTOR.search(between)) or not ("\n" in between or "." in between)


def marked_line(text: str) -> str | None:
    """Return what follows the last ``Answer:`` on its line, or on the next one when the line ends there."""
    marks = list(_ANSWER_MARK.finditer(text))
    if not marks:
        return None
    return text[marks[-1].end() :].lstrip(" \t\r\n*").partition("\n")[0].strip().rstrip("*").strip()


def _box_content(text: str, start: int) -> tuple[str | None, int]:
    """The text in balanced braces at ``start`` (or the one word there) and where it ends."""
    if not text.startswith("{", start):
        word = _WORD.match(text, start)
        return (word[0], word.end()) if word else (None, start)
    depth = 0
    for bracket in _BRACKET.finditer(text, start, start + 4_000):  # a longer one is no answer; all would be quadratic
        depth += (bracket[0] == "{") - (bracket[0] == "}")
        if depth == 0:
            return text[start + 1 : bracket.start()], bracket.end()
    return None, start
