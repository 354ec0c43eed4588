"""An output directory that is whole or absent: written as ``NAME.tmp``, renamed at the end."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_rl.errors import CheckpointError


@contextmanager
def whole_or_absent(output: Path, source: Path, overwrite: bool) -> Iterator[Path]:
    """Yields an empty directory that becomes ``output`` if the block ends well and is removed if it does not.

    ``overwrite`` replaces an ``output`` that holds a model (a ``config.json``), and what a killed conversion left.

    Raises:
        CheckpointError: ``output`` is there and not empty, is the source or part of it, or cannot be created.
    """
    output = output.resolve()
    temporary, replaced = (output.with_name(output.name + suffix) for suffix in (".tmp", ".replaced"))
    _check(output, temporary, replaced, source.resolve(), overwrite)
    try:
        if overwrite:
            shutil.rmtree(temporary, ignore_errors=True)
        output.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
    except OSError as error:
        raise CheckpointError(f"{temporary} cannot be created ({error.strerror}); use another directory") from error
    try:
        yield temporary
        for path in (*temporary.rglob("*"), temporary):
            _sync(path)
        _swap(temporary, output, replaced)
    except BaseException:  # Ctrl-C too
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _check(output: Path, temporary: Path, replaced: Path, source: Path, overwrite: bool) -> None:
    for path in (output, temporary, replaced):
        if path == source or path in source.parents or source in path.parents:
            raise CheckpointError(f"output {output} is the input {source} or overlaps it; use another directory")
    if replaced.exists():
        raise CheckpointError(f"{replaced} is there, what an interrupted --overwrite put aside; move or remove it")
    if output.exists() and not output.is_dir():
        raise CheckpointError(f"output {output} is a file; use another directory")
    occupied = output.is_dir() and any(output.iterdir())
    if occupied and not overwrite:
        raise CheckpointError(f"output {output} is not empty; use another directory, or --overwrite")
    if occupied and not (output / "config.json").is_file():
        raise CheckpointError(f"output {output} holds no model (no config.json), so --overwrite leaves it alone")
    if temporary.exists() and not overwrite:
        raise CheckpointError(f"{temporary} is there: another conversion runs or was killed; remove it, or --overwrite")


def _swap(temporary: Path, output: Path, replaced: Path) -> None:
    try:
        occupied = output.is_dir() and any(output.iterdir())
        if occupied:
            os.rename(output, replaced)
        try:
            os.rename(temporary, output)
        except BaseException:
            if occupied:
                os.rename(replaced, output)
            raise
        _sync(output.parent)
    except OSError as error:
        raise CheckpointError(f"{temporary} cannot be renamed to {output} ({error.strerror})") from error
    shutil.rmtree(replaced, ignore_errors=True)


def _sync(path: Path) -> None:
    """A file's bytes, or a directory's list, reach the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
