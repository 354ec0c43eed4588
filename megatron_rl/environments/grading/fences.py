"""Fenced blocks of an answer: CommonMark's, indented at will; a Python block may begin after text on its line."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from textwrap import dedent

MAX_ENDS = 4
"""Possible ends of a block that are tried; each is parsed."""
_FENCE = re.compile(r"(?<![`~])(`{3,}(?!`)|~{3,}(?!~))[ \t]*[{.]*([^\s`{},:]*)[^`]*$")
_CONTAINERS = re.compile(r"(?:[ \t>]|[-+*][ \t]|\d{1,9}[.)][ \t])*")
_PYTHON = re.compile(r"(?:i?python|py)[\d.]*", re.IGNORECASE)


def python_block(answer: str) -> str | None:
    """Return the last Python block; without one the last block that names no language, if possible a program.

    An answer without any block may be a program itself.
    """
    blocks = [(language, code) for language, code in _blocks(answer) if code.strip()[:3] not in ("", ">>>")]
    if not blocks:
        return answer if _is_program(answer) else None
    named = [code for language, code in blocks if _PYTHON.fullmatch(language)]
    nameless = [code for language, code in blocks if not language]
    return (named or list(filter(_is_program, nameless)) or nameless or [None])[-1]


def parsed(text: str) -> ast.Module | None:
    """Return the syntax tree of Python; None for any other text."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def imported_by(tree: ast.AST) -> set[str]:
    """Return the modules that a program, or a function of it, imports; ``.`` is the package that it is in."""
    nodes = list(ast.walk(tree))
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return imported | {node.module or "." for node in nodes if isinstance(node, ast.ImportFrom)}


def _is_program(text: str) -> bool:
    """Return whether a text is Python that does something; an output such as ``[1, 2]`` does not."""
    tree = parsed(dedent(text))
    does = (not isinstance(each, ast.Expr) or isinstance(each.value, ast.Call) for each in (tree.body if tree else ()))
    return any(does)


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield the language and the content of each block."""
    lines, at = re.sub(r"\r\n?", "\n", text).removesuffix("\n").split("\n"), 0
    while at < len(lines):
        begin = _FENCE.search(lines[at])
        at += 1
        if begin is not None and (_PYTHON.fullmatch(begin[2]) or _CONTAINERS.fullmatch(begin.string, 0, begin.start())):
            code, at = _content(lines, at, begin)
            yield begin[2], code


def _content(lines: Sequence[str], at: int, begin: re.Match[str]) -> tuple[str, int]:
    """Return the content of the block after the fence ``begin``, whose first line is ``at``, and the line after it.

    Python ends at the first fence before which it can be parsed, because earlier ones are in its strings; if there is
    none, at a fence within a line.
    """
    before, fence, is_python = begin.string[: begin.start()], begin[1], _PYTHON.fullmatch(begin[2])
    indent = len(before.expandtabs(4)) if _CONTAINERS.fullmatch(before) else 0
    bare = re.compile(r"\A(?:[ \t]*>)+ ?" if indent and ">" in before else r"(?!)")

    def content(end: int, last: str = "") -> str:
        code = "".join(f"{bare.sub('', line)}\n" for line in (*lines[at:end], *filter(None, [last])))
        return dedent(code) if indent else code

    closing = re.compile(rf"[ \t>]{{0,{indent + 3}}}{fence[0]}{{{len(fence)},}}[ \t]*")
    closes = (number for number in range(at, len(lines)) if closing.fullmatch(lines[number]))
    ends = list(islice(closes, MAX_ENDS if is_python else 1)) or [len(lines)]
    within = ((number, lines[number].partition(fence)[0]) for number in range(at, ends[0]) if fence in lines[number])
    for end in chain(((end,) for end in ends), islice(within, MAX_ENDS)) if is_python else ():
        if parsed(dedent(code := content(*end))):
            return code, end[0] + 1
    return content(ends[0]), ends[0] + 1
