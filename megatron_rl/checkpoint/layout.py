"""Checkpoint directories and their atomic commit.

    checkpoints/
      latest                 name of the newest committed step
      step_0000040/          manifest.json (sha256 of every file), run_state.json, the tensors
      step_0000080.tmp/      being written, or left by a kill; never loaded

Write everything into ``.tmp``, sync it to disk, rename, and only then point ``latest`` at it: a
kill at any moment leaves the previous checkpoint as it was.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from pathlib import Path

from megatron_rl.errors import CheckpointError

logger = logging.getLogger(__name__)

_STEP_NAME = re.compile(r"step_(\d{7,})")
_MANIFEST = "manifest.json"
_LATEST = "latest"


def step_directory(root: Path, step: int) -> Path:
    """Where the committed checkpoint of ``step`` lies."""
    return root / f"step_{step:07d}"


def temporary_directory(root: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` is written before it counts."""
    return root / f"step_{step:07d}.tmp"


def step_of(directory: Path) -> int:
    """The step a checkpoint directory holds."""
    match = _STEP_NAME.fullmatch(directory.name)
    if match is None:
        raise CheckpointError(f"{str(directory)!r} is not a checkpoint directory (step_0000040 and the like)")
    return int(match.group(1))


def list_checkpoints(root: Path) -> list[Path]:
    """Committed checkpoints, oldest first."""
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if path.is_dir() and _STEP_NAME.fullmatch(path.name)]
    return sorted(found, key=step_of)


def find_checkpoint(path: str | Path) -> Path:
    """The checkpoint a user means by ``path``: a step directory, or the newest valid one below it.

    A damaged checkpoint is named in a warning and the next older one is taken.

    Raises:
        CheckpointError: there is none, or no undamaged one.
    """
    root = Path(path)
    if _STEP_NAME.fullmatch(root.name) and root.is_dir():
        verify(root)
        return root
    for nested in (root, root / "checkpoints"):
        candidates = list_checkpoints(nested)
        if candidates:
            return _newest_valid(candidates)
    raise CheckpointError(
        f"no checkpoint in {str(root)!r}; give a directory that holds step_* directories, "
        "such as RUN_DIR/checkpoints"
    )


def _newest_valid(candidates: list[Path]) -> Path:
    problems = []
    for directory in reversed(candidates):
        try:
            verify(directory)
        except CheckpointError as error:
            logger.warning("%s; trying the one before it", error)
            problems.append(str(error))
        else:
            return directory
    raise CheckpointError("no undamaged checkpoint is left: " + "; ".join(problems))


def commit(root: Path, step: int) -> Path:
    """Turn the written temporary directory into the checkpoint of ``step``; one rank calls it."""
    source, target = temporary_directory(root, step), step_directory(root, step)
    files = sorted(path for path in source.rglob("*") if path.is_file())
    manifest = {str(path.relative_to(source)): _sha256(path) for path in files}
    _write_synced(source / _MANIFEST, json.dumps({"step": step, "files": manifest}, indent=1))
    for path in files:
        _sync(path)
    _sync(source)
    if target.exists():
        shutil.rmtree(target)  # the same step saved again, for example after a resume
    os.replace(source, target)
    _sync(root)
    pointer = root / (_LATEST + ".tmp")
    _write_synced(pointer, target.name + "\n")
    os.replace(pointer, root / _LATEST)
    _sync(root)
    return target


def verify(directory: Path) -> None:
    """Compare every file with the manifest.

    Raises:
        CheckpointError: a file is missing or changed; names it.
    """
    try:
        manifest = json.loads((directory / _MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"checkpoint {str(directory)!r} has no readable {_MANIFEST} ({error})") from error
    for name, digest in manifest.items():
        path = directory / name
        if not path.is_file():
            raise CheckpointError(f"checkpoint file {str(path)!r} is missing")
        if _sha256(path) != digest:
            raise CheckpointError(f"checkpoint file {str(path)!r} is damaged (its sha256 differs)")


def remove_old(root: Path, keep: int) -> None:
    """Delete all but the newest ``keep`` checkpoints, and leftovers of killed saves."""
    for leftover in root.glob("step_*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    for directory in list_checkpoints(root)[:-keep] if keep > 0 else []:
        shutil.rmtree(directory, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _write_synced(path: Path, text: str) -> None:
    path.write_text(text)
    _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
