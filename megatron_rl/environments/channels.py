"""Connections of the environment server, where waitress alone leaves clients without an answer."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

from waitress.adjustments import Adjustments
from waitress.channel import HTTPChannel
from waitress.parser import HTTPRequestParser
from waitress.utilities import RequestEntityTooLarge

MAX_CONNECTIONS = 900
"""waitress's 100 are less than the ranks of a large node send at once; more than 1024 files few processes may open."""


class Channel(HTTPChannel):
    """A connection that takes the place of an idle one, and reads what it refuses.

    waitress accepts nobody while there are too many connections, and waits two minutes before it closes an idle one:
    a thousand of them, which need no token, keep the health route from answering. And it closes a connection over the
    unread rest of a body that is too large, which resets it: the client loses the answer 413.
    """

    def __init__(self, server: Any, *arguments: Any, **options: Any) -> None:
        self._parser: HTTPRequestParser | None = None
        if len(server.active_channels) >= MAX_CONNECTIONS:
            idle = [channel for channel in server.active_channels.values() if not channel.requests]
            if idle:
                min(idle, key=lambda channel: channel.last_activity).will_close = True
        super().__init__(server, *arguments, **options)

    def parser_class(self, adjustments: Adjustments) -> HTTPRequestParser:
        """The parser of the next request, or of what came in one piece with the header of a refused one."""
        parser = HTTPRequestParser(adjustments)
        if not self._refused:
            self._parser = parser
        return parser

    @property
    def _refused(self) -> bool:
        """Whether what comes is the rest of a body that is too large."""
        return self._parser is not None and isinstance(self._parser.error, RequestEntityTooLarge)

    def readable(self) -> bool:
        return (self._refused and not self.will_close) or super().readable()

    def received(self, data: bytes) -> bool:
        return not self._refused and super().received(data)

    def handle_write(self) -> None:
        if not (self._refused and self.close_when_flushed):
            super().handle_write()
            return
        self._flush_exception(self._flush_some)
        if not self.total_outbufs_len:
            self.close_when_flushed = False  # the client closes, when it has sent all and read the answer
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_WR)
