"""Megatron-LM's format torch, a file a rank, converted into torch_dist, which is what a run reads.

    iter_0000012/mp_rank_00/model_optim_rng.pt    ``mp_rank_00_000_000``: tensor-parallel rank, then pipeline stage and
    iter_0000012/mp_rank_01/model_optim_rng.pt    expert-parallel rank where there are several

Weights and ``args`` are taken, the optimizer is not. ``args`` say how many ranks there were; how they cut a tensor
follows from its name.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner, FileSystemWriter, save
from torch.distributed.checkpoint.planner import WriteItem

from megatron_rl.atomic import cache_home, once, whole_directory
from megatron_rl.checkpoint.dist_files import write_common
from megatron_rl.checkpoint.pickled import read
from megatron_rl.config.megatron_args import read_args
from megatron_rl.errors import CheckpointError, one_line
from megatron_rl.families.layout import own_name

_FILES = "mp_rank_*/model_optim_rng.pt"
_KINDS = ("tensor", "pipeline", "expert")
_VERSION = 1
"""Of what a conversion writes."""
_BYTES_PER_S = 3e8
"""On one processor."""
_LAYER, _EXPERT = re.compile(r"(?<=decoder\.layers\.)\d+"), re.compile(r"(?<=\.local_experts\.)\d+")
_NUMBERED_EXPERT = re.compile(r"(.*\.experts\.)(linear_fc[12]\.(?:weight|bias))(\d+)")
"""Of Transformer Engine's grouped experts: ``experts.linear_fc1.weight3``."""
_STACKED_EXPERTS = re.compile(r"(.*\.mlp\.)experts\.weight([12])")
"""Of megatron-core's own grouped experts: all of a layer side by side, inputs first."""
_UNCUT = re.compile(r"norm\.|\.router\.|\.gate_weight$|\.(linear_proj|linear_fc2|out_proj)\.bias$")
_CUT_BY_COLUMNS = re.compile(r"\.(linear_proj|linear_fc2|out_proj)\.weight$")
"""All other parameters are cut by rows."""

Chunk = Mapping[str, torch.Tensor]
"""Tensors of some layers by name."""
Parts = dict[str, dict[int, torch.Tensor]]
"""A parameter's name in the whole model -> what each tensor-parallel rank has of it."""

logger = logging.getLogger(__name__)


def first_file(directory: Path) -> Path | None:
    """Return the file of the first rank; None in another format."""
    return min(directory.glob(_FILES), default=None)


def converted(directory: Path) -> Path:
    """Return the torch_dist directory of ``directory`` in the cache; see `convert`.

    Its name holds a digest of the names, sizes and times of the files, so changed files are converted anew.

    Raises:
        CheckpointError: as `convert`, or the cache cannot be written.
    """
    files = [(path, path.stat()) for path in sorted(directory.absolute().glob(_FILES))]
    facts = "".join(f"{path} {status.st_size} {status.st_mtime_ns}\n" for path, status in files)
    target = cache_home() / f"{directory.name}-{hashlib.sha256(facts.encode()).hexdigest()[:16]}-{_VERSION}"

    def write() -> None:
        size = sum(status.st_size for _, status in files)
        what = "%s: converting %.1f GB of Megatron-LM's format torch into %s, once: about %d s"
        logger.warning(what, directory, size / 1e9, target, 1 + size / _BYTES_PER_S)
        convert(directory, target)

    try:
        return once(target, write)
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {str(directory)!r} cannot be converted into {target} ({error.strerror}); set HF_HOME to a "
            "directory with room for its weights"
        ) from error


def convert(directory: Path, output: Path) -> None:
    """Write weights and ``args`` as torch_dist into ``output``, which appears once it is complete.

    Memory holds one parameter.

    Raises:
        CheckpointError: a file is absent, cannot be read or is not Megatron's, or ``output`` is there.
    """
    kinds = int | float | str | list | tuple | None
    try:
        parts, args = _read_parts(directory), read_args(first_file(directory))
        shapes = {name: {rank: part.to("meta") for rank, part in found.items()} for name, found in parts.items()}
        whole = {name: _joined(name, shapes) for name in shapes}
        with whole_directory(output, directory) as target:
            writer = FileSystemWriter(target, single_file_per_rank=True, thread_count=1, sync_files=False)
            with warnings.catch_warnings(action="ignore"):  # of a process that is alone
                save(whole, storage_writer=writer, planner=_Planner(parts), no_dist=True)
            plain = {name: value for name, value in args.items() if isinstance(value, kinds)}
            write_common(target, {"args": argparse.Namespace(**plain)})
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError, CheckpointException) as error:
        reason = one_line(f"{type(error).__name__}: {error}", 200)
        raise CheckpointError(f"checkpoint {str(directory)!r} cannot be converted into {output} ({reason})") from error


class _Planner(DefaultSavePlanner):
    """Plans with shapes, and joins the parts of a tensor when its turn comes to be written."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts = parts

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """Return the whole tensor."""
        return _joined(write_item.index.fqn, self._parts)


def _joined(name: str, parts: Parts) -> torch.Tensor:
    """Return a whole tensor. Ranks have rows of the gate projection above rows of the up projection."""
    own = [part for _, part in sorted(parts[name].items())]
    if len(own) == 1 or _UNCUT.search(name):
        return own[0]
    if _CUT_BY_COLUMNS.search(name):
        return torch.cat(own, 1)
    before, is_first_linear, _ = name.rpartition(".linear_fc1.")
    blocks = len(own[0]) // parts[f"{before}.linear_fc2.weight"][0].shape[1] if is_first_linear else 1
    return torch.cat([rows for block in zip(*(part.chunk(blocks) for part in own), strict=True) for rows in block])


def _read_parts(directory: Path) -> Parts:
    """Read the files of all ranks; tensors are mapped into memory, not held there."""
    args, parts = read_args(first_file(directory)), Parts()
    tensor, stages, experts = (args.get(f"{kind}_model_parallel_size") or 1 for kind in _KINDS)
    cut, names = args.get("expert_tensor_parallel_size") or tensor, set[str]()
    for place in range(max(tensor, experts * cut)):
        rank, expert_rank = place % tensor, place // cut % experts
        ends = [f"_{stage:03d}" * (stages > 1) + f"_{expert_rank:03d}" * (experts > 1) for stage in range(stages)]
        folders = [directory / f"mp_rank_{rank:02d}{end}" for end in ends]
        names |= {folder.name for folder in folders}
        chunks = [_read_chunks(folder / Path(_FILES).name, experts) for folder in folders]
        first_layer = 0
        for chunk in (chunk for each in zip(*chunks, strict=True) for chunk in each):  # the stages' first chunks first
            layers, local = (set(number.findall(" ".join(chunk))) for number in (_LAYER, _EXPERT))
            for name, part in chunk.items():
                name = _counted_from(first_layer, _LAYER, _counted_from(expert_rank * len(local), _EXPERT, name))
                parts.setdefault(name, {}).setdefault(place % cut if ".local_experts." in name else rank, part)
            first_layer += len(layers)
    if others := {path.name for path in directory.glob("mp_rank_*")} - names:
        raise CheckpointError(f"checkpoint {str(directory)!r} has {min(others)}, of which its args do not tell")
    return parts


def _counted_from(first: int, number: re.Pattern[str], name: str) -> str:
    return number.sub(lambda match: str(first + int(match[0])), name)


def _read_chunks(path: Path, expert_ranks: int) -> list[Chunk]:
    """Read a rank's weights, of each of its chunks of layers in the order of the forward pass.

    Raises:
        CheckpointError: see `read`.
    """
    content = read(path)
    keys = [key for key in content if re.fullmatch(r"model\d*", str(key))] if isinstance(content, dict) else []
    chunks = [dict(_weights(content[key], expert_ranks)) for key in sorted(keys, key=lambda key: int(key[5:] or 0))]
    if not any(chunks):
        raise CheckpointError(
            f"checkpoint file {str(path)!r} has no tensors in 'model', as megatron-core writes them; convert an older "
            "one with Megatron-LM's tools/checkpoint/convert.py --saver core"
        )
    return chunks


def _weights(model: Mapping[str, object], expert_ranks: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of one chunk, grouped experts one by one; without what is no weight."""
    for name, tensor in model.items():
        name = own_name(str(name))
        if not torch.is_tensor(tensor) or name.endswith("_extra_state"):
            continue
        if numbered := _NUMBERED_EXPERT.fullmatch(name):
            yield f"{numbered[1]}local_experts.{numbered[3]}.{numbered[2]}", tensor
        elif stacked := _STACKED_EXPERTS.fullmatch(name):
            all_experts, hidden = model[f"{stacked[1]}router.weight"].shape
            shape = (hidden, -1) if stacked[2] == "1" else (-1, hidden)
            for expert, weight in enumerate(tensor.view(all_experts // expert_ranks, *shape)):
                yield f"{stacked[1]}experts.local_experts.{expert}.linear_fc{stacked[2]}.weight", weight.t()
        else:
            yield name, tensor
