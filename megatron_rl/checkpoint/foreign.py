"""Directories with Megatron's names, ``iter_0000100/`` and ``release/``: Megatron-LM's.

They are torch_dist (see `dist_files`), or have a file a rank, ``iter_0000012/mp_rank_00/model_optim_rng.pt``: with
pipeline stages ``mp_rank_00_000``, tensor-parallel rank and stage; with experts over ranks the number of the
expert-parallel rank comes last, ``mp_rank_00_000_000`` or, without stages, ``mp_rank_00_000``.

Of Megatron-LM's only weights are taken. It writes in place and without checksums, so only what its pointer names is
complete for sure.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_rl.checkpoint.dist_files import DistFiles
from megatron_rl.checkpoint.pickled import read
from megatron_rl.errors import CheckpointError, shorten
from megatron_rl.families.layout import own_name
from megatron_rl.families.parts import EMBEDDING
from megatron_rl.user_files import read_json

MODEL_FILE = "model_optim_rng.pt"
RELEASE = "release"
"""The name of weights that Megatron-LM's tools made; it has no step."""
_COMMON, _FORMAT, _PARTS = "common.pt", "metadata.json", ".metadata"
ONLY_BUILT: Mapping[str, Any] = {
    "multi_latent_attention": False, "rotary_interleaved": False, "window_size": None, "softmax_type": "vanilla",
    "qk_l2_norm": False, "no_rope_freq": None, "attention_output_gate": False, "experimental_attention_variant": None,
    "squared_relu": False, "quick_geglu": False, "openai_gelu": False, "glu_linear_offset": 0.0,
    "activation_func_clamp_value": None,
    "moe_apply_probs_on_input": False, "mtp_num_layers": None,
}  # fmt: skip
"""Flags of Megatron-LM with the one value that is built here: with another the same weights are another model."""


@dataclass(frozen=True)
class Topology:
    """The parallel layout of the model whose files these are."""

    tensor: int = 1
    stages: int = 1
    experts: int = 1
    """Expert-parallel ranks."""
    cut: int = 1
    """Ranks that share each expert; 1 without expert-parallel ranks."""

    @classmethod
    def of(cls, sizes: Mapping[str, int | None]) -> Topology:
        """Read the sizes from Megatron's names, ``tensor_model_parallel_size`` and so on; what is absent is 1."""
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
        """Name the directory of a rank's files. Example: ``mp_rank_01``, or with several stages ``mp_rank_01_000``."""
        numbers = [stage] * (self.stages > 1) + [expert_rank] * (self.experts > 1)
        return f"mp_rank_{tensor_rank:02d}" + "".join(f"_{number:03d}" for number in numbers)

    @property
    def names(self) -> list[str]:
        """List the names of all directories."""
        return sorted({self.name(rank, stage, e) for rank, e, _ in self.places for stage in range(self.stages)})

    def __str__(self) -> str:
        sizes = {"tensor-model": self.tensor, "pipeline-model": self.stages, "expert-model": self.experts}
        sizes |= {"expert-tensor": self.cut} if self.experts > 1 else {}
        given = [name for name, size in sizes.items() if size > 1 or name in ("tensor-model", "expert-tensor")]
        return " ".join(f"--{name}-parallel-size {sizes[name]}" for name in given)


def has_rank_files(directory: Path) -> bool:
    """Return whether there is a file a rank."""
    return any(directory.glob("mp_rank_*"))


def topology_of(directory: Path) -> Topology:
    """Read the parallel sizes of a checkpoint from its file names.

    Raises:
        CheckpointError: there is nothing, a gap is in it, or it is also of another topology.
    """
    names = sorted(path.name for path in directory.glob("mp_rank_*"))
    numbers = zip(*(name.split("_")[2:] for name in names), strict=False)
    tensor, *others = [len(set(column)) for column in numbers] or [1]
    stages, experts = (*others, 1, 1)[:2]
    if len(others) == 1 and _is_of_experts(directory / names[-1]):
        stages, experts = 1, stages
    for cut in range(1, tensor + 1 if experts > 1 else 2):
        topology = Topology(tensor, stages, experts, cut)
        if names == topology.names:
            return topology
    has = ", ".join(names) or "none"
    raise CheckpointError(f"checkpoint {str(directory)!r} lacks files of a rank: it has {has}")


def _is_of_experts(last: Path) -> bool:
    """``mp_rank_00_001`` is a stage, or a rank of experts, which has an embedding as all of them have."""
    if last.name.endswith("_000"):
        return False
    return any(EMBEDDING in model for model in chunks_of(read_models(last / MODEL_FILE)).values())


def read_models(path: Path) -> dict[str, Any]:
    """Read a rank's main file, where ``model``, or ``model0``, ``model1`` ... of stages, are tensors by name.

    Names are those of this project's model; layers are counted from 0 in each.

    Raises:
        CheckpointError: see `read`.
    """
    content = read(path)
    is_one = isinstance(content, dict) and any(isinstance(content.get(key), dict) for key in ("model", "model0"))
    if not is_one:
        raise CheckpointError(f"checkpoint file {str(path)!r} has no 'model': it is not one that Megatron writes")
    named = {
        key: {own_name(str(name)): tensor for name, tensor in model.items() if torch.is_tensor(tensor)}
        for key, model in chunks_of(content).items()
    }
    for key, model in named.items():
        if content[key] and not model:
            raise CheckpointError(
                f"checkpoint file {str(path)!r} has no tensor under {key!r}, which has "
                f"{shorten(list(content[key]))}: Megatron-LM's models of before megatron-core are "
                "not read; convert it with its tools/checkpoint/convert.py --saver core"
            )
    return content | named


def chunks_of(content: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the chunks in the order of the forward pass of one rank."""
    names = [key for key in map(str, content) if re.fullmatch(r"model\d*", key)]
    return {name: content[name] for name in sorted(names, key=lambda name: int(name[5:] or 0))}


# -- of Megatron-LM itself ---------------------------------------------------------------------------


def is_foreign(directory: Path) -> bool:
    """Return whether Megatron-LM itself wrote it, without checksums and the state of a run; its name says so."""
    if not (directory.name.startswith("iter_") or directory.name == RELEASE):
        return False
    return has_rank_files(directory) or any((directory / name).is_file() for name in (_FORMAT, _PARTS))


def check_files(directory: Path) -> None:
    """See whether it is in a format that is read, and all there.

    Raises:
        CheckpointError: it is not; names the format, or what is missing.
    """
    if has_rank_files(directory):
        topology_of(directory)
        return
    path = directory / _FORMAT
    kind = "fsdp_dtensor or torch_dcp"
    if path.is_file():
        try:
            kind = read_json(path)["sharded_backend"]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"checkpoint file {str(path)!r} cannot be read ({error})") from error
    if kind != "torch_dist":
        raise CheckpointError(
            f"checkpoint {str(directory)!r} was written by Megatron-LM in its format {shorten(kind)}, of which only "
            "torch_dist and torch are read here; save it with --ckpt-format torch_dist, or convert it to Hugging "
            "Face's format and use --load-hf"
        )
    DistFiles(directory)


def read_args(directory: Path) -> dict[str, Any]:
    """Read Megatron-LM's flags; empty where the checkpoint does not have them.

    Raises:
        CheckpointError: they cannot be read.
    """
    path = directory / _COMMON
    if has_rank_files(directory):
        path = directory / topology_of(directory).names[0] / MODEL_FILE
    elif not path.is_file():  # of megatron-core 0.19, or written without
        return {}
    content = read(path)
    args = content.get("args") if isinstance(content, dict) else None
    return vars(args) if isinstance(args, argparse.Namespace) else {}


def unbuilt(directory: Path) -> Iterator[str]:
    """Yield one line for each flag by which it is a model that is not built here, however its tensors are called."""
    args = read_args(directory)
    wrong = {name: args[name] for name, value in ONLY_BUILT.items() if args.get(name, value) not in (value, None)}
    for name, value in wrong.items():
        yield (
            f"checkpoint {str(directory)!r} was made with {name} {shorten(value)}, which is not built here; take a "
            "model without it"
        )
