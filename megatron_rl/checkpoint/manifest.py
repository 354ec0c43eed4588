"""The list of a checkpoint's files with their checksums, by which damage is found."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron_rl.atomic import sync_tree
from megatron_rl.errors import CheckpointError
from megatron_rl.json_text import parse_json

FILE_NAME = "manifest.json"

_LOADED = (".distcp", ".pt", ".safetensors")
"""Such a file is loaded when it is there, listed or not; another, a person's notes, does no harm."""
_STEP_NAME = re.compile(r"step_(\d{7,})")
_HASHING_THREADS = 8
"""hashlib lets go of the interpreter lock; one thread alone reads slower than a disk."""


def write_manifest(directory: Path, step: int) -> None:
    """List every file of ``directory``, and bring all of them to the disk."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    names = [str(path.relative_to(directory)) for path in files]
    manifest = dict(zip(names, _checksums(files), strict=True))
    (directory / FILE_NAME).write_text(json.dumps({"step": step, "files": manifest}, indent=1))
    sync_tree(directory)


def verify(directory: Path, contents: bool = True) -> None:
    """Compare ``directory`` with its manifest.

    Args:
        contents: False only looks whether the files are there, which is quick at any size.

    Raises:
        CheckpointError: a file is missing, changed or of another checkpoint; names the first one.
    """
    if not directory.is_dir():
        raise CheckpointError(f"checkpoint {str(directory)!r} is damaged (it is no directory)")
    manifest = _read(directory)
    files = [directory / name for name in manifest]
    for path in files:
        if not path.is_file():
            raise CheckpointError(f"checkpoint file {str(path)!r} is missing, {FILE_NAME} lists it")
    for path in sorted(path for suffix in _LOADED for path in directory.rglob("*" + suffix)):
        if path not in files:
            raise CheckpointError(f"checkpoint file {str(path)!r} is not in {FILE_NAME}: it is of another checkpoint")
    if not contents:
        return
    try:
        checksums = _checksums(files)
    except OSError as error:
        raise CheckpointError(f"checkpoint file {str(error.filename)!r} cannot be read ({error.strerror})") from error
    for path, written, found in zip(files, manifest.values(), checksums, strict=True):
        if written != found:
            raise CheckpointError(f"checkpoint file {str(path)!r} is damaged (its sha256 differs from {FILE_NAME})")


def _read(directory: Path) -> dict[str, str]:
    """Name -> sha256, as `write_manifest` wrote them for this very step."""
    path = directory / FILE_NAME
    try:
        manifest = parse_json(path.read_text())
        files, step = dict(manifest["files"]), int(manifest["step"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"checkpoint {str(directory)!r} has no readable {FILE_NAME} ({error})") from error
    name = _STEP_NAME.fullmatch(directory.name)
    if name is not None and int(name[1]) != step:
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
