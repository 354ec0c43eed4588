"""Files and directories that are whole or absent: written under another name, brought to the disk, renamed."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron_rl.errors import CheckpointError

TEMPORARY = ".tmp"
_REPLACED = ".replaced.tmp"

logger = logging.getLogger(__name__)


def sync(path: Path) -> None:
    """Bring a file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(directory: Path) -> None:
    """Bring all of a directory to the disk."""
    for path in (*directory.rglob("*"), directory):
        sync(path)


def write_text_atomic(path: Path, text: str, durable: bool = False, private: bool = False) -> None:
    """Write a small file beside the target, then rename: a reader sees the old one or the new one.

    ``durable`` waits until the disk has it; a ``private`` one only its owner can read.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY}")
    try:
        if private:
            temporary.unlink(missing_ok=True)
            temporary.touch(0o600, exist_ok=False)
        # Model output may hold lone surrogates, which UTF-8 refuses; a record must not fail on them.
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
        if durable:
            sync(temporary)
        os.replace(temporary, path)
        if durable:
            sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def move_into_place(temporary: Path, target: Path) -> None:
    """Rename a directory that is on the disk; what ``target`` was is put aside, and deleted in the end.

    Raises:
        OSError: it could not be renamed; then ``target`` is what it was.
    """
    replaced = target.with_name(target.name + _REPLACED)
    if target.exists():
        remove(replaced)
        os.replace(target, replaced)
    try:
        os.replace(temporary, target)
    except BaseException:
        if replaced.exists():
            os.replace(replaced, target)
        raise
    sync(target.parent)
    remove(replaced)


def remove(path: Path) -> None:
    """Delete whatever lies there, as far as that is possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


class Dispensable:
    """Files that a run can do without: the first one that cannot be written is a warning, and the run goes on."""

    def __init__(self, without: str) -> None:
        """``without`` says what the run has not, for the warning."""
        self._without = without
        self._told = False

    @contextlib.contextmanager
    def writing(self, path: Path | str) -> Iterator[None]:
        """Let the block write ``path``, and leave it where that fails."""
        try:
            yield
        except OSError as error:
            if not self._told:
                logger.warning("%s cannot be written (%s): the run goes on %s", path, error.strerror, self._without)
            self._told = True


@contextlib.contextmanager
def whole_directory(output: Path, source: Path, overwrite: bool = False) -> Iterator[Path]:
    """Yields an empty directory that becomes ``output`` if the block ends well and is removed if it does not.

    ``overwrite`` replaces an ``output`` that holds a model (a ``config.json``), and what a killed conversion left.

    Raises:
        CheckpointError: ``output`` is there and not empty, is the source or part of it, or cannot be created.
    """
    output = Path(os.path.realpath(output))
    temporary, replaced = (output.with_name(output.name + suffix) for suffix in (TEMPORARY, _REPLACED))
    _check(output, temporary, replaced, Path(os.path.realpath(source)), overwrite)
    try:
        remove(temporary)
        temporary.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"{temporary} cannot be created ({error.strerror}); use another directory") from error
    try:
        yield temporary
        try:
            sync_tree(temporary)  # some file systems report a full disk only here
            move_into_place(temporary, output)
        except OSError as error:
            raise CheckpointError(f"{temporary} cannot become {output} ({error.strerror})") from error
    except BaseException:  # Ctrl-C too
        remove(temporary)
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


def cache_home() -> Path:
    """Return the directory of what is converted once: ``$HF_HOME/megatron-rl``."""
    return Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser() / "megatron-rl"


def once(target: Path, write: Callable[[], object]) -> Path:
    """Return the directory ``target``; the first process ``write``s it, by `whole_directory`, and others wait."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_name(target.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            remove(target.with_name(target.name + TEMPORARY))  # of a process that was killed
            write()
    return target
