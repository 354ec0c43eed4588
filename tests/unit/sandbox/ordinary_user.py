"""Run as root: ``python ordinary_user.py COMMAND..`` runs a command as a user without privileges.

Where the interpreter lies in a directory that is root's alone, such as /root, the command sees that directory with
nothing in it but the way to the interpreter; nothing is changed outside.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

USER = 54321
CLONE_NEWNS, MS_BIND, MS_REC, MS_PRIVATE = 0x20000, 4096, 16384, 1 << 18
LIBC = ctypes.CDLL(None, use_errno=True)


def mount(source: str | None, place: str, kind: str | None, flags: int, options: str | None = None) -> None:
    source, place, kind, options = (None if text is None else text.encode() for text in (source, place, kind, options))
    if LIBC.mount(source, place, kind, ctypes.c_ulong(flags), options):
        raise OSError(ctypes.get_errno(), f"mount on {place}")


def open_way(to: Path) -> None:
    """Replaces the first directory on the way that others may not enter by one with the next step alone."""
    parents = [*reversed(to.parents)]
    for directory, step in zip(parents, [*parents[1:], to], strict=True):
        if not directory.stat().st_mode & 1:
            kept = os.open(step, os.O_PATH)
            mount("tmpfs", str(directory), "tmpfs", 0, "mode=755")
            step.mkdir()
            mount(f"/proc/self/fd/{kept}", str(step), None, MS_BIND | MS_REC)
            os.close(kept)


if __name__ == "__main__":
    if LIBC.unshare(CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    for path in {Path(sys.base_prefix), Path(sys.prefix), Path.cwd()}:
        open_way(path)
    os.setgroups([])
    os.setresgid(USER, USER, USER)
    os.setresuid(USER, USER, USER)
    os.execvp(sys.argv[1], sys.argv[1:])
