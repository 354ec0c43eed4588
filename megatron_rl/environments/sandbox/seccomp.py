"""Which calls of the kernel a program may make: those that Python needs, as a filter in the kernel's own code.

All others fail, among them those with which sandboxes were left or their limits evaded: ptrace, process_vm_*, mount,
unshare, setns, keyctl, bpf, perf_event_open, userfaultfd, io_uring, memfd_create, shmget, personality, pidfd_*.

    struct sock_filter {u16 code; u8 jt, jf; u32 k;}     linux/filter.h
    struct seccomp_data {int nr; u32 arch; u64 instruction_pointer; u64 args[6];}     linux/seccomp.h, little endian
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterator

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""``AUDIT_ARCH_*`` of linux/audit.h."""
ALLOWED = """
read 0 63, write 1 64, open 2 -, close 3 57, stat 4 -, fstat 5 80, lstat 6 -, poll 7 -, lseek 8 62, mmap 9 222,
mprotect 10 226, munmap 11 215, brk 12 214, rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139,
ioctl 16 29, pread64 17 67, pwrite64 18 68, readv 19 65, writev 20 66, access 21 -, pipe 22 -, select 23 -,
sched_yield 24 124, mremap 25 216, msync 26 227, mincore 27 232, madvise 28 233, dup 32 23, dup2 33 -,
pause 34 -, nanosleep 35 101, getitimer 36 102, alarm 37 -, setitimer 38 103, getpid 39 172, sendfile 40 71,
connect 42 203, accept 43 202, sendto 44 206, recvfrom 45 207, sendmsg 46 211, recvmsg 47 212, shutdown 48 210,
bind 49 200, listen 50 201, getsockname 51 204, getpeername 52 205, getsockopt 55 209,
execve 59 221, exit 60 93, wait4 61 260, kill 62 129, uname 63 160, fcntl 72 25, flock 73 32, fsync 74 82,
fdatasync 75 83, truncate 76 45, ftruncate 77 46, getdents 78 -, getcwd 79 17, chdir 80 49, fchdir 81 50,
rename 82 -, mkdir 83 -, rmdir 84 -, creat 85 -, link 86 -, unlink 87 -, symlink 88 -, readlink 89 -, chmod 90 -,
fchmod 91 52, chown 92 -, fchown 93 55, lchown 94 -, umask 95 166, gettimeofday 96 169, getrlimit 97 163,
setrlimit 160 164, getrusage 98 165, sysinfo 99 179, times 100 153, getuid 102 174, getgid 104 176,
geteuid 107 175, getegid 108 177, setpgid 109 154, getppid 110 173, getpgrp 111 -, setsid 112 157,
getpgid 121 155, getsid 124 156, getgroups 115 158, getresuid 118 148, getresgid 120 150, capget 125 90,
rt_sigpending 127 136, rt_sigtimedwait 128 137, rt_sigsuspend 130 133, sigaltstack 131 132, utime 132 -,
statfs 137 43, fstatfs 138 44, getpriority 140 141, setpriority 141 140, sched_getparam 143 121,
sched_getscheduler 145 120, sched_get_priority_max 146 125, sched_get_priority_min 147 126,
sched_rr_get_interval 148 127, sched_getaffinity 204 123, prctl 157 167, arch_prctl 158 -, gettid 186 178,
time 201 -, futex 202 98, epoll_create 213 -, epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -,
epoll_pwait 281 22, getdents64 217 61, set_tid_address 218 96, restart_syscall 219 128, fadvise64 221 223,
timer_create 222 107, timer_settime 223 110, timer_gettime 224 108, timer_getoverrun 225 109,
timer_delete 226 111, clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115, exit_group 231 94,
tgkill 234 131, tkill 200 130, utimes 235 -, waitid 247 95, openat 257 56, mkdirat 258 34, newfstatat 262 79,
unlinkat 263 35, renameat 264 38, renameat2 316 276, linkat 265 37, symlinkat 266 36, readlinkat 267 78,
fchmodat 268 53, fchownat 260 54, faccessat 269 48, pselect6 270 72, ppoll 271 73, set_robust_list 273 99,
get_robust_list 274 100, fallocate 285 47, utimensat 280 88, futimesat 261 -, eventfd 284 -, eventfd2 290 19,
timerfd_create 283 85, timerfd_settime 286 86, timerfd_gettime 287 87, signalfd 282 -, signalfd4 289 74,
accept4 288 242, dup3 292 24, pipe2 293 59, preadv 295 69, pwritev 296 70, preadv2 327 286, pwritev2 328 287,
prlimit64 302 261, sendmmsg 307 269, recvmmsg 299 243, getcpu 309 168, getrandom 318 278, membarrier 324 283,
copy_file_range 326 285, statx 332 291, rseq 334 293, close_range 436 436, openat2 437 437, faccessat2 439 439,
epoll_pwait2 441 441, fchmodat2 452 452
"""
"""Name, number on x86_64, number on aarch64: linux/asm/unistd.h. Those with conditions are below."""
CONDITIONAL = {
    "x86_64": {"socket": 41, "socketpair": 53, "clone": 56, "fork": 57, "vfork": 58, "clone3": 435},
    "aarch64": {"socket": 198, "socketpair": 199, "clone": 220, "clone3": 435},
}
NEWER = 403
"""From here on a C library takes ENOSYS for an old kernel and does without the call."""
X32 = 0x40000000
"""Numbers of x86_64's second table, which no filter of the first would see."""

CLONE_THREAD = 0x00010000
CLONE_NEW = 0x7E020080
"""All flags that make namespaces: NEWTIME, NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""

_LOAD, _EQUAL, _AT_LEAST, _ABOVE, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x25, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000


def program(machine: str, processes: bool) -> bytes:
    """Return the filter for ``platform.machine()``; without ``processes`` threads can be started and nothing else."""
    special = CONDITIONAL[machine]
    code = [_load(_ARCHITECTURE), *_unless(_EQUAL, ARCHITECTURES[machine], _KILL)]
    code += [_load(_NUMBER), *_when(_AT_LEAST, X32, _KILL)]
    for first, last in _ranges(machine):
        code += [_step(_AT_LEAST, first, 0, 2), _step(_ABOVE, last, 1, 0), _step(_RETURN, _ALLOW)]
    for name in ("socket", "socketpair"):
        family = [_load(_FIRST_ARGUMENT), *_when(_EQUAL, socket.AF_UNIX, _ALLOW), _refuse(errno.EACCES)]
        code += [_step(_EQUAL, special[name], 0, len(family)), *family]
    flags = _when(_ANY_BIT, CLONE_NEW, _ERROR | errno.EPERM)
    flags += [] if processes else _unless(_ANY_BIT, CLONE_THREAD, _ERROR | errno.EAGAIN)
    flags = [_load(_FIRST_ARGUMENT), *flags, _step(_RETURN, _ALLOW)]
    code += [_step(_EQUAL, special["clone"], 0, len(flags)), *flags]
    for name in ("fork", "vfork"):
        if name in special:
            code += _when(_EQUAL, special[name], _ALLOW if processes else _ERROR | errno.EAGAIN)
    code += _when(_AT_LEAST, NEWER, _ERROR | errno.ENOSYS)  # also clone3, whose flags a filter cannot read
    return b"".join([*code, _refuse(errno.EPERM)])


def numbers(machine: str) -> dict[str, int]:
    """Return the calls that are allowed whatever their arguments."""
    column = list(ARCHITECTURES).index(machine) + 1
    rows = (entry.split() for entry in ALLOWED.replace("\n", " ").split(","))
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


def _ranges(machine: str) -> Iterator[tuple[int, int]]:
    """First and last of each run of numbers."""
    ordered = sorted(numbers(machine).values())
    first = ordered[0]
    for number, following in zip(ordered, [*ordered[1:], -1], strict=True):
        if following != number + 1:
            yield first, number
            first = following


def _step(code: int, value: int, when_true: int = 0, when_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, when_true, when_false, value)


def _load(offset: int) -> bytes:
    return _step(_LOAD, offset)


def _when(test: int, value: int, verdict: int) -> list[bytes]:
    return [_step(test, value, 0, 1), _step(_RETURN, verdict)]


def _unless(test: int, value: int, verdict: int) -> list[bytes]:
    return [_step(test, value, 1, 0), _step(_RETURN, verdict)]


def _refuse(code: int) -> bytes:
    return _step(_RETURN, _ERROR | code)
