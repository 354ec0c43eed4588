"""Reading JSON that somebody else wrote."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """As ``json.loads``; ``ValueError`` also for what is nested too deeply, where that has a RecursionError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
