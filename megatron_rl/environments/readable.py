"""Waits until there is something to read."""

from __future__ import annotations

import select
from typing import Protocol


class _File(Protocol):
    def fileno(self) -> int: ...


def readable(*files: _File | int, seconds: float) -> list[_File | int]:
    """Those of ``files`` that can be read or have ended, after at most ``seconds``.

    Not ``select.select``: it takes no descriptor above 1023, and rank 0 of a large job holds a socket for every rank.
    """
    by_number = {file if isinstance(file, int) else file.fileno(): file for file in files}
    poll = select.poll()
    for number in by_number:
        poll.register(number, select.POLLIN)
    return [by_number[number] for number, _ in poll.poll(1000 * seconds)]
