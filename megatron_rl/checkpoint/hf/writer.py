"""Writes safetensors files tensor by tensor: memory holds one tensor, whatever the size of a file.

safetensors' own ``save_file`` wants all tensors of a file at once.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import torch

from megatron_rl.families.files import INDEX_FILE, NUMBER_BYTES, SINGLE_FILE

DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_HEADER_ALIGNMENT = 8


class HfWriter:
    """Takes the tensors in the order of ``shapes``. A context manager: it keeps a file open."""

    def __init__(
        self, directory: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, max_file_bytes: int
    ) -> None:
        self._directory, self._dtype, self._shapes = directory, dtype, shapes
        self._files = plan_files({name: self._bytes(name) for name in shapes}, max_file_bytes)
        self._waiting = [(file, name) for file, names in self._files.items() for name in names]
        self._open: BinaryIO | None = None
        self._open_name = ""

    def __enter__(self) -> HfWriter:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._open is not None:
            self._open.close()
        if error is None:
            if self._waiting:
                raise ValueError(f"{self._waiting[0][1]} was never written")
            self._write_index()

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """The next tensor; converted to the files' number format."""
        file, expected = self._waiting.pop(0)
        if name != expected or tuple(tensor.shape) != self._shapes[name]:
            raise ValueError(f"{name} {tuple(tensor.shape)} where {expected} {self._shapes[expected]} was next")
        if file != self._open_name:
            self._begin(file)
        flat = tensor.to(self._dtype).contiguous().flatten()
        self._open.write(memoryview(flat.view(torch.uint8).numpy()))

    def _begin(self, file: str) -> None:
        if self._open is not None:
            self._open.close()
        self._open, self._open_name = (self._directory / file).open("wb"), file
        header, offset = {"__metadata__": {"format": "pt"}}, 0
        for name in self._files[file]:
            end = offset + self._bytes(name)
            header[name] = {
                "dtype": DTYPE_NAMES[self._dtype], "shape": list(self._shapes[name]), "data_offsets": [offset, end],
            }  # fmt: skip
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _HEADER_ALIGNMENT)
        self._open.write(struct.pack("<Q", len(text)) + text)

    def _bytes(self, name: str) -> int:
        return NUMBER_BYTES[DTYPE_NAMES[self._dtype]] * torch.Size(self._shapes[name]).numel()

    def _write_index(self) -> None:
        if list(self._files) == [SINGLE_FILE]:
            return
        total = sum(self._bytes(name) for name in self._shapes)
        weight_map = {name: file for file, names in self._files.items() for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (self._directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def plan_files(sizes: Mapping[str, int], max_file_bytes: int) -> dict[str, list[str]]:
    """File -> names, in order, none above ``max_file_bytes`` unless one tensor alone is."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if groups[-1] and filled + size > max_file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    if len(groups) == 1:
        return {SINGLE_FILE: groups[0]}
    return {f"model-{n:05d}-of-{len(groups):05d}.safetensors": names for n, names in enumerate(groups, 1)}
