"""Fenced blocks of an answer, read line by line as CommonMark does, and more kindly where a model is careless.

A fence may be indented as deep as a list takes it, and a Python block may begin after text on the same line.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from textwrap import dedent

MAX_ENDS = 4
"""Possible ends of a block that are tried; each is parsed."""
_FENCE = re.compile(r"(?:(?<!`)(`{3,})(?!`)|(?<!~)(~{3,})(?!~))[ \t]*[{.]*([^\s`{},:]*)[^`]*$")
_CONTAINERS = re.compile(r"(?:[ \t>]|[-+*][ \t]|\d{1,9}[.)][ \t])*")
_QUOTE = re.compile(r"\A(?:[ \t]*>)+ ?")
_PYTHON = re.compile(r"(?:i?python|py)[\d.]*", re.IGNORECASE)


def python_block(answer: str) -> str | None:
    """Return the last Python block; without one the last block that names no language, if possible a program.

    An answer without any block may be a program itself.
    """
    blocks = [(language, code) for language, code in _blocks(answer) if code.strip()]
    if named := [code for language, code in blocks if _PYTHON.fullmatch(language)]:
        return named[-1]
    if not blocks:
        return answer if _is_program(answer) else None
    nameless = [code for language, code in blocks if not language]
    return next(filter(_is_program, reversed(nameless)), nameless[-1] if nameless else None)


def parsed(text: str) -> ast.Module | None:
    """Return the syntax tree of Python; None for any other text."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _is_program(text: str) -> bool:
    """Return whether a text is Python that does something; an output such as ``[1, 2]`` does not."""
    tree = parsed(dedent(text))
    return tree is not None and any(
        not isinstance(each, ast.Expr) or isinstance(each.value, ast.Call) for each in tree.body
    )


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield the language and the content of each block."""
    lines, at = re.sub(r"\r\n?", "\n", text).removesuffix("\n").split("\n"), 0
    while at < len(lines):
        begin = _FENCE.search(lines[at])
        at += 1
        if begin is None:
            continue
        before, fence, language = begin.string[: begin.start()], begin[1] or begin[2], begin[3]
        is_python = bool(_PYTHON.fullmatch(language))
        if _CONTAINERS.fullmatch(before) or is_python:
            code, at = _content(lines, at, before, fence, is_python)
            yield language, code


def _content(lines: Sequence[str], at: int, before: str, fence: str, is_python: bool) -> tuple[str, int]:
    """Return the content of the block whose first line is ``at``, and the line after its end.

    Python ends at the first fence before which it can be parsed, because earlier ones are in its strings; if there is
    none, at a fence within a line.
    """
    contained = _CONTAINERS.fullmatch(before) is not None
    indent = len(_QUOTE.sub("", before).expandtabs(4)) if contained else 0

    def line(number: int) -> str:
        return _QUOTE.sub("", lines[number]) if contained and ">" in before else lines[number]

    closing = re.compile(rf"[ \t]{{0,{indent + 3}}}{fence[0]}{{{len(fence)},}}[ \t]*")
    closes = (number for number in range(at, len(lines)) if closing.fullmatch(line(number)))
    ends = list(islice(closes, MAX_ENDS if is_python else 1)) or [len(lines)]
    first = next((line(number) for number in range(at, ends[0]) if line(number).strip()), "").expandtabs(4)
    indent = min(indent, len(first) - len(first.lstrip()))

    def content(end: int, last: str = "") -> str:
        return "".join(f"{_cut(each, indent)}\n" for each in (*map(line, range(at, end)), *filter(None, [last])))

    within = ((number, line(number).partition(fence)[0]) for number in range(at, ends[0]) if fence in line(number))
    for end, last in chain(((end, "") for end in ends), islice(within, MAX_ENDS)) if is_python else ():
        if parsed(dedent(code := content(end, last))) is not None:
            return code, end + 1
    return content(ends[0]), ends[0] + 1


def _cut(line: str, columns: int) -> str:
    """Remove so many columns of space at most; of a tab that is wider, the rest stays as spaces."""
    at = width = 0
    while width < columns and line[at : at + 1] in (" ", "\t"):
        width += 1 if line[at] == " " else 4 - width % 4
        at += 1
    return " " * (width - columns) + line[at:]
