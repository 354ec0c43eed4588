"""Builds a sandbox around itself and runs a program in it; a script of its own that needs the standard library alone.

Three processes stand around the program, each ended with its parent::

    launcher      outside; maps the user, then waits
    └► builder    in new namespaces; makes the file system
       └► init    first process of the new process namespace: when it ends, the kernel ends all others in it
          └► the program: no privileges, limits, filter, exec

Standard input begins with the plan (``plan.py``), its length before it; the rest is the program's. Lines on the
descriptor that is the argument say how far it came: ``begun`` and ``ended STATUS CPU_SECONDS``, or ``error TEXT``. The
program does not have that descriptor.

It imports little on purpose: json, signal and typing would add a fifth to the time of a short program.
"""

from __future__ import annotations

import ctypes
import marshal
import os
import resource
import select
import struct
import sys

TYPE_CHECKING = False  # as type checkers read it; typing's own takes 3 ms
if TYPE_CHECKING:
    from collections.abc import Callable

LIBC = ctypes.CDLL(None, use_errno=True)
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
READ_ONLY, NOSUID, NODEV = 1, 2, 4  # MOUNT_ATTR_*
MNT_DETACH, AT_FDCWD, AT_RECURSIVE = 2, -100, 0x8000
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
SECCOMP_MODE_FILTER, CAPABILITY_VERSION_3 = 2, 0x20080522
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
MOUNT_SETATTR, CLOSE_RANGE = 442, 436
SIGKILL, SIGINT, SIG_DFL = 9, 2, 0
INSIDE, NOBODY = 1000, 65534
"""The program's user: in the sandbox, and outside where the launcher is root."""
OLD, HOME = "/old", "/work"


def main() -> None:
    status = int(sys.argv[1])
    try:
        plan = marshal.loads(_read(int.from_bytes(_read(8), "little")))
        _die_with(plan["parent"])
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        _write("self/oom_score_adj", "1000")  # the first to go when the machine runs out of memory
        drops = os.geteuid() == 0 and _is_mapped(NOBODY)
        (asked, ask), (mapped, done) = os.pipe(), os.pipe()
        launcher = os.getpid()
        builder = os.fork()
        if not builder:
            os.close(done)
            _as_builder(plan, status, launcher, drops, ask, mapped)
        os.close(ask)
        os.close(mapped)
        os.closerange(0, 3)  # the program alone holds them: when it ends, so do they
        if os.read(asked, 1):
            _map_user(builder, drops)
            os.write(done, b"x")
        os.waitpid(builder, 0)
    except Exception as error:  # noqa: BLE001 - the caller reads it
        _tell(status, f"error the launcher: {error}")


def _as_builder(plan: dict, status: int, launcher: int, drops: bool, ask: int, mapped: int) -> None:
    """Never returns."""
    try:
        _die_with(launcher)
        _call("user and other namespaces (unshare)", LIBC.unshare, plan["namespaces"])
        os.write(ask, b"x")
        if not os.read(mapped, 1):
            raise OSError("the user could not be mapped")
        _build(plan, INSIDE)
        alive, held = os.pipe()
        init = os.fork()
        if not init:
            os.close(held)
            _as_init(plan, status, alive, drops)
        os.closerange(0, 3)  # the program alone holds them: when it ends, so do they
        os.waitpid(init, 0)
    except Exception as error:  # noqa: BLE001 - the caller reads it
        _tell(status, f"error {error}")
    finally:
        os._exit(0)


def _as_init(plan: dict, status: int, alive: int, drops: bool) -> None:
    """Starts the program and waits for it; never returns."""
    try:
        LIBC.prctl(PR_SET_PDEATHSIG, SIGKILL)
        if select.select([alive], [], [], 0)[0]:  # the builder ended before the call; from in here its id is always 0
            return
        LIBC.signal(SIGINT, SIG_DFL)  # of the first process, ignored when it comes from inside
        os.setsid()  # `kill(0)` reaches all of a group, also those outside
        program = os.fork()
        if not program:
            _as_program(plan, status, drops)
        os.closerange(0, 3)  # the program alone holds them: when it ends, so do they
        ended = 0
        while ended != program:
            ended, code, usage = os.wait3(0)
        _tell(status, f"ended {code} {usage.ru_utime + usage.ru_stime}")
    except Exception as error:  # noqa: BLE001 - the caller reads it
        _tell(status, f"error the first process: {error}")
    finally:
        os._exit(0)


def _as_program(plan: dict, status: int, drops: bool) -> None:
    """Gives up what the program must not have, then becomes it; never returns."""
    try:
        os.dup2(status, 3)
        os.chdir(HOME)
        if drops:
            os.setgroups([])
        os.setresgid(INSIDE, INSIDE, INSIDE)
        os.setresuid(INSIDE, INSIDE, INSIDE)
        for name, (soft, hard) in plan["limits"].items():
            resource.setrlimit(getattr(resource, name), (soft, hard))
        _call("capset", LIBC.capset, struct.pack("<Ii", CAPABILITY_VERSION_3, 0), bytes(24))
        _call("no_new_privs", LIBC.prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        os.set_inheritable(3, False)
        _call("close_range", LIBC.syscall, CLOSE_RANGE, 4, ctypes.c_uint(2**32 - 1), 0)
        _tell(3, "begun")
        _install(plan["filter"])
        os.execve(plan["command"][0], plan["command"], plan["environment"])
    except Exception as error:  # noqa: BLE001 - the caller reads it
        _tell(3, f"error the program could not be started: {error}")
    finally:
        os._exit(127)


def _build(plan: dict, user: int) -> None:
    """The file system: all that the plan shows, and a directory of bounded size."""
    _mount(None, "/", None, MS_REC | MS_PRIVATE)  # nothing mounted outside later is seen in here
    root = "/tmp"  # any directory would do: after pivot_root what is in it is to be seen again
    _mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    os.mkdir(root + OLD)
    _call("pivot_root", LIBC.syscall, PIVOT_ROOT[os.uname().machine], root.encode(), (root + OLD).encode())
    os.chdir("/")
    for source, place in plan["shown"]:
        _show(OLD + source, place, READ_ONLY | NOSUID | NODEV)
    for source, place in plan["devices"]:
        _show(OLD + source, place, NOSUID)
    for place, target in plan["links"]:
        os.makedirs(os.path.dirname(place), exist_ok=True)
        os.symlink(target, place)
    for place in plan["hidden"]:
        _mount("tmpfs", place, "tmpfs", MS_NOSUID | MS_NODEV, "size=4k,mode=555")
        _restrict(place, READ_ONLY | NOSUID | NODEV, 0)
    os.mkdir(HOME)
    _mount("tmpfs", HOME, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, plan["home"])
    _write_files(plan["files"], user)
    _call("umount", LIBC.umount2, OLD.encode(), MNT_DETACH)
    os.rmdir(OLD)
    _restrict("/", READ_ONLY | NOSUID | NODEV, 0)
    _call("sethostname", LIBC.sethostname, b"sandbox", 7)


def _show(source: str, place: str, attributes: int) -> None:
    """Binds a file, or a directory with what is mounted in it, and restricts it."""
    if os.path.isdir(source):
        os.makedirs(place, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(place), exist_ok=True)
        with open(place, "x"):
            pass
    _mount(source, place, None, MS_BIND | MS_REC)
    _restrict(place, attributes, AT_RECURSIVE)


def _write_files(files: dict[str, bytes], user: int) -> None:
    for name, content in files.items():
        path = os.path.join(HOME, name)
        folder = os.path.dirname(path)
        os.makedirs(folder, exist_ok=True)
        with open(path, "xb") as file:
            file.write(content)
    for folder, _, names in os.walk(HOME):
        for path in (folder, *(os.path.join(folder, name) for name in names)):
            os.chown(path, user, user)


def _map_user(builder: int, drops: bool) -> None:
    """Root keeps 0 for the builder and gives the program an outsider's number; anyone else maps his own."""
    maps = {"uid_map": os.geteuid(), "gid_map": os.getegid()}
    if not drops:
        _write(f"{builder}/setgroups", "deny")
    for name, own in maps.items():
        _write(f"{builder}/{name}", f"0 {own} 1\n{INSIDE} {NOBODY} 1" if drops else f"{INSIDE} {own} 1")


def _write(name: str, text: str) -> None:
    """Into a file of ``/proc``, in one call, as maps must be."""
    try:
        with open(f"/proc/{name}", "wb", buffering=0) as file:
            file.write(text.encode())
    except OSError as error:
        raise OSError(error.errno, f"/proc/{name}: {error.strerror}") from None


def _is_mapped(user: int) -> bool:
    """Return whether the number exists in this process's own user namespace."""
    with open("/proc/self/uid_map") as file:
        ranges = [tuple(map(int, line.split())) for line in file]
    return any(first <= user < first + count for first, _, count in ranges)


def _install(code: bytes) -> None:
    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]

    filter_ = Program(len(code) // 8, code)
    _call("seccomp", LIBC.prctl, PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(filter_), 0, 0)


def _mount(source: str | None, place: str, kind: str | None, flags: int, options: str | None = None) -> None:
    source, kind, options = (None if text is None else text.encode() for text in (source, kind, options))
    _call(f"mount on {place}", LIBC.mount, source, place.encode(), kind, ctypes.c_ulong(flags), options)


def _restrict(place: str, attributes: int, flags: int) -> None:
    wanted = struct.pack("<QQQQ", attributes, 0, 0, 0)  # set, clear, propagation, user namespace
    _call(f"mount_setattr of {place}", LIBC.syscall, MOUNT_SETATTR, AT_FDCWD, place.encode(), flags, wanted, 32)


def _call(what: str, function: Callable[..., int], *arguments: object) -> None:
    if function(*arguments) < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def _die_with(parent: int) -> None:
    LIBC.prctl(PR_SET_PDEATHSIG, SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def _read(count: int) -> bytes:
    """Exactly so many bytes of standard input: what follows is the program's."""
    parts = []
    while count:
        part = os.read(0, count)
        if not part:
            raise OSError("the plan ends early")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _tell(descriptor: int, line: str) -> None:
    os.write(descriptor, " ".join(line.split()).encode() + b"\n")


if __name__ == "__main__":
    main()
