"""Python commands that need not import torch and megatron-core again: they run in forks of a process that has.

Starting Python, torch, megatron and what a first run imports takes six CPU seconds; a fork takes none.

    tests ── socket ──► template of rank 0 (imports, waits) ── fork ──► -m tests.support.runs ...
                    └─► template of rank 1                  ── fork ──► -m tests.support.runs ...

The environment servers of `run_many`, and their graders, are forks too, of a template of their own.

Neighbouring ranks have different templates, so that their hashes differ as in a real job. What a real start
is for (torchrun, signals, what a command imports) is tested with real ones.
"""

from __future__ import annotations

import atexit
import faulthandler
import fcntl
import functools
import gc
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
from typing import IO, Any, NoReturn

import yaml

REPOSITORY = Path(__file__).parents[2]
_MOST_FILES = 16
_OUT_OF_THE_WAY = 512
"""A descriptor that no process here comes to by itself."""
_PRELOADED = (
    "megatron_rl.main", "megatron_rl.loop", "megatron_rl.supervised", "megatron_rl.evaluation",
    "megatron.core.dist_checkpointing.strategies.torch", "torch._dynamo", "torch.utils.tensorboard",
    "transformers.models.auto.tokenization_auto", "transformers.tokenization_utils_fast",
)  # fmt: skip
_SERVER = "megatron_rl.environments"
_SERVERS = ("megatron_rl.environments.server", "megatron_rl.environments.worker", "megatron_rl.environments.loading")


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
        template: _Template | None = None,
        pass_fds: Sequence[int] = (),
        parent: int | None = None,
    ) -> None:
        """``argv`` is ``-m module ...``, ``-c code ...`` or ``script ...``.

        ``largest_file``: bytes that a file can have, as of ``ulimit -f``; what is written beyond fails.
        ``imported_under``: variables that torch or megatron-core must see when they are imported.
        ``template``: of this process, and not that of the rank. ``pass_fds``: as of `subprocess.Popen`.
        ``parent``: whose child, in a session of its own, it takes itself for; that one's connection ends it.
        """
        if template is None:
            variables = tuple((imported_under or {}).items())
            template = _template(0 if variables else rank % 2, _PRELOADED, *variables)
        self._template = template
        job = {"argv": list(argv), "env": dict(env), "cwd": str(cwd), "largest_file": largest_file}
        job |= {"parent": parent, "files": [1, 2, *pass_fds]}
        self.pid = self._template.ask(job, [stdout.fileno(), stderr.fileno(), *pass_fds])
        self._handle = os.pidfd_open(self.pid)
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; of a signal, negative."""
        if self.returncode is None:
            if not select.select([self._handle], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout)
            self.returncode = self._template.ask({"ended": self.pid})
            os.close(self._handle)
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


def environment_forks(largest_file: int | None = None) -> tuple[socket.socket, Fork]:
    """Where a run asks for its environment servers: by this connection they are forked off the process beside it.

    That process has what an environment server imports and nothing else, so a fork is as small as the real one.
    ``largest_file``: see `Fork`.
    """
    own, others = socket.socketpair()
    with others, open(os.devnull, "wb") as nowhere:
        serving = ["-m", "tests.support.forks", str(others.fileno())]
        template, given = _template(0, _SERVERS), [others.fileno()]
        return own, Fork(
            serving, os.environ, nowhere, nowhere, template=template, pass_fds=given, largest_file=largest_file
        )


def fork_environment_servers(connection: socket.socket) -> None:
    """From now on this process's environment servers, and what looks at authors' modules, come by ``connection``.

    Each start of a real one takes a third of a CPU second, twice that with its graders, and the run waits for it.
    """
    from megatron_rl.environments import child, process

    template = _Template(connection)

    def start(
        command: Sequence[str], *, env: Mapping[str, str], stdout: Any, stderr: int | None = None,
        pass_fds: Sequence[int] = (), **_: Any,
    ) -> Fork:  # fmt: skip
        with open(os.devnull, "wb") as nowhere:
            out = nowhere if stdout == subprocess.DEVNULL else stdout
            err = out if stderr == subprocess.STDOUT else sys.__stderr__
            return Fork(
                command[1:], env, out, err, cwd=Path.cwd(), template=template, pass_fds=pass_fds, parent=os.getpid()
            )

    child.subprocess = process.subprocess = types.SimpleNamespace(
        Popen=start, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT, TimeoutExpired=subprocess.TimeoutExpired
    )


class _Template:
    """A process that forks; it ends with this one."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._answers = connection.makefile("rb")
        self._one_at_a_time = threading.Lock()

    def ask(self, question: Mapping[str, Any], files: Sequence[int] = ()) -> int:
        """Send a line, with open files beside it; the number that comes back."""
        line = json.dumps(question).encode() + b"\n"
        with self._one_at_a_time:
            sent = socket.send_fds(self._socket, [line], files)
            self._socket.sendall(line[sent:])
            return int(self._answers.readline())


@functools.cache
def _template(rank: int, imported: Sequence[str], *variables: tuple[str, str]) -> _Template:
    """Of rank ``rank``, and the others that are like it."""
    own, others = socket.socketpair()
    command = [sys.executable, "-m", "tests.support.forks", str(others.fileno()), *imported]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1", **dict(variables)}
    with others:
        subprocess.Popen(command, cwd=REPOSITORY, env=environment, pass_fds=[others.fileno()])
    return _Template(own)


def _serve(connection: socket.socket) -> dict[str, Any] | None:
    """Answers until the other side is closed: None; in a fork, what it is to do."""
    received = b""
    while True:
        part, files, _, _ = socket.recv_fds(connection, 2**16, _MOST_FILES)
        if not part:
            return None
        received += part
        if files:
            descriptors = files
        if not received.endswith(b"\n"):
            continue
        question, received = json.loads(received), b""
        if "ended" in question:
            answer = os.waitstatus_to_exitcode(os.waitpid(question["ended"], 0)[1])
        else:
            answer = os.fork()
            if answer == 0:
                connection.close()
                return question | {"files": list(zip(descriptors, question["files"], strict=True))}
            for descriptor in descriptors:
                os.close(descriptor)
        connection.sendall(b"%d\n" % answer)


def _become(job: Mapping[str, Any]) -> None:
    """Do what ``python`` with these arguments does."""
    if job["parent"] is not None:
        os.setsid()
        _take_for_parent(job["parent"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(job["env"])
    os.chdir(job["cwd"])
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    _place(job["files"])
    if job["largest_file"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["largest_file"], job["largest_file"]))
    kind, *rest = job["argv"]
    first = {"-m": job["cwd"], "-c": ""}.get(kind, str(Path(job["cwd"], kind).resolve().parent))
    sys.path[:1] = [first, *filter(None, job["env"].get("PYTHONPATH", "").split(os.pathsep))]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]  # found by the template's path
    if job["parent"] is not None and rest[0] == _SERVER:
        _fork_from_here()
    if kind == "-m":
        if not hasattr(sys.modules.get(rest[0]), "__path__"):
            sys.modules.pop(rest[0], None)  # imported before: it would be told so
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.modules["__main__"] = module = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), module.__dict__)
    else:
        sys.argv = job["argv"]
        runpy.run_path(kind, run_name="__main__")


def _take_for_parent(parent: int) -> None:
    """What a process asks to see whether ``parent`` is there still; its own children have itself."""
    own, ask = os.getpid(), os.getppid
    os.getppid = lambda: parent if os.getpid() == own else ask()


def _fork_from_here() -> None:
    """What an environment server starts is forked off the process that it is now."""
    own, others = socket.socketpair()
    if os.fork() == 0:
        own.close()
        _fork_and_exit(others)
    others.close()
    fork_environment_servers(own)


def _place(files: Sequence[tuple[int, int]]) -> None:
    """Give open files their numbers, of which one may be another's until then."""
    moved = [(fcntl.fcntl(descriptor, fcntl.F_DUPFD, _OUT_OF_THE_WAY), number) for descriptor, number in files]
    for descriptor, _ in files:
        os.close(descriptor)
    for descriptor, number in moved:
        os.dup2(descriptor, number)
        os.close(descriptor)


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
    connection = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for pytest, which then closes the socket
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for name in sys.argv[2:]:
        importlib.import_module(name)
    # Every run writes and reads its configuration: 0.2 CPU seconds in pure Python.
    yaml.SafeLoader, yaml.SafeDumper = yaml.CSafeLoader, yaml.CSafeDumper
    gc.freeze()
    _fork_and_exit(connection)


def _fork_and_exit(connection: socket.socket) -> NoReturn:
    """Here until nobody asks any more, and in a fork with what it has done: taking all imports apart takes a while."""
    job = _serve(connection)
    if job is None:
        os._exit(0)
    code = _exit_code(job)
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _main()
