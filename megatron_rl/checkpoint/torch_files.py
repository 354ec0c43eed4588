"""Files in Megatron's layout of one file a rank: ``iter_0000012/mp_rank_00/model_optim_rng.pt``.

With pipeline stages ``mp_rank_00_000``: tensor-parallel rank and stage. They are pickles, which can run code, so
torch's reduced unpickler alone reads them (``weights_only=True``).
"""

from __future__ import annotations

import argparse
import contextlib
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_rl.errors import CheckpointError
from megatron_rl.families.layout import own_name

MODEL_FILE = "model_optim_rng.pt"
OPTIMIZER_FILE = "distrib_optim.pt"
"""The distributed optimizer's parameters and moments, of all data-parallel ranks."""
_CLASS = re.compile(r"GLOBAL ([\w.]+)")
_NAME = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_PASSED_OVER = (
    "numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct", "numpy.ndarray", "numpy.dtype",
    "megatron.core.enums.ModelType", "megatron.core.transformer.enums.ModelType",
    "megatron.core.transformer.enums.AttnBackend", "megatron.core.transformer.enums.CudaGraphScope",
    "megatron.core.rerun_state_machine.RerunDiagnostic", "megatron.core.rerun_state_machine.RerunMode",
    "megatron.core.rerun_state_machine.RerunState", "_io.BytesIO", "pathlib.PosixPath", "signal.Signals",
)  # fmt: skip
"""What Megatron-LM's files have besides plain values, in ``args`` and random state; none of it is needed."""


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

    def name(self, tensor_rank: int, stage: int) -> str:
        """Of the directory with a rank's files. Example: ``mp_rank_01``, or with several stages ``mp_rank_01_000``."""
        return f"mp_rank_{tensor_rank:02d}" + (f"_{stage:03d}" if self.stages > 1 else "")

    @property
    def names(self) -> list[str]:
        """Of all directories."""
        return sorted(self.name(rank, stage) for rank in range(self.tensor) for stage in range(self.stages))

    def __str__(self) -> str:
        stages = f" --pipeline-model-parallel-size {self.stages}" if self.stages > 1 else ""
        return f"--tensor-model-parallel-size {self.tensor}{stages}"


def is_megatron_layout(directory: Path) -> bool:
    """Whether a checkpoint directory is of this layout; its name says so."""
    return directory.name.startswith("iter_")


def is_foreign(directory: Path) -> bool:
    """Whether Megatron-LM itself wrote it, in this or in another format: without checksums and the state of a run."""
    is_ours = any((directory / name).exists() for name in ("manifest.json", "run_state.json"))
    if not is_megatron_layout(directory) or is_ours:
        return False
    return (directory / "metadata.json").is_file() or any(directory.glob("mp_rank_*"))


def split_of(directory: Path) -> Split:
    """Of a checkpoint, by the names of what it has.

    Raises:
        CheckpointError: there is nothing, a gap is in it, or it is also split in another way.
    """
    names = sorted(path.name for path in directory.glob("mp_rank_*"))
    if not names and is_foreign(directory):
        raise CheckpointError(
            f"checkpoint {str(directory)!r} was written by Megatron-LM in its format torch_dist or another for any "
            "topology, of which only --ckpt-format torch is read here; convert it with Megatron-LM's "
            "--ckpt-convert-format torch --ckpt-convert-save DIR, or to Hugging Face's format and use --load-hf"
        )
    found = [_NAME.fullmatch(name) for name in names]
    other = [name for name, match in zip(names, found, strict=True) if match is None]
    if other or (names and _is_split_by_experts(directory / names[0])):
        raise CheckpointError(
            f"checkpoint {str(directory)!r} is split over expert-parallel ranks too ({(other or names)[0]}), which is "
            "not built; convert it to tensor and pipeline parallelism alone with Megatron-LM's tools"
        )
    ranks, stages = ({int(match[part] or 0) for match in found} for part in (1, 2))
    split = Split(len(ranks), len(stages))
    if not names or names != split.names:
        has = ", ".join(names) or "none"
        raise CheckpointError(f"checkpoint {str(directory)!r} lacks files of a rank: it has {has}")
    return split


def _is_split_by_experts(rank: Path) -> bool:
    """``mp_rank_00_000`` is a stage, or a rank of experts: what tells them apart is in Megatron-LM's flags alone."""
    if rank.name.count("_") == 2 or not is_foreign(rank.parent):
        return False
    args = read(rank / MODEL_FILE).get("args")
    return getattr(args, "expert_model_parallel_size", 1) > 1


def topology_problems(directory: Path, split: Split) -> list[str]:
    """Why ranks of this ``split`` cannot load it, in at most one line. Raises as `split_of`."""
    if not is_megatron_layout(directory) or split_of(directory) == split:
        return []
    return [
        f"checkpoint {str(directory)!r} was saved with {split_of(directory)}, this run has {split}; --ckpt-format "
        "torch holds one topology: use the same, or convert it to Hugging Face's format and use --load-hf"
    ]


def read(path: Path, mapped: bool = True) -> Any:
    """What a file holds.

    Args:
        mapped: tensors come from the file whenever they are used; False for those that outlive this.

    Raises:
        CheckpointError: it cannot be read, or has objects of a class that is not allowed; names file and class.
    """
    try:
        with _only_ours_allowed():
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
        raise CheckpointError(f"checkpoint file {str(path)!r} cannot be read ({reason})") from error


@contextlib.contextmanager
def _only_ours_allowed() -> Iterator[None]:
    """The list of classes that torch may make is the process's, and megatron-core adds 16 to it.

    A ``Namespace``, Megatron-LM's ``args``, has no positional argument and no ``__setstate__``: all the unpickler can
    do with it is set attributes of a new object. Of `_PASSED_OVER` not even the class is used.
    """
    others = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals([argparse.Namespace, *((_Nothing, name) for name in _PASSED_OVER)])
    try:
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
    models = {key: value for key, value in content.items() if re.fullmatch(r"model\d*", str(key))}
    named = {
        key: {own_name(str(name)): tensor for name, tensor in model.items() if torch.is_tensor(tensor)}
        for key, model in models.items()
    }
    return content | named


def read_args(directory: Path) -> dict[str, Any]:
    """Megatron-LM's flags, of a checkpoint it wrote; empty where the file has none."""
    args = read_models(directory / split_of(directory).name(0, 0) / MODEL_FILE).get("args")
    return vars(args) if isinstance(args, argparse.Namespace) else {}


def shards_reader(directory: Path) -> Callable[[str], Sequence[torch.Tensor]]:
    """A function from a parameter's global name to its parts on all tensor-parallel ranks.

    Raises:
        CheckpointError: a file cannot be read; or, from the function, a rank does not have the parameter.
    """
    split = split_of(directory)
    names = [[split.name(rank, stage) for stage in range(split.stages)] for rank in range(split.tensor)]
    ranks = [_by_global_names([read_models(directory / name / MODEL_FILE) for name in stages]) for stages in names]

    def shards(name: str) -> Sequence[torch.Tensor]:
        if any(name not in tensors for tensors in ranks):
            raise CheckpointError(f"checkpoint {str(directory)!r} has no {name}; it is of another model")
        return [tensors[name] for tensors in ranks]

    return shards


def _by_global_names(stages: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """All tensors of one tensor-parallel rank. In the model all stages' first chunks come before all second ones."""
    found: dict[str, torch.Tensor] = {}
    names, first_layer = [key for key in stages[0] if re.fullmatch(r"model\d*", key)], 0
    for key in sorted(names, key=lambda name: int(name[5:] or 0)):
        for content in stages:
            layers = {int(match[1]) for name in content[key] if (match := _LAYER.match(name))}
            for name, tensor in content[key].items():
                match = _LAYER.match(name)
                given = f"decoder.layers.{first_layer + int(match[1])}.{name[match.end() :]}" if match else name
                found.setdefault(given, tensor)
            first_layer += len(layers)
    return found
