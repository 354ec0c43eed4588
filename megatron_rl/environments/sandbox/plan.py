"""The whole sandbox as data, which the launcher reads: each protection has one place and can be tested.

A program sees its Python and the libraries that it loads, nothing else of the machine: no ``/proc``, no ``/home``, no
``/etc``, no ``/bin``, and of installed packages only those asked for: those of environments hold gold answers.
"""

from __future__ import annotations

import functools
import importlib.util
import marshal
import os
import platform
import resource
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path, PurePosixPath

from megatron_rl.environments.sandbox import seccomp
from megatron_rl.errors import EnvironmentFault

MAX_LIMIT = 2**20
"""Of any field of `Limits`: a megabyte of megabytes, or twelve days."""
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
PACKAGES = "/packages"
"""Where the packages asked for lie."""
NAMESPACES = {
    "mount": 0x00020000,
    "host name": 0x04000000,
    "ipc": 0x08000000,
    "user": 0x10000000,
    "process": 0x20000000,
    "network": 0x40000000,
}
"""``CLONE_NEW*`` of linux/sched.h."""
OLDEST_KERNEL = (5, 14)
"""Before it RLIMIT_NPROC counted all processes of a user, wherever they ran, and 5.12 brought ``mount_setattr``."""
PROGRAM = "main.py"
MAX_NAME, MAX_PATH = 255, 4000
"""Bytes of a name and of a path that the kernel takes."""
ENVIRONMENT = {
    "HOME": "/work",
    "TMPDIR": "/work",
    "LANG": "C.UTF-8",
    "MALLOC_ARENA_MAX": "1",  # each further one takes 64 MiB of address space
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONPATH": PACKAGES,
}
"""All of the program's variables."""


class SandboxUnavailable(EnvironmentFault):
    """This machine, or this process, cannot enforce the limits: nothing was run."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"code cannot be run safely here: {reason}")


@dataclass(frozen=True)
class Limits:
    """The most that one program may use.

    Memory in all is ``processes * memory_mb + disk_mb``: the kernel bounds the address space of each process, and
    the files lie in memory. With one process, the default, a program can start threads and no process at all.
    """

    memory_mb: int = 512
    """Address space of a process in MiB, its threads' stacks included."""
    cpu_s: int = 10
    """Processor time of a process in seconds, summed over its threads."""
    wall_s: float = 20.0
    """Seconds from the program's start to its end."""
    disk_mb: int = 32
    """Everything in its directory, in MiB."""
    file_mb: int = 16
    """One file, in MiB."""
    files: int = 256
    """Files and directories at one time."""
    open_files: int = 64
    """Files that a process may have open."""
    processes: int = 1
    """Processes at one time."""
    threads: int = 32
    """Threads at one time, those of all processes together."""
    output_kb: int = 64
    """Standard output, and standard error, in KiB each."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, whole = getattr(self, field.name), field.type == "int"
            fits = type(value) is int or (type(value) is float and not whole)
            if not fits or not 0 < value <= MAX_LIMIT:
                kind = "a whole number" if whole else "a number"
                raise ValueError(f"{field.name} is {value!r:.40}; it must be {kind} above 0 and up to {MAX_LIMIT:,}")
        if self.memory_mb < 64:
            raise ValueError(f"memory_mb is {self.memory_mb}; Python itself needs 64")
        if self.open_files < 8:
            raise ValueError(f"open_files is {self.open_files}; Python itself needs 8")


@dataclass(frozen=True)
class Plan:
    parent: int
    """The process whose end ends all."""
    namespaces: int
    shown: Sequence[tuple[str, str]]
    """Paths outside and inside, read-only."""
    devices: Sequence[tuple[str, str]]
    links: Sequence[tuple[str, str]]
    hidden: Sequence[str]
    """Directories in what is shown that are to be empty."""
    home: str
    """Options of the file system that the program may write to."""
    files: Mapping[str, bytes]
    """Names in it, and contents."""
    limits: Mapping[str, tuple[int, int]]
    """``RLIMIT_*``: soft and hard."""
    filter: bytes
    """The kernel calls allowed (``seccomp.py``)."""
    command: Sequence[str]
    environment: Mapping[str, str]

    def encoded(self) -> bytes:
        """Encode it for the launcher, which has the same Python: length in 8 bytes, and then ``marshal``."""
        data = marshal.dumps(asdict(self))
        return len(data).to_bytes(8, "little") + data


def plan_for(
    code: str, limits: Limits, files: Mapping[str, str | bytes] | None = None, packages: Sequence[str] = ()
) -> Plan:
    """Return the sandbox for a program.

    Raises:
        SandboxUnavailable: the kernel or processor is not known to enforce it.
        ValueError: a name in ``files`` or ``packages`` that cannot be, or more than ``limits`` have room for.
    """
    machine = platform.machine()
    if platform.system() != "Linux" or machine not in seccomp.ARCHITECTURES:
        here = f"{platform.system()} on {machine}"
        raise SandboxUnavailable(f"a sandbox needs Linux on x86_64 or aarch64, and this is {here}")
    if _kernel() < OLDEST_KERNEL:
        raise SandboxUnavailable(f"a sandbox needs Linux 5.14 or later, and this is {platform.release()}")
    shown, links, hidden = system_view()
    texts = {**(files or {}), PROGRAM: code}
    contents = {name: text.encode(errors="replace") if isinstance(text, str) else text for name, text in texts.items()}
    _check_files(contents, limits)
    return Plan(
        parent=os.getpid(),
        namespaces=sum(NAMESPACES.values()),
        shown=[*shown, *packages_view(packages)],
        devices=[(device, device) for device in DEVICES],
        links=links,
        hidden=hidden,
        home=f"size={limits.disk_mb}m,nr_inodes={limits.files + 2},mode=700",
        files=contents,
        limits=resource_limits(limits),
        filter=seccomp.program(machine, limits.processes > 1),
        # integers of any length: `cpu_s` bounds what they cost
        command=[interpreter(), "-s", "-B", "-X", "utf8", "-X", "int_max_str_digits=0", PROGRAM],
        environment=ENVIRONMENT,
    )


@functools.cache
def interpreter() -> str:
    """Return the Python of this process; of a virtual environment, the one that it was made from."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


@functools.cache
def system_view() -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...], tuple[str, ...]]:
    """Return what is shown read-only (source, place), links (place, target), and directories that are shown empty."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    # libpython, and what its extension modules load, lie beside the standard library: that is `lib` of the prefix
    wanted = [interpreter(), str(stdlib.parent), *LIBRARIES]
    links = {path: os.readlink(path) for path in wanted if os.path.islink(path) and path in LIBRARIES}
    real = sorted({os.path.realpath(path) for path in wanted if os.path.exists(path)})
    shown = [path for path in real if not any(path.startswith(f"{other}/") for other in real)]
    hidden = sorted(
        str(found)
        for folder in shown
        for pattern in ("site-packages", "dist-packages", "python*/site-packages", "python*/dist-packages")
        for found in Path(folder).glob(pattern)
    )
    return tuple((path, path) for path in shown), tuple(sorted(links.items())), tuple(hidden)


def packages_view(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return where each package lies and where it is shown; ``ValueError`` for one that is not installed.

    ``names`` are those that are imported, their dependencies too.
    """
    shown = []
    for name in names:
        spec = importlib.util.find_spec(name) if name.isidentifier() else None
        if spec is None or not spec.origin or spec.origin in ("built-in", "frozen"):
            raise ValueError(f"packages has {name!r:.100}, which is not installed; give names as import has them")
        origin = Path(os.path.realpath(spec.origin))
        source = origin.parent if spec.submodule_search_locations else origin
        shown.append((str(source), f"{PACKAGES}/{source.name}"))
        libraries = source.parent / f"{name}.libs"  # of a wheel with libraries of its own
        if libraries.is_dir():
            shown.append((str(libraries), f"{PACKAGES}/{libraries.name}"))
    return shown


def resource_limits(limits: Limits) -> dict[str, tuple[int, int]]:
    """Return the ``RLIMIT_*`` of a process; ``SandboxUnavailable`` for more than this process may itself have."""
    # the two processes around the program are of the same user where that is not root's to change
    tasks = limits.threads + limits.processes + 2
    values = {
        "RLIMIT_AS": limits.memory_mb * 2**20,
        "RLIMIT_FSIZE": limits.file_mb * 2**20,
        "RLIMIT_NOFILE": limits.open_files,
        "RLIMIT_NPROC": tasks,
        "RLIMIT_SIGPENDING": 256,  # timers, which the kernel keeps
    }
    for name, value in values.items():
        _, hard = resource.getrlimit(getattr(resource, name))
        if hard != resource.RLIM_INFINITY and hard < value:
            why = f"{name} of this process is {hard}, and the limits ask for {value}; ask for less, or raise it"
            raise SandboxUnavailable(why)
    _, core = resource.getrlimit(resource.RLIMIT_CORE)
    values["RLIMIT_CORE"] = core and 1  # no file is that short; with 0 a core_pattern that is a program is still run
    # at the first SIGXCPU, which can be caught, and then SIGKILL
    return {name: (value, value) for name, value in values.items()} | {"RLIMIT_CPU": (limits.cpu_s, limits.cpu_s + 1)}


def _check_files(contents: Mapping[str, bytes], limits: Limits) -> None:
    folders = {str(folder) for name in contents for folder in PurePosixPath(name).parents} - {"."}
    for name in contents:
        path, data = PurePosixPath(name), name.encode(errors="ignore")
        if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name or str(path) != name:
            raise ValueError(f"files has the name {name!r:.100}; give a relative path without '..'")
        if data.decode() != name or len(data) > MAX_PATH or max(map(len, data.split(b"/"))) > MAX_NAME:
            why = f"no file can have it; give UTF-8 of at most {MAX_NAME} bytes, {MAX_PATH} with its folders"
            raise ValueError(f"files has the name {name!r:.100}: {why}")
        if name in folders:
            raise ValueError(f"files has {name!r:.100} and a file below it; give one of them another name")
    page = resource.getpagesize()
    size, count = sum(-(-len(content) // page) * page for content in contents.values()), len(contents) + len(folders)
    if size > limits.disk_mb * 2**20 // 2 or count > limits.files // 2:
        most = f"half of disk_mb ({limits.disk_mb}) and of files ({limits.files})"
        raise ValueError(f"the program and its files are {count} with folders, of {size} bytes; {most} is the most")


def _kernel() -> tuple[int, ...]:
    return tuple(int(number) for number in platform.release().split("-")[0].split(".")[:2] if number.isdigit())
