"""An OpenAI-compatible endpoint that says what it is told to: stands in for the model in a harness's self-test."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from megatron_rl.types import Message

MAX_CALLS = 200
"""Of a sample: a harness that asks an empty answer's model again and again would not end."""

Said = str | Message
"""A text, or an assistant message with ``tool_calls``."""
Script = Callable[[int], Said | None]
"""What the model says at a call, counted from 0; None: it has nothing more to say, and the call is refused."""


def script_of(turns: Sequence[Said]) -> Script:
    """The turns one after the other."""
    return lambda number: turns[number] if number < len(turns) else None


def always(said: Said) -> Script:
    """The same at every call, up to ``MAX_CALLS``."""
    return lambda number: said if number < MAX_CALLS else None


@contextlib.contextmanager
def scripted_model(script: Script) -> Iterator[str]:
    """The ``base_url`` of a model that follows ``script``, on a free port of loopback."""
    server = _Server(script)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, script: Script) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script, self.numbers = script, itertools.count()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        number = next(self.server.numbers)
        said = self.server.script(number)
        if said is None:
            message = f"the script ends after {number} turns, and the harness asks for another"
            self._answer({"error": {"message": message, "type": "invalid_request_error"}}, 400)
        elif self.path.endswith("/chat/completions"):
            self._chat(said, asked)
        else:
            text = said if isinstance(said, str) else str(said.get("content") or "")
            choice = {"index": 0, "text": text, "finish_reason": "stop", "logprobs": None}
            self._answer(_completion("text_completion", choice, asked))

    def do_GET(self) -> None:
        self._answer({"object": "list", "data": [{"id": "policy", "object": "model", "created": 0, "owned_by": ""}]})

    def log_message(self, *_: object) -> None:
        """Says nothing."""

    def _chat(self, said: Said, asked: Mapping[str, Any]) -> None:
        message = {"role": "assistant", **({"content": said} if isinstance(said, str) else said)}
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        if not asked.get("stream"):
            choice = {"index": 0, "message": {"content": None, **message}, "finish_reason": reason, "logprobs": None}
            self._answer(_completion("chat.completion", choice, asked))
            return
        calls = [{"index": index, **call} for index, call in enumerate(message.get("tool_calls") or ())]
        delta = message | ({"tool_calls": calls} if calls else {})
        chunks = [{"index": 0, "delta": delta, "finish_reason": None}]
        chunks.append({"index": 0, "delta": {}, "finish_reason": reason})
        lines = [json.dumps(_completion("chat.completion.chunk", chunk, asked)) for chunk in chunks]
        self._send("".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"]), "text/event-stream")

    def _answer(self, value: object, status: int = 200) -> None:
        self._send(json.dumps(value), "application/json", status)

    def _send(self, text: str, kind: str, status: int = 200) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _completion(kind: str, choice: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    about = {"id": "scripted-0", "object": kind, "created": 0, "model": asked.get("model", "policy")}
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    return about | {"choices": [choice]} | ({} if kind.endswith("chunk") else {"usage": usage})
