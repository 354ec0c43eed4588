"""The load test of servers, against one that says what the test knows."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from argparse import Namespace

from tests.support.ranks import free_port
from tools.benchmark.serving import main, put_under_load, started

SERVER = '''
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200); self.end_headers()
        for text in ("", "one", "two"):
            self.say({"choices": [{"delta": {"content": text}}]})
        self.say({"choices": [], "usage": {"completion_tokens": 5}})
        self.wfile.write(b"data: [DONE]\\n\\n")

    def say(self, chunk):
        self.wfile.write(f"data: {json.dumps(chunk)}\\n\\n".encode()); self.wfile.flush()

    def log_message(self, *_):
        pass

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
'''


def command(tmp_path, port):
    (tmp_path / "server.py").write_text(SERVER)
    return f"{shlex.quote(sys.executable)} {shlex.quote(str(tmp_path / 'server.py'))} --port {port}"


def test_tokens_are_those_of_the_server_and_of_who_hangs_up_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = Namespace(requests=2, token_file=None, model="m", max_tokens=8)
    with started("fake", command(tmp_path, free_port()), "m") as server:
        load = asyncio.run(put_under_load(server, arguments, 3, 0))
        left = asyncio.run(put_under_load(server, arguments, 3, 1))
        assert server.cpu_seconds() > 0
    assert (load.finished, load.tokens, len(load.first)) == (6, 30, 6)
    assert (left.finished, left.tokens, len(left.first)) == (0, 6, 6)


def test_a_record_has_every_load_of_every_server(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = ["--server", f"fake={command(tmp_path, free_port())}", "--model", "m", "--json", "r.json"]
    main([*given, "--clients", "1", "4", "--requests", "1", "--rounds", "2", "--hang-up", "2"])
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert [row["clients"] for row in rows] == ["1", "4", "4, 1 in 2 hangs up"]
    assert all(len(row["rounds"]) == 2 for row in rows)
    assert all(figures["requests / s"] > 0 for row in rows for figures in row["rounds"])
