"""``megatron-rl new NAME``: an environment to start from."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.environments.__main__ import main as environments


def main(words: Sequence[str]) -> int:
    """Returns the exit code, see ``python -m megatron_rl.environments new``."""
    return environments(["new", *words])
