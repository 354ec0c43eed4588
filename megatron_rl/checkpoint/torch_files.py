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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_rl.errors import CheckpointError
from megatron_rl.families.layout import own_name
from megatron_rl.json_text import parse_json

MODEL_FILE = "model_optim_rng.pt"
_CLASS = re.compile(r"GLOBAL ([\w.]+)")
_NAME = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?(?:_(\d{3}))?")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"(.*\.local_experts\.)(\d+)(\..*)")
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
    found = [match for name in names if (match := _NAME.fullmatch(name))]
    sizes = _sizes(directory, names[0]) if names else {}
    is_shared = (sizes.get("expert_model_parallel_size") or 1) > 1
    stages = {match[2] for match in found if match[3] or not is_shared}
    counted = {"tensor_model_parallel_size": len({match[1] for match in found})}
    split = Split.of(sizes | counted | {"pipeline_model_parallel_size": len(stages)})
    if names != split.names:
        has = ", ".join(names) or "none"
        raise CheckpointError(f"checkpoint {str(directory)!r} lacks files of a rank: it has {has}")
    return split


def _sizes(directory: Path, name: str) -> dict[str, int | None]:
    """What the run says that saved it. ``mp_rank_00_000`` is a stage, or a rank of experts: names do not tell."""
    if not is_foreign(directory):
        try:
            return dict(parse_json((directory / "run_state.json").read_text())["world"])
        except (OSError, ValueError, KeyError, TypeError):  # `read_run_state` says what is wrong
            return {}
    args = read(directory / name / MODEL_FILE).get("args")
    given = ("expert_model_parallel_size", "expert_tensor_parallel_size")
    return {size: getattr(args, size, None) for size in given}


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
    args = read_models(directory / split_of(directory).names[0] / MODEL_FILE).get("args")
    return vars(args) if isinstance(args, argparse.Namespace) else {}


def shards_reader(directory: Path) -> Callable[[str], Sequence[torch.Tensor]]:
    """A function from a parameter's global name to its parts on all ranks that cut it.

    Raises:
        CheckpointError: a file cannot be read; or, from the function, a rank does not have the parameter.
    """
    split = split_of(directory)
    parts: dict[str, dict[int, torch.Tensor]] = {}
    for rank, expert_rank, part in split.places:
        stages = [read_models(directory / split.name(rank, s, expert_rank) / MODEL_FILE) for s in range(split.stages)]
        for name, tensor in _by_global_names(stages, expert_rank).items():
            is_shared = split.experts > 1 and ".local_experts." in name
            parts.setdefault(name, {}).setdefault(part if is_shared else rank, tensor)

    def shards(name: str) -> Sequence[torch.Tensor]:
        if name not in parts:
            raise CheckpointError(f"checkpoint {str(directory)!r} has no {name}; it is of another model")
        return [parts[name][rank] for rank in sorted(parts[name])]

    return shards


def _by_global_names(stages: Sequence[dict[str, Any]], expert_rank: int) -> dict[str, torch.Tensor]:
    """All tensors of one rank of each stage. In the model all stages' first chunks come before all second ones."""
    found: dict[str, torch.Tensor] = {}
    experts = {int(match[2]) for key in stages[0] for name in stages[0][key] if (match := _EXPERT.match(name))}
    names, first_layer = [key for key in stages[0] if re.fullmatch(r"model\d*", key)], 0
    for key in sorted(names, key=lambda name: int(name[5:] or 0)):
        for content in stages:
            layers = {int(match[1]) for name in content[key] if (match := _LAYER.match(name))}
            for name, tensor in content[key].items():
                match = _LAYER.match(name)
                given = f"decoder.layers.{first_layer + int(match[1])}.{name[match.end() :]}" if match else name
                if of_expert := _EXPERT.match(given):
                    given = f"{of_expert[1]}{expert_rank * len(experts) + int(of_expert[2])}{of_expert[3]}"
                found.setdefault(given, tensor)
            first_layer += len(layers)
    return found
