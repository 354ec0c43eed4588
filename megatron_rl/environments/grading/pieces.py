"""Pieces that a reward can be put together from: format, length, and their sum with a grade."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from megatron_rl.types import Grade


def format_reward(text: str, tags: Sequence[str] = ("think", "answer")) -> float:
    """1 when ``text`` is exactly the blocks ``<tag>..</tag>`` in this order, each once and not empty, else 0."""
    rest = text.strip()
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if text.count(opening) != 1 or text.count(closing) != 1 or not rest.startswith(opening):
            return 0.0
        content, _, rest = rest.removeprefix(opening).partition(closing)
        rest = rest.lstrip()
        if not content.strip():
            return 0.0
    return 0.0 if rest else 1.0


def ends_with_answer_line(text: str) -> float:
    """1 when the last line that is not empty reads ``Answer: ...``, else 0."""
    lines = text.rstrip()[-2000:].splitlines()
    return float(bool(lines and re.match(r"(?i)\**answer\s{0,4}:\s{0,4}\S", lines[-1].strip())))


def overlong_penalty(num_tokens: int, max_tokens: int, buffer: int, factor: float = 1.0) -> float:
    """DAPO's soft overlong punishment (equation 13): 0 up to ``max_tokens - buffer``, then linear to ``-factor``.

    Worked example: 16384 and a buffer of 4096: 12288 tokens cost 0, 14336 half the factor, 16384 and more all of it.
    """
    if not 0 < buffer <= max_tokens:
        raise ValueError(f"the buffer is {buffer}; it must be from 1 to max_tokens, which is {max_tokens}")
    exceeded = num_tokens - (max_tokens - buffer)
    return 0.0 - min(max(exceeded / buffer, 0.0), 1.0) * factor


def combined(grade: Grade, **pieces: float) -> Grade:
    """``grade`` with the pieces added to its reward, each of them a metric under its own name."""
    metrics = {**grade.metrics, "answer_reward": float(grade.reward), **pieces}
    return replace(grade, reward=grade.reward + sum(pieces.values()), metrics=metrics)
