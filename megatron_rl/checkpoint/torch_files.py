"""Files in Megatron's layout of one file a rank: ``iter_0000012/mp_rank_00/model_optim_rng.pt``.

With pipeline stages ``mp_rank_00_000``: tensor-parallel rank and stage; with experts over ranks the number of the
expert-parallel rank comes last, ``mp_rank_00_000_000`` or, without stages, ``mp_rank_00_000``. They are pickles, which
can run code, so torch's reduced unpickler alone reads them (``weights_only=True``).
"""

from __future__ import annotations

import argparse
import contextlib
import pickle
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_rl.errors import CheckpointError, shorten
from megatron_rl.families import Parameter
from megatron_rl.families.blocks import EMBEDDING
from megatron_rl.families.layout import own_name

MODEL_FILE = "model_optim_rng.pt"
RELEASE = "release"
"""The name of weights that Megatron-LM's tools made; it has no step."""
_CLASS = re.compile(r"GLOBAL ([\w.]+)")
_LAYER = re.compile(r"(?<=decoder\.layers\.)\d+")
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+")
_NUMBERED_EXPERT = re.compile(r"(.*\.experts\.)(linear_fc[12]\.(?:weight|bias))(\d+)")
"""Of Transformer Engine's grouped experts: ``experts.linear_fc1.weight3``."""
_STACKED_EXPERTS = re.compile(r"(.*\.mlp\.)experts\.weight([12])")
"""Of megatron-core's own grouped experts: all of a layer side by side, inputs first."""
_PASSED_OVER = (
    "numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct", "numpy.ndarray", "numpy.dtype",
    "_io.BytesIO", "pathlib.PosixPath", "signal.Signals",
)  # fmt: skip
"""What Megatron-LM's files have besides plain values and its own enums, in ``args`` and random state; none of it is
needed."""


class _Nothing:
    """Stands where a file has an object of another library; keeps nothing of it."""

    def __init__(self, *values: object) -> None:
        """Passes over what it is made of."""

    def __setstate__(self, state: object) -> None:
        """Passes over what it would hold."""


@dataclass(frozen=True)
class Split:
    """How ranks share the model whose files these are."""

    tensor: int = 1
    stages: int = 1
    experts: int = 1
    """Expert-parallel ranks."""
    cut: int = 1
    """Ranks that share each expert; 1 without expert-parallel ranks."""

    @classmethod
    def of(cls, sizes: Mapping[str, int | None]) -> Split:
        """By Megatron's names: ``tensor_model_parallel_size`` and so on; what is absent is 1."""
        tensor = sizes.get("tensor_model_parallel_size") or 1
        experts = sizes.get("expert_model_parallel_size") or 1
        cut = (sizes.get("expert_tensor_parallel_size") or tensor) if experts > 1 else 1
        return cls(tensor, sizes.get("pipeline_model_parallel_size") or 1, experts, cut)

    @property
    def places(self) -> list[tuple[int, int, int]]:
        """Tensor-parallel rank, expert-parallel rank and part of an expert, of the ranks that hold a stage once."""
        ranks = range(max(self.tensor, self.experts * self.cut))
        return [(rank % self.tensor, rank // self.cut % self.experts, rank % self.cut) for rank in ranks]

    def name(self, tensor_rank: int, stage: int, expert_rank: int = 0) -> str:
        """Of the directory with a rank's files. Example: ``mp_rank_01``, or with several stages ``mp_rank_01_000``."""
        numbers = [stage] * (self.stages > 1) + [expert_rank] * (self.experts > 1)
        return f"mp_rank_{tensor_rank:02d}" + "".join(f"_{number:03d}" for number in numbers)

    @property
    def names(self) -> list[str]:
        """Of all directories."""
        return sorted({self.name(rank, stage, e) for rank, e, _ in self.places for stage in range(self.stages)})

    def __str__(self) -> str:
        sizes = {"tensor-model": self.tensor, "pipeline-model": self.stages, "expert-model": self.experts}
        sizes |= {"expert-tensor": self.cut} if self.experts > 1 else {}
        given = [name for name, size in sizes.items() if size > 1 or name in ("tensor-model", "expert-tensor")]
        return " ".join(f"--{name}-parallel-size {sizes[name]}" for name in given)


def is_megatron_layout(directory: Path) -> bool:
    """Whether a checkpoint directory is of this layout; its name says so."""
    return directory.name.startswith("iter_") or directory.name == RELEASE


def has_rank_files(directory: Path) -> bool:
    """Whether there is a file a rank."""
    return any(directory.glob("mp_rank_*"))


def split_of(directory: Path) -> Split:
    """Of a checkpoint, by the names of what it has.

    Raises:
        CheckpointError: there is nothing, a gap is in it, or it is also split in another way.
    """
    names = sorted(path.name for path in directory.glob("mp_rank_*"))
    numbers = zip(*(name.split("_")[2:] for name in names), strict=False)
    tensor, *others = [len(set(column)) for column in numbers] or [1]
    stages, experts = (*others, 1, 1)[:2]
    if len(others) == 1 and _is_of_experts(directory / names[-1]):
        stages, experts = 1, stages
    for cut in range(1, tensor + 1 if experts > 1 else 2):
        split = Split(tensor, stages, experts, cut)
        if names == split.names:
            return split
    has = ", ".join(names) or "none"
    raise CheckpointError(f"checkpoint {str(directory)!r} lacks files of a rank: it has {has}")


def _is_of_experts(last: Path) -> bool:
    """``mp_rank_00_001`` is a stage, or a rank of experts, which has an embedding as all of them have."""
    if last.name.endswith("_000"):
        return False
    return any(EMBEDDING in model for model in _models(read_models(last / MODEL_FILE)).values())


def topology_problems(directory: Path, split: Split) -> list[str]:
    """Why ranks of this ``split`` cannot load it, in at most one line. Raises as `split_of`."""
    if not is_megatron_layout(directory) or split_of(directory) == split:
        return []
    return [
        f"checkpoint {str(directory)!r} was saved with {split_of(directory)}, this run has {split}; its "
        "optimizer state is of one topology: use the same, or take its weights alone with --pretrained-checkpoint"
    ]


def read(path: Path, mapped: bool = True) -> Any:
    """What a file holds.

    Args:
        mapped: tensors come from the file whenever they are used; False for those that outlive this.

    Raises:
        CheckpointError: it cannot be read, or has objects of a class that is not allowed; names file and class.
    """
    try:
        with _only_ours_allowed(path):
            return torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)
    except pickle.UnpicklingError as error:
        found = _CLASS.search(str(error))
        reason = f"it names {found[1]}, which is not allowed" if found else "its objects are not allowed"
        raise CheckpointError(
            f"checkpoint file {str(path)!r} is not plain data ({reason}) and nothing of it was executed; where you "
            "trust it, load and save it again with tensors and plain values alone"
        ) from error
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
        if path.is_file() and not zipfile.is_zipfile(path):  # of which torch's own messages say little
            reason = "it is cut short, or not one that torch.save wrote"
        raise CheckpointError(f"checkpoint file {str(path)!r} cannot be read ({reason})") from error


@contextlib.contextmanager
def _only_ours_allowed(path: Path) -> Iterator[None]:
    """The list of classes that torch may make is the process's, and megatron-core adds 16 to it.

    A ``Namespace``, Megatron-LM's ``args``, has no positional argument and no ``__setstate__``: all the unpickler can
    do with it is set attributes of a new object. Of `_PASSED_OVER` and of megatron's enums not even the class is used.
    """
    others = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        named = torch.serialization.get_unsafe_globals_in_checkpoint(path)  # by name alone, nothing is imported
        passed_over = [*_PASSED_OVER, *(name for name in named if name.startswith("megatron."))]
        torch.serialization.add_safe_globals([argparse.Namespace, *((_Nothing, name) for name in passed_over)])
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(others)


def read_models(path: Path, mapped: bool = True) -> dict[str, Any]:
    """A rank's main file, where ``model``, or ``model0``, ``model1`` ... of interleaved stages, are tensors by name.

    Names are those of this project's model; layers are counted from 0 in each.

    Raises:
        CheckpointError: see `read`.
    """
    content = read(path, mapped)
    is_one = isinstance(content, dict) and any(isinstance(content.get(key), dict) for key in ("model", "model0"))
    if not is_one:
        raise CheckpointError(f"checkpoint file {str(path)!r} has no 'model': it is not one that Megatron writes")
    named = {
        key: {own_name(str(name)): tensor for name, tensor in model.items() if torch.is_tensor(tensor)}
        for key, model in _models(content).items()
    }
    for key, model in named.items():
        if content[key] and not model:
            raise CheckpointError(
                f"checkpoint file {str(path)!r} has no tensor under {key!r}, which has "
                f"{shorten(list(content[key]))}: Megatron-LM's models of before megatron-core are "
                "not read; convert it with its tools/checkpoint/convert.py --saver core"
            )
    return content | named


def _models(content: Mapping[Any, Any]) -> dict[str, Any]:
    """In the order of the forward pass of one rank."""
    names = [key for key in map(str, content) if re.fullmatch(r"model\d*", key)]
    return {name: content[name] for name in sorted(names, key=lambda name: int(name[5:] or 0))}


class RankFiles:
    """The weights in a directory with a file a rank; see `StoredWeights`. Tensors are read as they are asked for.

    Raises:
        CheckpointError: a file is absent or cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        split = split_of(directory)
        self._parts: dict[str, dict[int, torch.Tensor]] = {}
        for rank, expert_rank, part in split.places:
            files = [directory / split.name(rank, stage, expert_rank) / MODEL_FILE for stage in range(split.stages)]
            for name, tensor in _by_global_names([read_models(path) for path in files], expert_rank, split.experts):
                is_shared = split.experts > 1 and ".local_experts." in name
                self._parts.setdefault(name, {}).setdefault(part if is_shared else rank, tensor)

    @property
    def names(self) -> set[str]:
        """Of all parameters."""
        return set(self._parts)

    def shape(self, parameter: Parameter) -> tuple[int, ...]:
        """Of the whole parameter."""
        parts = self._parts_of(parameter)
        shape = list(parts[0].shape)
        shape[1 if parameter.cut == "columns" else 0] *= len(parts)
        return tuple(shape)

    def dtype(self, name: str) -> torch.dtype:
        """The stored number format."""
        return next(iter(self._parts[name].values())).dtype

    def read(self, parameter: Parameter, start: int, stop: int) -> torch.Tensor:
        """Rows ``start`` to ``stop`` of the whole parameter, within one block; columns where it is cut by columns."""
        parts, dimension = self._parts_of(parameter), 1 if parameter.cut == "columns" else 0
        share = parts[0].shape[dimension] // parameter.blocks  # of a block, on each rank
        block, start = divmod(start, share * len(parts)) if start else (0, 0)
        stop -= block * share * len(parts)
        found = []
        for rank, part in enumerate(parts):
            first, last = max(start - rank * share, 0), min(stop - rank * share, share)
            if first < last:
                found.append(part.narrow(dimension, block * share + first, last - first))
        return torch.cat(found, dimension)

    def _parts_of(self, parameter: Parameter) -> list[torch.Tensor]:
        parts = [part for _, part in sorted(self._parts[parameter.name].items())]
        is_whole = parameter.cut is None or tuple(parts[0].shape) == parameter.shape  # experts need not be cut
        return parts[:1] if is_whole else parts


def _by_global_names(
    stages: Sequence[dict[str, Any]], expert_rank: int, expert_ranks: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of one rank of each stage. In the model all stages' first chunks come before all second ones."""
    first_layer = 0
    for key in _models(stages[0]):
        for content in stages:
            tensors = dict(_singly(content[key], expert_ranks))
            first_expert = expert_rank * _count(_EXPERT, tensors)
            for name, tensor in tensors.items():
                yield _counted_from(first_expert, _EXPERT, _counted_from(first_layer, _LAYER, name)), tensor
            first_layer += _count(_LAYER, tensors)


def _count(number: re.Pattern[str], names: Iterable[str]) -> int:
    return len({match[0] for name in names if (match := number.search(name))})


def _counted_from(first: int, number: re.Pattern[str], name: str) -> str:
    return number.sub(lambda match: str(first + int(match[0])), name)


def _singly(model: Mapping[str, torch.Tensor], expert_ranks: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of one chunk, grouped experts under the names of single ones; without what is no weight."""
    for name, tensor in model.items():
        if name.endswith("_extra_state"):
            continue
        if numbered := _NUMBERED_EXPERT.fullmatch(name):
            yield f"{numbered[1]}local_experts.{numbered[3]}.{numbered[2]}", tensor
        elif stacked := _STACKED_EXPERTS.fullmatch(name):
            all_experts, hidden = model[f"{stacked[1]}router.weight"].shape
            count = all_experts // expert_ranks
            stack = tensor.view(count, hidden, -1) if stacked[2] == "1" else tensor.view(count, -1, hidden)
            for expert, weight in enumerate(stack):
                yield f"{stacked[1]}experts.local_experts.{expert}.linear_fc{stacked[2]}.weight", weight.t()
        else:
            yield name, tensor
