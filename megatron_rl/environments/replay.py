"""Answers a repeated request without doing its work again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class ReplayConflict(Exception):
    """A request id came back with another content."""


class ReplayCache:
    """Remembers the answers of the last ``capacity`` requests by their id.

    A client whose connection broke cannot know whether its request was served; it sends the same one again
    and gets the first answer. A repetition that arrives during the first waits for it.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._answers: OrderedDict[str, tuple[bytes, Future]] = OrderedDict()
        self._lock = threading.Lock()

    def answer(self, request_id: str, fingerprint: bytes, compute: Callable[[], Any]) -> Any:
        """``compute()``, or what it gave for an earlier request of this id and ``fingerprint``."""
        with self._lock:
            known = self._answers.get(request_id)
            if known is None:
                mine: Future = Future()
                self._answers[request_id] = (fingerprint, mine)
                while len(self._answers) > self._capacity:
                    self._answers.popitem(last=False)
        if known is not None:
            if known[0] != fingerprint:
                raise ReplayConflict(f"request_id {request_id!r} was used for another request")
            return known[1].result()
        try:
            mine.set_result(compute())
        except BaseException as error:
            with self._lock:
                self._answers.pop(request_id, None)
            mine.set_exception(error)
            raise
        return mine.result()
