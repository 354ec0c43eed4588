"""Keeps groups with both right and wrong answers, regardless of length or format rewards.

Source: DAPO, dynamic sampling (arXiv 2503.14476, section 3.2): 0 < number of right ones < G. verl's metric ``acc``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron_rl.algorithms.filters import signal


@dataclass(frozen=True, kw_only=True)
class Filter(signal.Filter):
    """Passes groups whose verdicts are not all equal."""

    OF: ClassVar[str] = "verdicts"
