"""Python commands that need not import torch and megatron-core again: they run in forks of a process that has.

Starting Python, torch, megatron and what a first run imports takes six CPU seconds; a fork takes none.

    tests ── socket ──► template of rank 0 (imports, waits) ── fork ──► -m tests.support.runs ...
                    └─► template of rank 1                  ── fork ──► -m tests.support.runs ...

The workers of pytest, and a pytest that a test starts in a fork, share the templates of their session. Neighbouring
ranks have different templates, so that their hashes differ as in a real job. What a real start is for (torchrun,
signals, what a command imports) is tested with real ones.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import hashlib
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import psutil
import yaml

from tools.planted_faults import switch_context

REPOSITORY = Path(__file__).parents[2]
_PRELOADED = (
    "megatron_rl.main", "megatron_rl.loop", "megatron_rl.supervised", "megatron_rl.evaluation",
    "megatron_rl.rollout.harnesses",
    "megatron.core.dist_checkpointing.strategies.torch", "torch._dynamo", "torch.utils.tensorboard",
    "transformers.models.auto.tokenization_auto", "transformers.tokenization_utils_fast", "pytest",
)  # fmt: skip


class Fork:
    """What tests need of `subprocess.Popen`, for ``python`` with ``argv`` and nothing to read."""

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        stdout: IO[bytes],
        stderr: IO[bytes],
        rank: int = 0,
        cwd: Path = REPOSITORY,
        largest_file: int | None = None,
        imported_under: Mapping[str, str] | None = None,
    ) -> None:
        """``argv`` is ``-m module ...``, ``-c code ...`` or ``script ...``.

        ``largest_file``: bytes that a file can have, as of ``ulimit -f``; what is written beyond fails.
        ``imported_under``: variables that torch or megatron-core must see when they are imported.
        """
        self._template = _template(0, *imported_under.items()) if imported_under else _template(rank % 2)
        job = {"argv": list(argv), "env": dict(env), "cwd": str(cwd), "largest_file": largest_file}
        self.pid = self._template.ask(job, [stdout.fileno(), stderr.fileno()])
        self._handle = os.pidfd_open(self.pid)
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; of a signal, negative."""
        if self.returncode is None:
            if not select.select([self._handle], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout)
            os.close(self._handle)
            self.returncode = self._template.ask({"ended": self.pid})
        return self.returncode

    def poll(self) -> int | None:
        """The exit code, or None as long as it runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """SIGKILL, unless its end is known."""
        if self.returncode is None:
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)


def run_python(
    *argv: object, env: Mapping[str, str] | None = None, cwd: Path = REPOSITORY, timeout: float = 600.0,
    imported_under: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """``python argv...`` from the repository's root, with what it wrote.

    Raises:
        subprocess.TimeoutExpired: it was killed after ``timeout`` seconds.
    """
    words = [str(word) for word in argv]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        fork = Fork(words, os.environ if env is None else env, out, err, cwd=cwd, imported_under=imported_under)
        try:
            code = fork.wait(timeout)
        finally:
            fork.kill()
        written = []
        for stream in (out, err):
            stream.seek(0)
            written.append(stream.read().decode(errors="replace"))
        return subprocess.CompletedProcess(words, code, *written)


class _Template:
    """A connection to the process that forks, which all processes of a test session share; the first one starts it."""

    def __init__(self, rank: int, variables: Mapping[str, str]) -> None:
        session = os.environ.setdefault("TESTS_SESSION", str(os.getpid()))
        digest = hashlib.sha256(repr((os.getuid(), rank, sorted(variables.items()))).encode()).hexdigest()
        address = f"\0tests {session} {digest[:32]}"  # in no folder: it goes with the process
        self._socket = socket.socket(socket.AF_UNIX)
        while True:
            _start(address, session, variables)
            with contextlib.suppress(ConnectionRefusedError):  # not listening yet
                self._socket.connect(address)
                break
        self._answers = self._socket.makefile("rb")

    def ask(self, question: Mapping[str, Any], files: Sequence[int] = ()) -> int:
        """Send a line, with open files beside it; the number that comes back."""
        line = json.dumps(question).encode() + b"\n"
        sent = socket.send_fds(self._socket, [line], files)
        self._socket.sendall(line[sent:])
        return int(self._answers.readline())


def _start(address: str, session: str, variables: Mapping[str, str]) -> None:
    """Start a template unless there is one."""
    with socket.socket(socket.AF_UNIX) as listener, contextlib.suppress(OSError):
        listener.bind(address)
        listener.listen()
        command = [sys.executable, "-m", "tests.support.forks", str(listener.fileno()), session]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {"OMP_NUM_THREADS": "1", **variables}
        subprocess.Popen(command, cwd=REPOSITORY, env=environment, pass_fds=[listener.fileno()])


@functools.cache
def _template(rank: int, *variables: tuple[str, str]) -> _Template:
    return _Template(rank, dict(variables))


def _serve(listener: socket.socket, session: int) -> dict[str, Any] | None:
    """Answers until the test session has ended: None; in a fork, what it is to do."""
    clients: list[socket.socket] = []
    while clients or psutil.pid_exists(session):
        for ready in select.select([listener, *clients], [], [], 1)[0]:
            if ready is listener:
                clients.append(listener.accept()[0])
            elif (question := _received(ready)) is None:
                clients.remove(ready)
                ready.close()
            elif "ended" in question:
                ready.sendall(b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(question["ended"], 0)[1]))
            elif (pid := os.fork()) == 0:
                for each in (listener, *clients):
                    each.close()
                return question
            else:
                for descriptor in question["files"]:
                    os.close(descriptor)
                ready.sendall(b"%d\n" % pid)
    return None


def _received(client: socket.socket) -> dict[str, Any] | None:
    """A whole question with its open files, None from who is gone."""
    text, files = b"", []
    while not text.endswith(b"\n"):
        part, more, _, _ = socket.recv_fds(client, 2**16, 2)
        if not part:
            return None
        text, files = text + part, files + more
    return json.loads(text) | {"files": files}


def _become(job: Mapping[str, Any]) -> None:
    """Do what ``python`` with these arguments does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(job["env"])
    os.chdir(job["cwd"])
    if "PLANTED_FAULTS_TEST" in job["env"]:
        switch_context()
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    for descriptor, stream in zip(job["files"], (1, 2), strict=True):
        os.dup2(descriptor, stream)
        os.close(descriptor)
    if job["largest_file"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["largest_file"], job["largest_file"]))
    kind, *rest = job["argv"]
    first = {"-m": job["cwd"], "-c": ""}.get(kind, str(Path(job["cwd"], kind).resolve().parent))
    sys.path[:1] = [first, *filter(None, job["env"].get("PYTHONPATH", "").split(os.pathsep))]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]  # found by the template's path
    if kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.modules["__main__"] = module = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), module.__dict__)
    else:
        sys.argv = job["argv"]
        runpy.run_path(kind, run_name="__main__")


def _exit_code(job: Mapping[str, Any]) -> int:
    try:
        _become(job)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:  # noqa: BLE001 - what the interpreter does
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _main() -> None:
    listener, session = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for pytest, whose end it waits for
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for name in _PRELOADED:
        importlib.import_module(name)
    # Every run reads what flags there are, and writes and reads its configuration: 0.3 CPU seconds in pure Python.
    importlib.import_module("megatron_rl.config.rl_config").all_flags()
    yaml.SafeLoader, yaml.SafeDumper = yaml.CSafeLoader, yaml.CSafeDumper
    gc.freeze()
    job = _serve(listener, session)
    if job is not None:
        code = _exit_code(job)
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # taking all that was imported apart takes half a second


if __name__ == "__main__":
    _main()
