"""Reads parts of tensors, and counts what it has read."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron_rl.errors import CheckpointError
from megatron_rl.families import Piece
from megatron_rl.families.files import stored_tensors

_OPEN_FILES = 2
"""Tensors of one layer may lie in two files."""
_MAPPED_BYTES = 2**25
"""After so many bytes a file is closed, and opened again when needed: it is mapped, and pages that were read count
as this process's memory until then."""


class HfReader:
    """The tensors of one directory. A context manager: it keeps files open."""

    def __init__(self, directory: Path) -> None:
        self._stored = stored_tensors(directory)
        self._open: OrderedDict[Path, tuple[contextlib.ExitStack, Any]] = OrderedDict()
        self._mapped: dict[Path, int] = {}
        self.bytes_read = 0
        """Of all slices handed out."""

    def __enter__(self) -> HfReader:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        while self._open:
            self._close_oldest()

    def read(self, piece: Piece) -> torch.Tensor:
        """The rows (and columns) of a piece that has a tensor, as stored, in host memory."""
        stored = self._stored[piece.tensor]
        rows = slice(*piece.rows)
        try:
            whole = self._file(stored.file).get_slice(piece.tensor)
            part = whole[rows] if piece.columns is None else whole[rows, slice(*piece.columns)]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{stored.file}: {piece.tensor} cannot be read ({error})") from error
        size = part.numel() * part.element_size()
        self.bytes_read += size
        self._count(stored.file, size)
        return part

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            if len(self._open) == _OPEN_FILES:
                self._close_oldest()
            stack = contextlib.ExitStack()
            self._mapped[path] = 0
            self._open[path] = stack, stack.enter_context(safe_open(str(path), framework="pt", device="cpu"))
        self._open.move_to_end(path)
        return self._open[path][1]

    def _count(self, path: Path, size: int) -> None:
        self._mapped[path] += size
        if self._mapped[path] > _MAPPED_BYTES:
            self._close(path)

    def _close_oldest(self) -> None:
        self._close(next(iter(self._open)))

    def _close(self, path: Path) -> None:
        stack, _ = self._open.pop(path)
        stack.close()
        del self._mapped[path]
