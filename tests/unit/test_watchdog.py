"""What a watchdog says of a thread that waits, and of one that goes on."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from megatron_rl.errors import ConfigError
from megatron_rl.watchdog import Watchdog


class Waiting:
    """A thread that waits until it is let go on, and then waits in the same place again."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        self.turns = 0
        self.thread = threading.Thread(target=lambda: ConfigError(self), daemon=True)
        self.thread.start()
        self._settle()

    def go_on(self) -> None:
        os.write(self._write, b"x")
        self.turns += 1
        self._settle()

    def end(self) -> None:
        os.close(self._write)
        self.thread.join()
        os.close(self._read)

    def __iter__(self) -> Iterator[str]:
        """What the error makes a tuple of: so one of the library's own functions waits."""
        while os.read(self._read, 1):
            pass
        return iter(())

    def _settle(self) -> None:
        """Until it waits."""
        before = None
        while (now := self._instruction()) != before:
            before = now
            time.sleep(0.02)

    def _instruction(self) -> tuple[int, int] | None:
        frame = sys._current_frames().get(self.thread.ident)
        return None if frame is None else (frame.f_lineno, frame.f_lasti)


@pytest.fixture
def waiting() -> Iterator[Waiting]:
    thread = Waiting()
    yield thread
    thread.end()


def test_a_thread_that_waits_is_named_at_half_the_limit_and_ended_at_the_limit(waiting: Waiting, caplog) -> None:
    ended: list[str] = []
    dog = Watchdog(10.0, lambda: 0, ended.append, waiting.thread.ident)
    for _ in range(5):  # the first look only learns the place
        dog.look(1.0)
    assert caplog.text == ""
    for _ in range(5):
        dog.look(1.0)
    assert caplog.text.count("no progress for 5 s in __iter__ < __init__ (errors.py:") == 1
    assert ended == []
    dog.look(1.0)
    (told,) = ended
    assert told.startswith("no progress for 10 s in __iter__ < __init__ (errors.py:")
    assert "ending the job" in caplog.text
    assert "while os.read(self._read, 1):" in caplog.text  # the stack


def test_a_thread_that_goes_on_is_left_alone(waiting: Waiting) -> None:
    """Also if it is in the same place at every look: then it has to say so itself."""
    ended: list[str] = []
    dog = Watchdog(10.0, lambda: waiting.turns, ended.append, waiting.thread.ident)
    for _ in range(5):
        for _ in range(9):
            dog.look(1.0)
        waiting.go_on()
    assert ended == []
    for _ in range(11):
        dog.look(1.0)
    assert len(ended) == 1


def test_another_place_is_progress() -> None:
    ended: list[str] = []
    dog = Watchdog(2.0, lambda: 0, ended.append)

    def here() -> None:
        dog.look(1.0)

    for _ in range(9):
        here()
        dog.look(1.0)
    assert ended == []


def test_the_thread_of_the_watchdog_ends_with_the_body() -> None:
    before = threading.active_count()
    with Watchdog(60.0, lambda: 0, lambda told: None).watching():
        assert threading.active_count() == before + 1
    assert threading.active_count() == before
