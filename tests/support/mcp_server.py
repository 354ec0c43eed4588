"""A tool server in plain Python that behaves, or does not: on standard input and output, or with --http on a port.

    python mcp_server.py [--http PORT_FILE] [MANNERS ...]

Manners of the whole server are words such as ``deaf``; of a call they are the tool's name.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

MANNERS = set(sys.argv[1:])
TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
NONE = {"type": "object", "properties": {}}
ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def send(message: object) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def text(words: str, **others: object) -> dict:
    return {"content": [{"type": "text", "text": words}], **others}


def hang() -> None:
    time.sleep(3600)


def write(line: str) -> None:
    sys.stdout.write(line)
    sys.stdout.flush()


def flood() -> None:
    while True:
        send({"jsonrpc": "2.0", "method": "notifications/message", "params": {"data": "x" * 10_000}})


def endless() -> None:
    while True:
        sys.stdout.write("x" * 10_000)


def die() -> None:
    sys.stderr.write("Segmentation fault, says somebody\n")
    sys.stderr.flush()
    os._exit(3)


def nonsense() -> None:
    write("{not JSON\n")
    hang()


def deep() -> None:
    write('{"jsonrpc": "2.0", "id": 9, "result": ' + "[" * 100_000 + "\n")
    hang()


def family() -> dict:
    """A process of its own group, which does not end with its parent's input."""
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(3600)"],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    return text(f"{os.getpid()} {child.pid}")


def asks() -> dict:
    """What the client says to the first of two requests, before the answer that it waits for."""
    send({"jsonrpc": "2.0", "id": "p", "method": "ping"})
    send({"jsonrpc": "2.0", "id": "r", "method": "roots/list"})
    send({"jsonrpc": "2.0", "id": True, "result": text("an answer to another")})
    return text(sys.stdin.readline())


CALLS = {
    "add": lambda a, b: text(str(a + b)),
    "say": lambda text: {"content": [{"type": "text", "text": text}]},
    "pid": lambda: text(str(os.getpid())),
    "variables": lambda: text(json.dumps(dict(os.environ))),
    "long": lambda: text("y" * 50_000),
    "fails": lambda: text("there is no such file", isError=True),
    "lies": lambda: {"content": "not a list"},
    "picture": lambda: {"content": [{"type": "image", "data": "AAAA", "mimeType": "image/png"}]},
    "structured": lambda: {"content": [], "structuredContent": {"sum": 3}},
    **{call.__name__: call for call in (hang, flood, endless, die, nonsense, deep, family, asks)},
}
SCHEMAS = {"add": ADD, "say": TEXT}
TOOLS = [{"name": name, "inputSchema": SCHEMAS.get(name, NONE)} for name in (*CALLS, "refuses")]
TOOLS[0] |= {"title": "Sum", "description": "Adds two numbers."}


def answered(message: dict) -> object | None:
    """The answer to a message; None to a notification."""
    method, number = message.get("method"), message.get("id")
    if number is None:
        return None
    if method == "initialize":
        if "deaf" in MANNERS:
            time.sleep(3600)
        result: object = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "t"}}
    elif method == "tools/list":
        first = "cursor" not in message["params"]
        result = {"tools": TOOLS[:2], "nextCursor": "2"} if first else {"tools": TOOLS[2:]}
        if "twins" in MANNERS:
            result = {"tools": [TOOLS[0], TOOLS[0]]}
        if "circle" in MANNERS:
            result = {"tools": [], "nextCursor": "2"}
        if "odd" in MANNERS:
            result = {"tools": [{"name": "no good name", "inputSchema": NONE}]}
    else:
        name = message["params"]["name"]
        if name == "refuses":
            return {"jsonrpc": "2.0", "id": number, "error": {"code": -32602, "message": "not with me"}}
        result = CALLS[name](**message["params"].get("arguments", {}))
    return {"jsonrpc": "2.0", "id": number, "result": result}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    begun: list[str] = []
    sessions: set[str] = set()

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        tool = message.get("params", {}).get("name") if message.get("method") == "tools/call" else ""
        begins = message.get("method") == "initialize"
        if tool == "forget":
            self.sessions.clear()
        if not begins and self.headers.get("Mcp-Session-Id", "") not in self.sessions:
            self._send(404, b"no such session", "text/plain")
        elif "id" not in message:
            self._send(202, b"", "text/plain")
        elif tool in HTTP_CALLS:
            HTTP_CALLS[tool](self, message["id"])
        else:
            named = {"Mcp-Session-Id": f"s{len(self.begun)}"} if begins else {}
            self.begun.extend(named.values())
            self.sessions.update(named.values())
            self._send(200, json.dumps(answered(message)).encode(), "application/json", named)

    def drip(self, _: int) -> None:
        """A byte now and then, for ever."""
        self._begin_stream()
        while True:
            self.wfile.write(b":")
            time.sleep(0.05)

    def flood(self, _: int) -> None:
        self._begin_stream()
        while True:
            self.wfile.write(b"data: " + b"x" * 10_000 + b"\n")

    def teapot(self, _: int) -> None:
        self._send(418, b"short and stout", "text/plain")

    def redirect(self, _: int) -> None:
        self._send(307, b"", "text/plain", {"Location": "http://192.0.2.1/"})

    def version(self, number: int) -> None:
        words = f"{self.headers.get('MCP-Protocol-Version')} in {self.headers.get('Mcp-Session-Id')}"
        answer = {"jsonrpc": "2.0", "id": number, "result": text(words)}
        self._send(200, json.dumps(answer).encode(), "application/json")

    def stream(self, number: int) -> None:
        answer = json.dumps({"jsonrpc": "2.0", "id": number, "result": text("in parts")}, indent=1)
        first = 'event: message\ndata: {"jsonrpc": "2.0", "method": "notifications/progress"}\n\n'
        lines = "".join(f"data: {line}\r\n" for line in answer.split("\n"))
        self._send(200, f"{first}{lines}\n".encode(), "text/event-stream")

    def do_DELETE(self) -> None:
        self.sessions.discard(self.headers.get("Mcp-Session-Id", ""))
        self._send(204, b"", "text/plain")

    def log_message(self, *_: object) -> None:
        """Says nothing."""

    def _begin_stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()

    def _send(self, status: int, body: bytes, kind: str, headers: dict | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


HTTP_CALLS = {
    name: getattr(Handler, name) for name in ("drip", "flood", "teapot", "redirect", "version", "stream")
}


def main() -> None:
    if "--http" in MANNERS:
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        TOOLS.extend({"name": name, "inputSchema": NONE} for name in HTTP_CALLS if name != "flood")
        address = Path(sys.argv[sys.argv.index("--http") + 1])
        address.with_suffix(".part").write_text(f"http://127.0.0.1:{server.server_port}/mcp")
        address.with_suffix(".part").rename(address)
        server.serve_forever()
    if "broken" in MANNERS:
        raise SystemExit("the key is not set")
    if "banner" in MANNERS:
        print("Welcome to the server of tools!", flush=True)
    if "noisy" in MANNERS:
        sys.stderr.write("log\n" * 100_000)
    for line in sys.stdin:
        answer = answered(json.loads(line))
        if answer is not None:
            send(answer)


if __name__ == "__main__":
    main()
