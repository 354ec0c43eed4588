"""The filter, run by an interpreter of its own against calls of both machines."""

from __future__ import annotations

import errno
import re
import struct
from pathlib import Path

import pytest

from megatron_rl.environments.sandbox import seccomp

ALLOW, KILL = 0x7FFF0000, 0x80000000
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}


def refused(code: int) -> int:
    return 0x00050000 | code


def verdict(program: bytes, number: int, architecture: int, argument: int = 0) -> int:
    """What the filter returns for a call, by the rules of classic BPF."""
    data = struct.pack("<IIQQ", number, architecture, 0, argument)
    steps = [struct.unpack_from("<HBBI", program, at) for at in range(0, len(program), 8)]
    at = value = 0
    while True:
        code, when_true, when_false, operand = steps[at]
        at += 1
        if code == 0x06:
            return operand
        if code == 0x20:
            (value,) = struct.unpack_from("<I", data, operand)
            continue
        tests = {0x15: value == operand, 0x35: value >= operand, 0x25: value > operand, 0x45: bool(value & operand)}
        at += when_true if tests[code] else when_false


@pytest.mark.parametrize("machine", seccomp.ARCHITECTURES)
@pytest.mark.parametrize("processes", [True, False])
def test_every_number(machine, processes):
    """The calls of the list pass and all others are refused, those that a C library may do without as unknown."""
    program, architecture = seccomp.program(machine, processes), seccomp.ARCHITECTURES[machine]
    allowed, special = set(seccomp.numbers(machine).values()), set(seccomp.CONDITIONAL[machine].values())
    for number in set(range(600)) - special:
        expected = ALLOW if number in allowed else refused(errno.ENOSYS if number >= 403 else errno.EPERM)
        assert verdict(program, number, architecture) == expected, number


@pytest.mark.parametrize("machine", seccomp.ARCHITECTURES)
def test_sockets_of_this_machine_alone(machine):
    program, architecture = seccomp.program(machine, False), seccomp.ARCHITECTURES[machine]
    for name in ("socket", "socketpair"):
        number = seccomp.CONDITIONAL[machine][name]
        found = [verdict(program, number, architecture, family) for family in (1, 2, 10, 16, 17, 38, 40)]
        assert found == [ALLOW] + 6 * [refused(errno.EACCES)]


@pytest.mark.parametrize("machine", seccomp.ARCHITECTURES)
def test_threads_and_processes(machine):
    architecture, special = seccomp.ARCHITECTURES[machine], seccomp.CONDITIONAL[machine]
    thread, child, namespace = 0x3D0F00, 0x01200011, 0x10000011
    for processes, expected in ((True, ALLOW), (False, refused(errno.EAGAIN))):
        program = seccomp.program(machine, processes)
        assert verdict(program, special["clone"], architecture, thread) == ALLOW
        assert verdict(program, special["clone"], architecture, child) == expected
        assert verdict(program, special["clone"], architecture, namespace) == refused(errno.EPERM)
        assert verdict(program, special["clone"], architecture, thread | 0x20000) == refused(errno.EPERM)
        assert verdict(program, special["clone3"], architecture) == refused(errno.ENOSYS)
        for name in {"fork", "vfork"} & set(special):
            assert verdict(program, special[name], architecture) == expected


def test_other_tables_of_calls():
    program, architecture = seccomp.program("x86_64", False), seccomp.ARCHITECTURES["x86_64"]
    assert verdict(program, 0, 0x40000003) == KILL  # i386
    assert verdict(program, 0x40000000, architecture) == KILL  # x32's read


@pytest.mark.parametrize("machine", HEADERS)
def test_the_numbers_are_the_kernels(machine):
    if not HEADERS[machine].is_file():
        pytest.skip(f"{HEADERS[machine]} is not installed")
    found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", HEADERS[machine].read_text())
    stated = {name: int(number) for name, number in found}
    stated.setdefault("newfstatat", stated.get("fstatat"))
    ours = seccomp.numbers(machine) | seccomp.CONDITIONAL[machine]
    known = {name: number for name, number in ours.items() if name in stated}
    assert known == {name: stated[name] for name in known}
    assert set(ours) - set(known) <= {"fchmodat2"}  # newer than some headers
