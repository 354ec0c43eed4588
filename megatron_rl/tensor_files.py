"""Safetensors: the tensors of a directory by their headers, parts of them, and files written a piece at a time.

The safetensors library checks and reads. It writes only what is in memory as a whole: an export of a 190 MB model took
260 MiB with it and takes 95 as written here. A file is 8 bytes with the header's length, the header (JSON: type, shape,
first and last byte of every tensor), and the tensors.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from megatron_rl.errors import CheckpointError, cut, shorten
from megatron_rl.user_files import read_json

if TYPE_CHECKING:  # headers are read where torch is not wanted
    import torch

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
"""Types that are known here, in safetensors' words, and bytes a number."""
_OPEN_FILES = 2
"""Tensors of one layer may lie in two files."""
_MAPPED_BYTES = 2**23
"""After so many bytes a file is closed, and opened again when needed: it is mapped, and pages that were read count
as this process's memory until then."""


@dataclass(frozen=True)
class TensorEntry:
    """The dtype and shape of a tensor."""

    dtype: str
    """In safetensors' words: ``BF16``."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all its numbers."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class StoredTensor(TensorEntry):
    """A tensor's entry and its place in a file."""

    file: Path


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """List every tensor of the checkpoint in ``directory``, in one file or several with an index; reads headers only.

    Raises:
        CheckpointError: there is no safetensors file, one that the index names is missing, or one is damaged.
    """
    if not directory.is_dir():
        raise CheckpointError(f"there is no directory {directory}; give one with config.json and *.safetensors")
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if single.is_file():
        return read_header(single)
    if not index.is_file():
        return read_header(_only_file(directory))
    wanted, found = _read_index(index), {}
    for name in sorted(set(wanted.values())):
        if not os.path.isfile(directory / name):
            raise CheckpointError(f"{directory / name} is missing, which {INDEX_FILE} names; fetch it again")
        for tensor, stored in read_header(directory / name).items():
            if tensor in found:
                raise CheckpointError(f"{directory}: {tensor!r} is in {found[tensor].file.name} and in {name}")
            found[tensor] = stored
    for tensor, name in wanted.items():
        if tensor not in found or found[tensor].file.name != name:
            raise CheckpointError(f"{directory / name} lacks {tensor}, which {INDEX_FILE} promises; fetch it again")
    return found


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Read the tensors of one file, in the order of their bytes.

    Raises:
        CheckpointError: it is truncated or not a safetensors file.
    """
    try:
        if not path.is_file():  # safe_open would wait for a pipe
            raise OSError("it is not a file")
        with safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.offset_keys()}
            return {name: StoredTensor(s.get_dtype(), tuple(s.get_shape()), path) for name, s in slices.items()}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} is not a whole safetensors file ({cut(str(error), 200)}): truncated or damaged; fetch it again"
        ) from error


def _only_file(directory: Path) -> Path:
    files = sorted(directory.glob("*.safetensors"))
    if len(files) == 1:
        return files[0]
    if files:
        raise CheckpointError(f"{directory} has {len(files)} safetensors files and no {INDEX_FILE}; fetch it")
    pickled = next((path.name for end in ("bin", "pt", "pth") for path in sorted(directory.glob(f"*.{end}"))), None)
    if pickled is None:
        raise CheckpointError(
            f"{directory} has no safetensors: neither {SINGLE_FILE} nor {INDEX_FILE}; give the directory that has the "
            "weights"
        )
    raise CheckpointError(
        f"{directory} has no safetensors, only {pickled}: a pickle can run code when it is read, so it is not read; "
        "convert it where you trust it, with transformers: AutoModelForCausalLM.from_pretrained(DIR)"
        ".save_pretrained(NEW_DIR)"
    )


def _read_index(path: Path) -> Mapping[str, str]:
    try:
        wanted = dict(read_json(path)["weight_map"])
        names = (name for name in wanted.values() if Path(name).name != name or not name.endswith(".safetensors"))
        outside = next(names, None)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not an index of safetensors files ({error}); fetch it again") from error
    if outside is not None:
        text = f"{path} names {shorten(outside)}, which is no safetensors file beside it; fetch it again"
        raise CheckpointError(text)
    return wanted


class TensorReader:
    """Parts of the tensors of one directory. A context manager: it keeps files open."""

    def __init__(self, directory: Path) -> None:
        self.stored = stored_tensors(directory)
        self._open: OrderedDict[Path, Any] = OrderedDict()
        self._mapped: dict[Path, int] = {}
        self.bytes_read = 0
        """Of all parts handed out."""

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()

    def read(
        self, name: str, rows: tuple[int, int] | None = None, columns: tuple[int, int] | None = None,
        index: int | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Read these rows (and columns) of a tensor, all without them, or of that one of a stack of matrices.

        As stored, in host memory.
        """
        path = self.stored[name].file
        place: Any = [] if index is None else [index]
        place += [slice(None) if part is None else slice(*part) for part in (rows, columns)]
        while place and place[-1] == slice(None):
            place.pop()
        place = tuple(place) or ...
        try:
            part = self._file(path).get_slice(name)[place]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: {name} cannot be read ({error})") from error
        size = part.numel() * part.element_size()
        self.bytes_read += size
        self._mapped[path] += size
        if self._mapped[path] > _MAPPED_BYTES:
            del self._open[path]
        return part

    def pieces(self, name: str, rows: int) -> Iterator[torch.Tensor]:
        """Yield a tensor from top to bottom, so many rows at a time; one without rows as it is."""
        shape = self.stored[name].shape
        if not shape:
            yield self.read(name)
        for start in range(0, shape[0] if shape else 0, rows):
            yield self.read(name, (start, min(start + rows, shape[0])))

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            if len(self._open) == _OPEN_FILES:
                self._open.popitem(last=False)
            self._mapped[path] = 0
            self._open[path] = safe_open(path, framework="pt")
        self._open.move_to_end(path)
        return self._open[path]


class TensorWriter:
    """Files whose tensors are known by type and shape beforehand and written piece by piece, in any order.

    A context manager. Raises CheckpointError, which names the file, when the disk is full or fails.
    """

    def __init__(self, directory: Path, files: Mapping[str, Mapping[str, TensorEntry]]) -> None:
        """``files`` are names and what each holds."""
        self._files: dict[Path, int] = {}
        """Their handles."""
        self._places: dict[str, tuple[Path, int, int]] = {}
        """Tensor -> its file, where its next number goes, and its end."""
        with contextlib.ExitStack() as opened:
            for name, entries in files.items():
                self._begin(directory / name, entries, opened)
            self._opened = opened.pop_all()

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._opened.close()
        unfinished = [name for name, (_, start, end) in self._places.items() if start != end]
        if kind is None and unfinished:
            raise ValueError(f"{unfinished[0]!r} was not written to its end")

    def append(self, name: str, values: torch.Tensor) -> None:
        """Write the next numbers of a tensor, in the type its entry says."""
        import torch

        raw = memoryview(values.contiguous().view(-1).view(torch.uint8).numpy())
        path, start, end = self._places[name]
        if start + len(raw) > end:
            raise ValueError(f"more than the {name!r} of the header")
        self._write(path, raw, start)
        self._places[name] = path, start + len(raw), end

    def _begin(self, path: Path, entries: Mapping[str, TensorEntry], opened: contextlib.ExitStack) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        places, end = {}, 0
        # The largest types first, as the library has it: loaders view the bytes and want them aligned.
        for name in sorted(entries, key=lambda name: (-ITEM_BYTES[entries[name].dtype], name)):
            entry, start = entries[name], end
            end += entry.num_bytes
            header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [start, end]}
            places[name] = start, end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        data = 8 + len(text)
        try:
            self._files[path] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except OSError as error:
            raise cannot_write(path, error) from error
        opened.callback(os.close, self._files[path])
        self._write(path, memoryview(len(text).to_bytes(8, "little") + text), 0)
        self._places |= {name: (path, data + start, data + end) for name, (start, end) in places.items()}

    def _write(self, path: Path, raw: memoryview, offset: int) -> None:
        try:
            while raw:
                written = os.pwrite(self._files[path], raw, offset)
                raw, offset = raw[written:], offset + written
        except OSError as error:
            raise cannot_write(path, error) from error


def write_index(directory: Path, files: Mapping[str, Mapping[str, TensorEntry]]) -> None:
    """Write the index of which file holds which tensor."""
    weight_map = {tensor: name for name, entries in files.items() for tensor in entries}
    total = sum(entry.num_bytes for entries in files.values() for entry in entries.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(directory / INDEX_FILE, index)


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Raises CheckpointError, which names the file."""
    try:
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise cannot_write(path, error) from error


def cannot_write(path: Path, error: OSError) -> CheckpointError:
    """Make one line of what the disk refused."""
    return CheckpointError(f"{path} cannot be written ({error.strerror}); free space or choose another directory")


def plan_files(entries: Mapping[str, TensorEntry], max_file_bytes: int) -> dict[str, dict[str, TensorEntry]]:
    """Map each file to its tensors, in order, none above ``max_file_bytes`` unless one tensor alone is."""
    groups: list[dict[str, TensorEntry]] = [{}]
    filled = 0
    for name, entry in entries.items():
        if groups[-1] and filled + entry.num_bytes > max_file_bytes:
            groups.append({})
            filled = 0
        groups[-1][name] = entry
        filled += entry.num_bytes
    if len(groups) == 1:
        return {SINGLE_FILE: groups[0]}
    return {f"model-{n:05d}-of-{len(groups):05d}.safetensors": group for n, group in enumerate(groups, 1)}
