"""What a program may use, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from megatron_rl.errors import EnvironmentFault

LARGEST = 2**20
"""Of any limit, which is a megabyte of megabytes, or twelve days."""


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
            if not fits or not 0 < value <= LARGEST:
                kind = "a whole number" if whole else "a number"
                raise ValueError(f"{field.name} is {value!r:.40}; it must be {kind} above 0 and up to {LARGEST:,}")
        if self.memory_mb < 64:
            raise ValueError(f"memory_mb is {self.memory_mb}; Python itself needs 64")
        if self.open_files < 8:
            raise ValueError(f"open_files is {self.open_files}; Python itself needs 8")


@dataclass(frozen=True)
class Execution:
    stdout: str
    """As UTF-8; bytes that are none become U+FFFD."""
    stderr: str
    exit_code: int
    """Minus the signal's number for a program that a signal ended, as ``subprocess`` has it."""
    why: str = ""
    """What it had too much of: ``timeout`` (wall time), ``cpu``, ``memory`` or ``output``; "" for all other ends.
    A full disk is an ``OSError`` that the program itself sees."""
    cpu_s: float = 0.0
    """Processor seconds of the program and of the processes that it waited for; 0 where it was ended from outside."""

    @property
    def succeeded(self) -> bool:
        """Whether it came to its end without an error."""
        return self.exit_code == 0 and not self.why
