"""Files in Megatron's layout of one file a rank: ``iter_0000012/mp_rank_00/model_optim_rng.pt``.

They are pickles, which can run code, so torch's reduced unpickler alone reads them (``weights_only=True``).
"""

from __future__ import annotations

import argparse
import contextlib
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_rl.errors import CheckpointError
from megatron_rl.families.layout import own_name

MODEL_FILE = "model_optim_rng.pt"
OPTIMIZER_FILE = "distrib_optim.pt"
"""The distributed optimizer's parameters and moments, of all data-parallel ranks."""
_CLASS = re.compile(r"GLOBAL ([\w.]+)")
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


def rank_directory(directory: Path, tensor_rank: int) -> Path:
    """Where one tensor-parallel rank's files lie."""
    return directory / f"mp_rank_{tensor_rank:02d}"


def is_megatron_layout(directory: Path) -> bool:
    """Whether a checkpoint directory is of this layout; its name says so."""
    return directory.name.startswith("iter_")


def is_foreign(directory: Path) -> bool:
    """Whether Megatron-LM itself wrote it, in this or in another format: without checksums and the state of a run."""
    is_ours = any((directory / name).exists() for name in ("manifest.json", "run_state.json"))
    if not is_megatron_layout(directory) or is_ours:
        return False
    return (directory / "metadata.json").is_file() or any(directory.glob("mp_rank_*"))


def tensor_size(directory: Path) -> int:
    """Tensor-parallel ranks whose files there are.

    Raises:
        CheckpointError: there are none, a gap is among them, or they are also split in another way.
    """
    names = sorted(path.name for path in directory.glob("mp_rank_*"))
    if not names and is_foreign(directory):
        raise CheckpointError(
            f"checkpoint {str(directory)!r} was written by Megatron-LM in its format torch_dist or another for any "
            "topology, of which only --ckpt-format torch is read here; convert it with Megatron-LM's "
            "--ckpt-convert-format torch --ckpt-convert-save DIR on tensor-parallel ranks alone, or to Hugging Face's "
            "format and use --load-hf"
        )
    other = [name for name in names if re.fullmatch(r"mp_rank_\d{2}", name) is None]
    if other:
        raise CheckpointError(
            f"checkpoint {str(directory)!r} is split over pipeline or expert ranks too ({other[0]}), which is not "
            "built; convert it to tensor parallelism alone with Megatron-LM's tools"
        )
    if not names or names != [rank_directory(directory, rank).name for rank in range(len(names))]:
        found = ", ".join(names) or "none"
        raise CheckpointError(f"checkpoint {str(directory)!r} lacks files of a rank: it has {found}")
    return len(names)


def topology_problems(directory: Path, tensor_ranks: int) -> list[str]:
    """Why so many tensor-parallel ranks cannot load it, in at most one line. Raises as `tensor_size`."""
    if not is_megatron_layout(directory) or tensor_size(directory) == tensor_ranks:
        return []
    return [
        f"checkpoint {str(directory)!r} was saved with --tensor-model-parallel-size {tensor_size(directory)}, this run "
        f"has {tensor_ranks}; --ckpt-format torch holds one topology: use the same, or convert it to Hugging Face's "
        "format and use --load-hf"
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


def read_model_file(directory: Path, tensor_rank: int, mapped: bool = True) -> dict[str, Any]:
    """One rank's main file; ``model`` is there, and is its tensors by the names this project's model has.

    Raises:
        CheckpointError: see `read`.
    """
    path = rank_directory(directory, tensor_rank) / MODEL_FILE
    content = read(path, mapped)
    model = content.get("model") if isinstance(content, dict) else None
    if not isinstance(model, dict):
        raise CheckpointError(f"checkpoint file {str(path)!r} has no 'model': it is not one that Megatron writes")
    tensors = {own_name(str(name)): tensor for name, tensor in model.items() if torch.is_tensor(tensor)}
    return content | {"model": tensors}


def read_args(directory: Path) -> dict[str, Any]:
    """Megatron-LM's flags, of a checkpoint it wrote; empty where the file has none."""
    args = read_model_file(directory, 0).get("args")
    return vars(args) if isinstance(args, argparse.Namespace) else {}


def shards_reader(directory: Path) -> Callable[[str], Sequence[torch.Tensor]]:
    """A function from a parameter's name to its parts on all tensor-parallel ranks.

    Raises:
        CheckpointError: a file cannot be read; or, from the function, a rank does not have the parameter.
    """
    models = [read_model_file(directory, rank)["model"] for rank in range(tensor_size(directory))]

    def shards(name: str) -> Sequence[torch.Tensor]:
        if any(name not in model for model in models):
            raise CheckpointError(f"checkpoint {str(directory)!r} has no {name}; it is of another model")
        return [model[name] for model in models]

    return shards
