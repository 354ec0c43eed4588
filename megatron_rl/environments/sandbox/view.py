"""What a program sees of the machine: its Python and the libraries that it loads, nothing else.

No ``/proc``, no ``/home``, no ``/etc``, no ``/bin``, and of installed packages only those that were asked for: those of
environments hold gold answers.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
PACKAGES = "/packages"
"""Where the packages asked for lie."""


@functools.cache
def interpreter() -> str:
    """The Python of this process; of a virtual environment, the one that it was made from."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


@functools.cache
def system_view() -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...], tuple[str, ...]]:
    """What is shown read-only (source, place), links (place, target), and directories in them that are shown empty."""
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
    """Where each of the packages lies and where it is shown: by the names that are imported, their dependencies too.

    ``ValueError`` for one that is not installed.
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
