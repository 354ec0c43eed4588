"""The reader of pickles, which can run code: what a file may name is listed here, and nothing else is made.

There are two kinds: what ``torch.save`` writes, for torch's reduced unpickler (``weights_only=True``), and the
``.metadata`` of a torch_dist directory. megatron-core and torch do not open them; `config.megatron_args` reads plain
values of some without torch.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import pickle
import re
import zipfile
from collections.abc import Iterator
from enum import Enum
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner

from megatron_rl.config.megatron_args import Emptied
from megatron_rl.errors import CheckpointError, one_line
from megatron_rl.user_files import open_file

_CLASS = re.compile(r"GLOBAL ([\w.]+)")
_PASSED_OVER = (
    "numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct", "numpy.ndarray", "numpy.dtype",
    "_io.BytesIO", "pathlib.PosixPath", "signal.Signals", "builtins.getattr", "__builtin__.getattr",
)  # fmt: skip
"""What Megatron-LM's files have besides plain values and its own enums, in ``args`` and random state; none of it is
needed. Python 3.11.0 to 3.11.3 store an enum's member as a call of ``getattr``, which is not called."""
_DESCRIBING = {
    metadata: (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    planner: ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"),
    filesystem: ("_StorageInfo", "_StoragePrefix"),
}  # fmt: skip
"""What a ``.metadata`` file consists of, besides sizes and number formats."""


def read(source: Path | io.BytesIO, mapped: bool = True, what: str = "") -> Any:
    """Read what ``torch.save`` wrote.

    Args:
        mapped: tensors come from the file whenever they are used; False for those that outlive this.
        what: name of ``source`` in messages, if it is no file.

    Raises:
        CheckpointError: it cannot be read, or has objects of a class that is not allowed; names file and class.
    """
    is_there, what = not isinstance(source, Path) or source.is_file(), what or f"checkpoint file {str(source)!r}"
    try:
        if not is_there:  # torch would wait for a pipe
            raise OSError("there is no such file")
        with _only_ours_allowed(source):
            return torch.load(source, map_location="cpu", mmap=mapped, weights_only=True)
    except pickle.UnpicklingError as error:
        found = _CLASS.search(str(error))
        reason = f"it names {found[1]}, which is not allowed" if found else "its objects are not allowed"
        raise CheckpointError(
            f"{what} is not plain data ({reason}) and nothing of it was executed; where you trust it, load and save it "
            "again with tensors and plain values alone"
        ) from error
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
        if is_there and not zipfile.is_zipfile(source):  # of which torch's own messages say little
            reason = "it is cut short, or not one that torch.save wrote"
        raise CheckpointError(f"{what} cannot be read ({reason})") from error


@contextlib.contextmanager
def _only_ours_allowed(source: Path | io.BytesIO) -> Iterator[None]:
    """The list of classes that torch may make is the process's, and megatron-core adds 16 to it.

    A ``Namespace``, Megatron-LM's ``args``, has no positional argument and no ``__setstate__``: all the unpickler can
    do with it is set attributes of a new object. Of `_PASSED_OVER` and of megatron's enums not even the class is used.
    """
    others = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        named = torch.serialization.get_unsafe_globals_in_checkpoint(source)  # by name alone, nothing is imported
        passed_over = [*_PASSED_OVER, *(name for name in named if name.startswith("megatron."))]
        torch.serialization.add_safe_globals([argparse.Namespace, *((Emptied, name) for name in passed_over)])
        if isinstance(source, io.BytesIO):
            source.seek(0)  # the look at its names has read it
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(others)


class _Unpickler(pickle.Unpickler):
    """Makes no more than what sizes and places consist of, where torch's reader makes whatever the file names."""

    def find_class(self, module: str, name: str) -> Any:
        for known, names in _DESCRIBING.items():
            if name in names and (module == known.__name__ or module.endswith("sharded_tensor.metadata")):
                return getattr(known, name)
        if module == "megatron.core.dist_checkpointing.strategies.torch" and name.startswith("MCore"):
            return SimpleNamespace  # of up to 0.15
        if (module, name) in (("torch", "Size"), ("torch.serialization", "_get_layout")):
            return super().find_class(module, name)
        if module.partition(".")[0] == "pathlib" and name == "PosixPath":  # where it was written, once
            return PurePosixPath
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not allowed, and nothing of it was executed")


def _member(owner: Any, name: str) -> Enum:
    """Return the member of an enumeration, which Python 3.11.0 to 3.11.3 store as a call of ``getattr``."""
    if not (isinstance(owner, type) and issubclass(owner, Enum)):
        raise pickle.UnpicklingError(f"it asks for the attribute {name} of something, which is not allowed")
    return owner[name]


@contextlib.contextmanager
def described(path: Path) -> Iterator[metadata.Metadata]:
    """Read the ``.metadata`` of a torch_dist directory for a block, which looks into all of it.

    Raises:
        CheckpointError: it cannot be read, names what is not allowed, or has not what the block looks for.
    """
    try:
        with open_file(path) as file:
            yield _Unpickler(file).load()
    except CheckpointError:
        raise
    except Exception as error:  # a pickle that is cut short raises almost anything
        raise CheckpointError(f"checkpoint file {str(path)!r} cannot be read ({one_line(str(error), 200)})") from error
