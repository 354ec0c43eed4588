"""The tensors of a Hugging Face directory, from the headers of its files: no number is read.

A safetensors file is 8 bytes with the header's length, the header (JSON: name -> dtype, shape, place), and the
numbers. So its headers tell in milliseconds whether a checkpoint of any size is whole.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.errors import CheckpointError, shorten
from megatron_rl.families.family import HfModel
from megatron_rl.json_text import parse_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
NUMBER_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
"""Number formats that are read, and bytes a number."""
_LONGEST_HEADER = 100_000_000
_LONGEST_NAME = 255
"""Characters of a file's name; of a longer one a file system says nothing but an error."""
_MALFORMED = (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError)
_PASSED_OVER = (".rotary_emb.inv_freq",)
"""Endings of tensors that older files have and every model computes itself."""


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor is and what it looks like."""

    file: Path
    dtype: str
    """In safetensors' words: ``BF16``."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all its numbers."""
        count = NUMBER_BYTES[self.dtype]
        for size in self.shape:
            count *= size
        return count


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint in ``directory``, in one file or in several with an index.

    Raises:
        CheckpointError: there is no safetensors file, one that the index names is missing, or one is damaged.
    """
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if single.is_file():
        return read_header(single)
    if not index.is_file():
        raise CheckpointError(_no_weights(directory))
    wanted = _read_index(index)
    headers: dict[str, dict[str, StoredTensor]] = {}
    for name in sorted(set(wanted.values())):
        if not (directory / name).is_file():
            raise CheckpointError(f"{directory / name} is missing, which {INDEX_FILE} names; download it again")
        headers[name] = read_header(directory / name)
    for tensor, name in wanted.items():
        if tensor not in headers[name]:
            raise CheckpointError(f"{directory / name} lacks {tensor}, which {INDEX_FILE} promises; download it again")
    return {tensor: headers[name][tensor] for tensor, name in wanted.items()}


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file.

    Raises:
        CheckpointError: it is truncated or not a safetensors file.
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _LONGEST_HEADER:
                raise ValueError("its header is too long")
            header = parse_json(file.read(length))
        header.pop("__metadata__", None)
        end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        tensors = {name: _stored(path, name, entry) for name, entry in header.items()}
    except _MALFORMED as error:
        raise CheckpointError(f"{path} is not a whole safetensors file ({error}); download it again") from error
    size = path.stat().st_size
    if size != end:
        raise CheckpointError(f"{path} has {size} bytes where its header says {end}: truncated; download it again")
    return tensors


def weight_problems(model: HfModel) -> list[str]:
    """One line for each way in which the files do not hold the model of ``config.json``."""
    try:
        stored = stored_tensors(model.directory)
    except CheckpointError as error:
        return [str(error)]
    expected, where = model.weights.tensors, model.directory
    missing = [name for name in expected if name not in stored]
    surplus = [name for name in stored if name not in expected and not _may_be_there(name)]
    shapes = [name for name, shape in expected.items() if name in stored and stored[name].shape != shape]
    formats = [name for name in expected if name in stored and stored[name].dtype not in NUMBER_BYTES]
    problems = []
    if missing:
        problems.append(
            f"{where}: tensor {missing[0]} is missing{_more(missing)}, which a {model.family.class_name} of this "
            "config.json has; take config.json and files of one model"
        )
    if surplus:
        problems.append(
            f"{where}: tensor {surplus[0]}{_more(surplus)} is none that a {model.family.class_name} of this "
            "config.json has, and would be ignored; take config.json and files of one model"
        )
    if shapes:
        name = shapes[0]
        problems.append(
            f"{where}: tensor {name} has shape {_by(stored[name].shape)}, config.json means {_by(expected[name])}"
            f"{_more(shapes)}; take config.json and files of one model"
        )
    if formats:
        name = formats[0]
        problems.append(
            f"{where}: tensor {name}{_more(formats)} is stored as {stored[name].dtype}; use a model in "
            f"{', '.join(NUMBER_BYTES)}"
        )
    return problems


def _may_be_there(name: str) -> bool:
    # A tied head is sometimes written although it is the embedding; transformers passes over it too.
    return name == "lm_head.weight" or name.endswith(_PASSED_OVER)


def _read_index(path: Path) -> Mapping[str, str]:
    try:
        wanted = dict(parse_json(path.read_text(encoding="utf-8"))["weight_map"])
        outside = next((name for name in wanted.values() if Path(name).name != name or len(name) > _LONGEST_NAME), None)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not an index of safetensors files ({error}); download it again") from error
    if outside is not None:
        raise CheckpointError(f"{path} names {shorten(outside)}, which is not a file beside it; download it again")
    return wanted


def _no_weights(directory: Path) -> str:
    pickled = next(_pickles(directory), None)
    if pickled is None:
        return f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}; give the directory that has the weights"
    return (
        f"{directory} has no safetensors, only {pickled}: a pickle can run code when it is read, so it is not read; "
        "convert it where you trust it, with transformers: AutoModelForCausalLM.from_pretrained(DIR)"
        ".save_pretrained(NEW_DIR)"
    )


def _pickles(directory: Path) -> Iterator[str]:
    for pattern in ("pytorch_model*.bin", "*.bin", "*.pt", "*.pth"):
        yield from sorted(path.name for path in directory.glob(pattern))


def _stored(path: Path, name: str, entry: Mapping[str, Any]) -> StoredTensor:
    tensor = StoredTensor(path, str(entry["dtype"]), tuple(int(size) for size in entry["shape"]))
    start, end = entry["data_offsets"]
    if tensor.dtype in NUMBER_BYTES and end - start != tensor.num_bytes:
        raise ValueError(f"{name} has {end - start} bytes for a shape of {_by(tensor.shape)}")
    return tensor


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "()"
