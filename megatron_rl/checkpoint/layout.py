"""Checkpoint directories (drawn in docs/checkpoints.md) and their atomic commit.

Write everything into ``.tmp``, sync it to disk, rename, and only then point ``latest`` at it: a
kill at any moment leaves the previous checkpoint as it was.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron_rl.atomic import move_into_place, remove, sync_tree, write_text_atomic
from megatron_rl.checkpoint.foreign import RELEASE, check_files, is_foreign
from megatron_rl.checkpoint.torch_format import converted, first_file
from megatron_rl.errors import CheckpointError
from megatron_rl.user_files import read_json, read_text

logger = logging.getLogger(__name__)

_STEP_NAME = re.compile(rf"(?:step|iter)_\d{{7,}}|{RELEASE}")
_LATEST, _BEST = "latest", "best"
_MEGATRONS_POINTER = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"

_LOADED = (".distcp", ".pt", ".safetensors")
"""Such a file is loaded when it is there, listed or not; another, a person's notes, does no harm."""
_HASHING_THREADS = 8
"""hashlib lets go of the interpreter lock; one thread alone reads slower than a disk."""


def step_directory(root: Path, step: int) -> Path:
    """Return the path of the committed checkpoint of ``step``."""
    return root / f"step_{step:07d}"


def temporary_directory(root: Path, step: int, start: str = "") -> Path:
    """Return the path at which the checkpoint of ``step`` is written before it is committed.

    ``start`` tells one start of the run from the next: what writes in the background may outlive a kill, and must
    not write into the directory of the run that goes on.
    """
    return root / f"step_{step:07d}{'.' if start else ''}{start}.tmp"


def step_of(directory: Path) -> int:
    """Return the step a checkpoint directory holds; 0 of a release, which does not say."""
    return int(directory.name.partition("_")[2] or 0)


def list_checkpoints(root: Path) -> list[Path]:
    """Return committed checkpoints, oldest first."""
    return [path for path in step_entries(root) if path.is_dir()]


def step_entries(root: Path) -> list[Path]:
    """List whatever has the name of a checkpoint, oldest first: damage may have made a file of it."""
    if not root.is_dir():
        return []
    return sorted((path for path in root.iterdir() if _STEP_NAME.fullmatch(path.name)), key=step_of)


def is_step(path: Path) -> bool:
    """Return whether it is a directory with the name of a checkpoint."""
    return path.is_dir() and _STEP_NAME.fullmatch(path.name) is not None


def holds_checkpoint(path: str | Path) -> bool:
    """Return whether `find_checkpoint` has something to look at, damaged or not."""
    return bool(_entries(Path(path)))


def _entries(root: Path) -> list[Path]:
    """Itself if it has the name of a checkpoint; else whatever in it has, or in the run directory that it is."""
    if _STEP_NAME.fullmatch(root.name) and root.exists():
        return [root]
    return step_entries(root) or step_entries(root / "checkpoints")


def convert_ahead(*paths: str | None) -> None:
    """Convert checkpoints of Megatron-LM's format torch while no process group waits, which would time out.

    What is wrong with one is reported where it is looked at.
    """
    for path in filter(None, paths):
        if any(map(first_file, _entries(Path(path)))):
            with contextlib.suppress(CheckpointError):
                converted(find_checkpoint(path))


def find_checkpoint(path: str | Path, contents: bool = True) -> Path:
    """Find the checkpoint a user means by ``path``: a step directory, or the newest valid one below it.

    Of Megatron-LM's the one that its pointer names. A damaged checkpoint of ours is named in a warning and the next
    older one is taken. ``contents`` False trusts tensors that are there, see `verify`.

    Raises:
        CheckpointError: there is none, or no undamaged one.
    """
    root, entries = Path(path), _entries(Path(path))
    if entries == [root]:
        _check(root, contents)
        return root
    if entries and all(map(is_foreign, entries)):
        return _pointed_at(entries)
    if entries:
        return newest_valid(entries[0].parent, contents)
    if (root / "config.json").is_file():
        raise CheckpointError(f"no checkpoint in {str(root)!r}: it is in Hugging Face's format; use --load-hf {root}")
    raise CheckpointError(
        f"no checkpoint in {str(root)!r}; give one that is called step_*, iter_* or {RELEASE}, or a directory that "
        "holds some, such as RUN_DIR/checkpoints"
    )


def newest_valid(root: Path, contents: bool = True) -> Path:
    """Return the newest undamaged checkpoint directly below ``root``.

    Raises:
        CheckpointError: all are damaged, or there is none.
    """
    problems, entries = [], step_entries(root)
    for directory in reversed(entries):
        try:
            _check(directory, contents)
        except CheckpointError as error:
            logger.warning("%s; trying the one before it", error)
            problems.append(str(error))
        else:
            return directory
    raise CheckpointError(f"no undamaged checkpoint in {str(root)!r}: " + "; ".join(problems or ["it is empty"]))


def _check(directory: Path, contents: bool) -> None:
    if is_foreign(directory):
        check_files(directory)
    else:
        verify(directory, contents)


def _pointed_at(entries: Sequence[Path]) -> Path:
    """Of Megatron-LM's checkpoints, which are written in place, the one that its pointer says is complete."""
    pointer = entries[0].parent / _MEGATRONS_POINTER
    advice = f"name one of them, such as {str(entries[-1])!r}, if it is complete"
    try:
        named = read_text(pointer).strip()
    except ValueError as error:
        raise CheckpointError(f"{str(pointer)!r} {error}; {advice}") from error
    for directory in entries:
        if named == (RELEASE if directory.name == RELEASE else str(step_of(directory))):
            check_files(directory)
            return directory
    there = ", ".join(path.name for path in entries)
    raise CheckpointError(f"{str(pointer)!r} names {named[:20]!r}, there is {there}; {advice}")


def set_aside_newer(directory: Path) -> None:
    """Rename the damaged checkpoints after ``directory``, from which the run goes on.

    Left in place, `remove_old` would count them as the newest ones and delete valid older ones.
    """
    for newer in step_entries(directory.parent):
        if step_of(newer) > step_of(directory):
            aside = newer.with_name(newer.name + ".damaged")
            remove(aside)
            os.replace(newer, aside)
            logger.warning("set aside as %s", aside)


def commit(root: Path, step: int, start: str = "", is_best: bool = False) -> Path:
    """Turn the written temporary directory into the checkpoint of ``step``; one rank calls it.

    Raises:
        OSError: it does not count, and a checkpoint of the same step saved before does so again.
    """
    source, target = temporary_directory(root, step, start), step_directory(root, step)
    write_manifest(source, step)
    move_into_place(source, target)
    _point(root, _LATEST, target.name)
    if is_best:
        _point(root, _BEST, target.name)
    return target


def _point(root: Path, name: str, target: str) -> None:
    """``latest`` and ``best`` are for people: the checkpoint counts without them."""
    try:
        write_text_atomic(root / name, target + "\n", durable=True)
    except OSError as error:
        logger.warning("%s does not name %s (%s); no resume needs it", root / name, target, error.strerror)


def best_checkpoint(root: Path) -> Path | None:
    """Return the checkpoint that ``best`` points at; None without one, or when it is gone."""
    try:
        name = read_text(root / _BEST).strip()
    except ValueError:
        return None
    is_one = _STEP_NAME.fullmatch(name) is not None and (root / name).is_dir()
    return root / name if is_one else None


def remove_old(root: Path, keep: int) -> None:
    """Delete all but the newest ``keep`` checkpoints (0 keeps all) and the best, and leftovers of killed saves.

    Whoever saves has locked ``root`` (`preflight.machine`), so all that is left there is of starts that have ended.
    """
    for leftover in (*root.glob("step_*.tmp"), *root.glob(".*.tmp")):
        remove(leftover)
    best = best_checkpoint(root)
    for directory in list_checkpoints(root)[:-keep] if keep > 0 else []:
        if directory != best:
            shutil.rmtree(directory, ignore_errors=True)


# -- the list of a checkpoint's files with their checksums, by which damage is found ---------------


def write_manifest(directory: Path, step: int) -> None:
    """List every file of ``directory``, and bring all of them to the disk."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    names = [str(path.relative_to(directory)) for path in files]
    manifest = dict(zip(names, _checksums(files), strict=True))
    (directory / MANIFEST).write_text(json.dumps({"step": step, "files": manifest}, indent=1))
    sync_tree(directory)


def verify(directory: Path, contents: bool = True) -> None:
    """Compare ``directory`` with its manifest.

    Args:
        contents: False only looks whether files of tensors are there, which is quick at any size.

    Raises:
        CheckpointError: a file is missing, changed or of another checkpoint; names the first one.
    """
    if not directory.is_dir():
        raise CheckpointError(f"checkpoint {str(directory)!r} is damaged (it is no directory)")
    manifest = _read_manifest(directory)
    files = [directory / name for name in manifest]
    for path in files:
        if not path.is_file():
            raise CheckpointError(f"checkpoint file {str(path)!r} is missing, {MANIFEST} lists it")
    for path in sorted(path for suffix in _LOADED for path in directory.rglob("*" + suffix)):
        if path not in files:
            raise CheckpointError(f"checkpoint file {str(path)!r} is not in {MANIFEST}: it is of another checkpoint")
    listed = zip(files, manifest.values(), strict=True)
    compared = {path: written for path, written in listed if contents or path.suffix not in _LOADED}
    try:
        checksums = _checksums(list(compared))
    except OSError as error:
        raise CheckpointError(f"checkpoint file {str(error.filename)!r} cannot be read ({error.strerror})") from error
    for (path, written), found in zip(compared.items(), checksums, strict=True):
        if written != found:
            raise CheckpointError(f"checkpoint file {str(path)!r} is damaged (its sha256 differs from {MANIFEST})")


def _read_manifest(directory: Path) -> dict[str, str]:
    """Name -> sha256, as `write_manifest` wrote them for this very step."""
    path = directory / MANIFEST
    try:
        manifest = read_json(path)
        files, step = dict(manifest["files"]), int(manifest["step"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"checkpoint {str(directory)!r} has no readable {MANIFEST} ({error})") from error
    if _STEP_NAME.fullmatch(directory.name) and step_of(directory) != step:
        raise CheckpointError(f"checkpoint file {str(path)!r} is damaged: it is that of step {step}")
    return files


def _checksums(paths: Sequence[Path]) -> list[str]:
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        return list(pool.map(_sha256, paths))


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:  # one of a read has no name
        raise OSError(error.errno, error.strerror, str(path)) from error
