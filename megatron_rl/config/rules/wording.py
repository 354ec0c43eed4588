"""Phrases that several rules share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from megatron_rl.config.rl_config import RLConfig

Rule = Callable[[RLConfig], Iterator[str]]
"""Resolved configuration -> one line for each way in which it breaks the rule."""
WorldRule = Callable[[RLConfig, int], Iterator[str]]
"""The same for rules that also depend on the number of ranks."""


def nearest_multiples(value: int, divisor: int) -> str:
    """``(4100, 8)`` -> ``4096 or 4104``; below the divisor only the divisor itself."""
    below = value // divisor * divisor
    return f"{below} or {below + divisor}" if below else f"{divisor}"


def divisors(value: int) -> str:
    """``10`` -> ``1, 2, 5 or 10``."""
    *head, last = map(str, _divisors(value))
    return f"{', '.join(head)} or {last}" if head else last


def nearest_divisors(value: int, wanted: int) -> str:
    """``(32, 12)`` -> ``8 or 16``; above ``value`` only ``value`` itself."""
    found = _divisors(value)
    below = max(n for n in found if n <= wanted)
    above = [n for n in found if n > wanted]
    return f"{below} or {above[0]}" if above else f"{below}"


def _divisors(value: int) -> list[int]:
    """In order; in pairs, because a rollout may have millions of samples."""
    small = [n for n in range(1, math.isqrt(value) + 1) if value % n == 0]
    return sorted({*small, *(value // n for n in small)})


def named(config: RLConfig, name: str, value: object, source: str) -> str:
    """``--global-batch-size 36`` if the user gave it, else where it comes from as well."""
    text = f"--{name.replace('_', '-')} {value}"
    return text if name in config.typed else f"{text} (from {source})"
