"""megatron-core's GPTModel, built from the user's flags."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import megatron_rl.platform  # noqa: F401  (prepares megatron-core before it is imported)


@contextlib.contextmanager
def override(name: str, values: Mapping[Any, Any]) -> Iterator[None]:
    """Set attribute ``name`` of each key in ``values`` inside the context, and restore it afterwards."""
    before = {owner: getattr(owner, name, None) for owner in values}
    try:
        for owner, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for owner, value in before.items():
            setattr(owner, name, value)
