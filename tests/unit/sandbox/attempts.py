"""Attempts to leave the sandbox or to take more than it gives: each prints ``ESCAPED`` when it has succeeded.

None goes further than it must to show that it could: a fork bomb stops at 60. The names in capitals are of things
outside that belong to the test (``test_escapes.outside``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_rl.environments.sandbox import Limits


@dataclass(frozen=True)
class Attempt:
    """A program, and the protections all of which have to go before it succeeds."""

    code: str
    without: tuple[str, ...]
    limits: Limits = Limits(cpu_s=5, wall_s=300)
    only: str = ""
    """``root`` or ``user``: who alone has it to lose."""


SEVERAL = Limits(cpu_s=5, wall_s=300, processes=4, threads=8)
SMALL = Limits(cpu_s=5, wall_s=300, file_mb=1, disk_mb=2, files=32)
QUICK = Limits(cpu_s=1, wall_s=300)

LIBC = "import ctypes, errno, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
FORKS = """
import os, time
count = 0
try:
    while count < 60:
        if not os.fork():
            time.sleep(60)
            os._exit(0)
        count += 1
except OSError:
    pass
print("ESCAPED" if count > MOST else count)
"""
TRY_READ = """
for path in (PATH, "/old" + PATH, "../.." + PATH, "/proc/1/root" + PATH):
    try:
        os.path.lexists("link") and os.unlink("link")
        os.symlink(path, "link")
        print("ESCAPED" if "secret" in open(ENTRY).read() else "")
    except OSError as error:
        print(error)
"""
DAEMON = """
import os, subprocess, sys
if not os.fork():
    os.setsid()
    if not os.fork():
        os.closerange(0, 3)
        os.execv(sys.executable, [sys.executable, "-S", "-c", "import time; time.sleep(600)", TOKEN])
    os._exit(0)
os.wait()
"""

ATTEMPTS: Mapping[str, Attempt] = {
    # more than it may have
    "fork": Attempt(f"MOST = 0\n{FORKS}", ("filter",)),
    "fork bomb": Attempt(f"MOST = 16\n{FORKS}", ("RLIMIT_NPROC",), SEVERAL),
    "thread bomb": Attempt(
        "import threading, time\nthreading.stack_size(2**16)\ncount = 0\ntry:\n"
        "    for count in range(100):\n        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "except RuntimeError:\n    pass\nprint('ESCAPED' if count > 40 else count)",
        ("RLIMIT_NPROC",),
    ),
    "memory": Attempt("bytearray(600 * 2**20)\nprint('ESCAPED')", ("RLIMIT_AS",)),
    "memory without an address": Attempt("import os\nfile = os.memfd_create('x')\nprint('ESCAPED')", ("filter",)),
    "memory in sockets": Attempt(
        "import socket\none, _ = socket.socketpair()\none.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**22)\n"
        "print('ESCAPED')",
        ("filter",),
    ),
    "processor": Attempt(
        "import time\nwhile time.process_time() < 1.6: pass\nprint('ESCAPED')", ("RLIMIT_CPU",), QUICK
    ),
    "processor, deaf to signals": Attempt(
        "import signal, time\nfor number in range(1, 32):\n    try: signal.signal(number, signal.SIG_IGN)\n"
        "    except OSError: pass\nwhile time.process_time() < 2.6: pass\nprint('ESCAPED')",
        ("RLIMIT_CPU",),
        QUICK,
    ),
    "large file": Attempt(
        "with open('x', 'wb', buffering=0) as file:\n    if file.write(bytes(2**20 + 1)) > 2**20: print('ESCAPED')",
        ("RLIMIT_FSIZE",),
        SMALL,
    ),
    "large sparse file": Attempt(
        "import os\nos.truncate(open('x', 'w').name, 2**40)\nprint('ESCAPED')", ("RLIMIT_FSIZE",), SMALL
    ),
    "full disk": Attempt(
        "for number in range(4):\n    open(f'{number}', 'wb').write(bytes(2**20 - 1))\nprint('ESCAPED')",
        ("disk",),
        SMALL,
    ),
    "many files": Attempt(
        "for number in range(99): open(f'{number}', 'w').close()\nprint('ESCAPED')", ("inodes",), SMALL
    ),
    "many directories": Attempt(
        "import os\nfor number in range(99): os.mkdir(f'{number}')\nprint('ESCAPED')", ("inodes",), SMALL
    ),
    "open files": Attempt(
        "files = []\ntry:\n    while len(files) < 200: files.append(open('/dev/null'))\nexcept OSError: pass\n"
        "print('ESCAPED' if len(files) > 64 else '')",
        ("RLIMIT_NOFILE",),
    ),
    "timers": Attempt(
        f"{LIBC}timer = ctypes.c_void_p()\n"
        "if sum(libc.timer_create(1, None, ctypes.byref(timer)) == 0 for _ in range(1000)) > 300: print('ESCAPED')",
        ("RLIMIT_SIGPENDING",),
    ),
    "core dump": Attempt(
        "import resource\nprint('ESCAPED' if resource.getrlimit(4)[1] not in (0, 1) else '')", ("RLIMIT_CORE",)
    ),
    # files outside
    "a file outside": Attempt(f"import os\nPATH, ENTRY = SECRET_FILE, 'link'\n{TRY_READ}", ("umount",)),
    "a directory outside": Attempt(
        f"import os\nPATH, ENTRY = os.path.dirname(SECRET_FILE), 'link/' + os.path.basename(SECRET_FILE)\n{TRY_READ}",
        ("umount",),
    ),
    "accounts": Attempt(
        "for path in ('/etc/passwd', '/old/etc/passwd'):\n    try: print('ESCAPED' if open(path).read() else '')\n"
        "    except OSError: pass",
        ("umount",),
    ),
    "installed packages": Attempt(
        "import os, sysconfig\nif os.listdir(sysconfig.get_path('purelib')): print('ESCAPED')", ("hidden",)
    ),
    "write to what is shown": Attempt("open('/shown/new', 'w').write('x')\nprint('ESCAPED')", ("read-only",)),
    "write beside its directory": Attempt("open('/new', 'w').write('x')\nprint('ESCAPED')", ("read-only root",)),
    "run a file that it wrote": Attempt(
        "import os, shutil, sys\nshutil.copy(sys.executable, 'x')\nos.chmod('x', 0o755)\n"
        "os.execv('x', ['x', '-S', '-c', 'print(\"ESCAPED\")'])",
        ("noexec",),
    ),
    "devices": Attempt(
        "import os\nif set(os.listdir('/dev')) - {'null', 'zero', 'urandom'}: print('ESCAPED')", ("devices",)
    ),
    "write to what is covered": Attempt(
        "import os, sysconfig\nfolder = sysconfig.get_path('purelib')\nos.chmod(folder, 0o755)\n"
        "os.mkdir(folder + '/new')\nprint('ESCAPED')",
        ("covered",),
        only="user",
    ),
    # processes outside
    "command lines of others": Attempt(
        "for path in ('/proc/', '/old/proc/'):\n    for name in ('cmdline', 'environ'):\n"
        "        try: print('ESCAPED' if open(f'{path}{PROCESS}/{name}').read() else '')\n        except OSError: pass",
        ("umount",),
    ),
    "signal to others": Attempt("import os\nos.kill(PROCESS, 0)\nprint('ESCAPED')", ("process",)),
    "signal to the caller's group": Attempt(
        "import os\nif os.getpgrp() == 0: print('ESCAPED')",  # of processes outside, which kill(0) reaches
        ("setsid",),
    ),
    "name of the machine": Attempt("import os\nif os.uname().nodename != 'sandbox': print('ESCAPED')", ("host name",)),
    "the trainer's environment": Attempt(
        "import os\nprint('ESCAPED' if 'SECRET' in os.environ else '')", ("environment",)
    ),
    "inherited files": Attempt(
        "import os\nfor n in range(3, 4096):\n    try: os.fstat(n); print('ESCAPED')\n    except OSError: pass",
        ("close_range",),
    ),
    # the network
    "tcp": Attempt(
        "import socket\nsocket.create_connection(('127.0.0.1', TCP_PORT), 2)\nprint('ESCAPED')", ("filter", "network")
    ),
    "udp": Attempt(
        "import socket\nudp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "udp.sendto(b'x', ('127.0.0.1', TCP_PORT))\nprint('ESCAPED')",
        ("filter", "network"),
    ),
    "netlink": Attempt(
        "import socket\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)\nprint('ESCAPED')", ("filter",)
    ),
    "abstract socket": Attempt(
        "import socket\nsocket.socket(socket.AF_UNIX).connect('\\0' + ABSTRACT)\nprint('ESCAPED')", ("network",)
    ),
    "socket in a directory": Attempt(
        "import socket\nfor path in (SOCKET, '/old' + SOCKET):\n    try:\n"
        "        socket.socket(socket.AF_UNIX).connect(path)\n        print('ESCAPED')\n    except OSError: pass",
        ("umount",),
    ),
    # privileges
    "shared memory of others": Attempt(
        f"{LIBC}if libc.shmget(SHARED_KEY, 0, 0) >= 0: print('ESCAPED')", ("filter", "ipc")
    ),
    "a file of root's": Attempt("open('/shown/private')\nprint('ESCAPED')", ("user",), only="root"),
    "a program of root's": Attempt(
        "import os\ncode = 'import os\\nif os.geteuid() == 0: print(\"ESCAPED\")'\n"
        "os.execv('/shown/root', ['root', '-S', '-c', code])",
        ("filter", "no_new_privs", "nosuid"),
        only="root",
    ),
    "groups of root's": Attempt("import os\nif os.getgroups(): print('ESCAPED')", ("groups",), only="root"),
    "capabilities": Attempt(
        f"{LIBC}sets = (ctypes.c_uint32 * 6)()\nlibc.capget((ctypes.c_uint32 * 2)(0x20080522, 0), sets)\n"
        "if any(sets): print('ESCAPED')",
        ("user", "number", "capset"),
    ),
    "nested namespaces": Attempt(f"{LIBC}if libc.unshare(0x10020000) == 0: print('ESCAPED')", ("filter",)),
    "namespaces of a child": Attempt(
        f"{LIBC}clone = 56 if os.uname().machine == 'x86_64' else 220\n"
        "if libc.syscall(clone, 0x10000011, 0, 0, 0, 0) > 0: print('ESCAPED')",
        ("filter",),
        SEVERAL,
    ),
    "mount": Attempt(
        f"{LIBC}libc.unshare(0x10020000)\nif libc.mount(b'x', b'/work', b'tmpfs', 0, None) == 0: print('ESCAPED')",
        ("filter",),
    ),
    "chroot": Attempt(f"{LIBC}libc.unshare(0x10020000)\nos.chroot('/work')\nprint('ESCAPED')", ("filter",)),
}


def call(arguments: str) -> str:
    """A program that makes a call of the kernel and escapes unless it is refused as unknown or forbidden."""
    return (
        f"{LIBC}result = libc.syscall({arguments})\n"
        "if result >= 0 or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS): print('ESCAPED')"
    )


CALLS: Mapping[str, tuple[int, int, str]] = {
    "ptrace": (101, 117, "0, 0, 0, 0"),
    "process_vm_readv": (310, 270, "os.getpid(), 0, 0, 0, 0, 0"),
    "personality": (135, 92, "0x0040000"),
    "setns": (308, 268, "99, 0"),
    "keyctl": (250, 219, "0, -3, 0"),
    "add_key": (248, 217, "b'user', b'x', b'y', 1, -3"),
    "io_uring_setup": (425, 425, "1, 0"),
    "memfd_create": (319, 279, "b'x', 0"),
    "shmget": (29, 194, "0, 4096, 0o1600"),
    "msgget": (68, 186, "0, 0o1600"),
    "semget": (64, 190, "0, 1, 0o1600"),
    "mq_open": (240, 180, "b'x', 0, 0, 0"),
    "perf_event_open": (298, 241, "0, 0, -1, -1, 0"),
    "pidfd_open": (434, 434, "os.getpid(), 0"),
    "clone3": (435, 435, "0, 0"),
    "inotify_init1": (294, 26, "0"),
    "fanotify_mark": (301, 263, "99, 0, 0, 0, 0"),
    "name_to_handle_at": (303, 264, "99, 0, 0, 0, 0"),
    "landlock_create_ruleset": (444, 444, "0, 0, 1"),
    "mknod": (259, 33, "-100, b'x', 0o10600, 0"),
    "chroot": (161, 51, "0"),
    "sched_setaffinity": (203, 122, "0, 0, 0"),
}
"""Number on x86_64 and on aarch64, and arguments with which the kernel itself does not say EPERM."""
