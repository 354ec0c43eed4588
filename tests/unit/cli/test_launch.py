"""What the end of a rank is to whoever typed the command."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_rl.cli.launch import _exit_code


@pytest.mark.parametrize(
    ("exitcode", "stopped", "expected"),
    [(2, False, 2), (3, True, 3), (-9, False, 137), (-9, True, 137), (-15, False, 143), (-15, True, 0)],
    ids=["its own", "its own, asked to stop", "killed", "killed, asked to stop", "somebody's SIGTERM", "our SIGTERM"],
)
def test_the_exit_code(exitcode: int, stopped: bool, expected: int) -> None:
    """A rank that starts has no handler yet: our SIGTERM ends it, as was asked."""
    failed = SimpleNamespace(get_first_failure=lambda: (1, SimpleNamespace(exitcode=exitcode)))
    assert _exit_code(failed, stopped) == expected
