"""What the judges of a node share, in files: places for requests at once, requests of the last minute, and verdicts.

Each sample is graded in a process of its own that may be killed: a place is a file lock, which the kernel gives back.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

MINUTE = 60.0
LOOK_AGAIN_SECONDS = 0.02
BUSY_SECONDS = 30.0
"""Longest wait for another process that writes to the database."""


class Busy(Exception):
    """No request may be sent before the deadline."""


class Verdicts:
    """A judge's answers by digest, in an SQLite file that outlives the run."""

    def __init__(self, path: Path) -> None:
        """``sqlite3.Error`` where the file is no database or cannot be written."""
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        with _database(path) as database:
            database.execute("CREATE TABLE IF NOT EXISTS verdicts (digest TEXT PRIMARY KEY, said TEXT NOT NULL)")

    def get(self, digest: str) -> str | None:
        """The answer that is kept, or None."""
        with _database(self._path) as database:
            row = database.execute("SELECT said FROM verdicts WHERE digest = ?", (digest,)).fetchone()
        return None if row is None else row[0]

    def put(self, digest: str, said: str) -> None:
        """Keeps the answer; of two at once the first."""
        with _database(self._path) as database:
            database.execute("INSERT OR IGNORE INTO verdicts VALUES (?, ?)", (digest, said))


class Limits:
    """At most so many requests at once and in any minute, over all processes that name the same ``path``."""

    def __init__(self, path: Path, at_once: int, per_minute: int) -> None:
        """0 is no limit. ``path`` is a directory, which is made, on a local disk: NFS has no locks to rely on."""
        self._path, self._at_once, self._per_minute = path, at_once, per_minute
        path.mkdir(parents=True, exist_ok=True)
        if per_minute:
            with _database(path / "requests") as database:
                database.execute("CREATE TABLE IF NOT EXISTS requests (at REAL NOT NULL)")

    @contextlib.contextmanager
    def place(self, ends: float) -> Iterator[None]:
        """One request: waits until it may be sent, and counts it. ``Busy`` after ``ends``, of ``time.monotonic()``."""
        with contextlib.ExitStack() as held:
            if self._at_once:
                held.callback(os.close, self._lock(ends))
            while self._per_minute and (wait := self._counted()) > 0:
                if time.monotonic() + wait >= ends:
                    raise Busy(f"requests_per_minute {self._per_minute} let none be sent")
                time.sleep(wait)
            yield

    def _lock(self, ends: float) -> int:
        """The descriptor of a place that is now ours."""
        while True:
            for number in range(self._at_once):
                place = os.open(self._path / f"place_{number}", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
                try:
                    fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return place
                except BlockingIOError:
                    os.close(place)
            if time.monotonic() >= ends:
                raise Busy(f"requests_at_once {self._at_once} left no place")
            time.sleep(LOOK_AGAIN_SECONDS)

    def _counted(self) -> float:
        """0 and the request is counted; else the seconds until the oldest of the last minute leaves it."""
        with _database(self._path / "requests") as database:
            database.execute("BEGIN IMMEDIATE")  # nobody else counts meanwhile
            now = time.time()  # of all processes
            database.execute("DELETE FROM requests WHERE at <= ?", (now - MINUTE,))
            count, oldest = database.execute("SELECT COUNT(*), MIN(at) FROM requests").fetchone()
            if count >= self._per_minute:
                return oldest + MINUTE - now
            database.execute("INSERT INTO requests VALUES (?)", (now,))
            return 0.0


@contextlib.contextmanager
def _database(path: Path) -> Iterator[sqlite3.Connection]:
    """Opened anew each time: a connection must not cross a fork."""
    with contextlib.closing(sqlite3.connect(path, timeout=BUSY_SECONDS)) as database, database:
        yield database
