"""Safetensors files read and written a piece at a time, so that no shard has to fit into memory.

A file is 8 bytes with the header's length, the header (JSON: type, shape, first and last byte of every tensor), and
the tensors. The safetensors library checks a file; it can only write one that is in memory as a whole.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from megatron_rl.errors import CheckpointError

ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a file's header."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """On disk."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class TensorReader:
    """One safetensors file, opened for reading; use it in a ``with`` statement.

    Raises:
        CheckpointError: the file is absent, truncated or damaged; names it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: dict[str, TensorEntry] = {}
        self._starts: dict[str, int] = {}
        try:
            with safe_open(path, framework="pt"):
                pass  # checks header, offsets and length, and maps the file without reading it
            self._file = path.open("rb")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{path} cannot be read as safetensors ({error}): truncated or damaged; fetch or write it again"
            ) from error
        self._read_header()

    def _read_header(self) -> None:
        length = int.from_bytes(self._file.read(_LENGTH_BYTES), "little")
        header = json.loads(self._file.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            if entry["dtype"] not in ITEM_BYTES:
                self._file.close()
                raise CheckpointError(f"{self.path} holds {name!r} of type {entry['dtype']}, which is unknown here")
            self.entries[name] = TensorEntry(entry["dtype"], tuple(entry["shape"]))
            self._starts[name] = _LENGTH_BYTES + length + entry["data_offsets"][0]

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def pieces(self, name: str, piece_bytes: int) -> Iterator[torch.Tensor]:
        """The tensor's bytes as uint8 tensors of at most ``piece_bytes``, in order."""
        left = self.entries[name].bytes
        self._file.seek(self._starts[name])
        while left:
            piece = bytearray(min(left, piece_bytes))
            if self._file.readinto(piece) != len(piece):
                raise CheckpointError(f"{self.path} ended within {name!r}: it changed while it was read")
            left -= len(piece)
            yield torch.frombuffer(piece, dtype=torch.uint8)


class TensorWriter:
    """One safetensors file whose tensors are known by type and shape beforehand and written in any order.

    Raises:
        CheckpointError: the disk is full or fails; names the file.
    """

    def __init__(self, path: Path, entries: Mapping[str, TensorEntry]) -> None:
        self.path = path
        self._next: dict[str, int] = {}
        self._ends: dict[str, int] = {}
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        # The largest types first, as the library has it: loaders view the bytes and want them aligned.
        for name in sorted(entries, key=lambda name: (-ITEM_BYTES[entries[name].dtype], name)):
            entry, start = entries[name], offset
            offset += entry.bytes
            header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [start, offset]}
            self._next[name], self._ends[name] = start, offset
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._data = _LENGTH_BYTES + len(text)
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except OSError as error:
            raise _cannot_write(path, error) from error
        try:
            self._write_at(0, memoryview(len(text).to_bytes(_LENGTH_BYTES, "little") + text))
        except CheckpointError:
            os.close(self._file)
            raise

    def append(self, name: str, values: torch.Tensor) -> None:
        """The next elements of a tensor, in the type its entry says."""
        raw = memoryview(values.contiguous().view(-1).view(torch.uint8).numpy())
        start = self._next[name]
        if start + len(raw) > self._ends[name]:
            raise ValueError(f"more than the {name!r} of the header")
        self._write_at(self._data + start, raw)
        self._next[name] = start + len(raw)

    def _write_at(self, offset: int, raw: memoryview) -> None:
        try:
            while raw:
                written = os.pwrite(self._file, raw, offset)
                raw, offset = raw[written:], offset + written
        except OSError as error:
            raise _cannot_write(self.path, error) from error

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                os.fsync(self._file)  # some file systems report a full disk only here
        except OSError as error:
            raise _cannot_write(self.path, error) from error
        finally:
            os.close(self._file)
        unfinished = [name for name, end in self._ends.items() if self._next[name] != end]
        if kind is None and unfinished:
            raise ValueError(f"{self.path} lacks part of {unfinished[0]!r}")


def _cannot_write(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path} cannot be written ({error.strerror}); free space or choose another directory")
