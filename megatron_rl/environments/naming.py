"""Help with misspelt names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from megatron_rl.errors import MAX_LINE, one_line, shorten

LONGEST_NAME = 100


def suggestion(name: object, known: Iterable[str]) -> str:
    """The tail of an error message about an unknown ``name``: the nearest known names, else all of them."""
    names = sorted(known)
    name = (name if isinstance(name, str) else shorten(name))[:LONGEST_NAME]
    lowered = {candidate.lower(): candidate for candidate in names}
    near = difflib.get_close_matches(name.lower(), list(lowered), n=3, cutoff=0.6)
    if near:
        return "; did you mean " + " or ".join(repr(lowered[match]) for match in near) + "?"
    return one_line("; known: " + ", ".join(names), MAX_LINE) if names else "; none exists"
