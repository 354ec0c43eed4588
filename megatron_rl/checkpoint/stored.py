"""The weights of a checkpoint by their names in the whole model, whatever ranks and files they lie in.

So any layout takes them: a rank reads the rows or columns that it holds.

    embedding of 64 rows, stored by 4 ranks      0-15 | 16-31 | 32-47 | 48-63
    the second of 2 ranks reads                                 32-63
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_rl.checkpoint.dist_files import DistFiles
from megatron_rl.checkpoint.foreign import MODEL_FILE, chunks_of, has_rank_files, read_models, topology_of
from megatron_rl.checkpoint.saving import succeed_on_all_ranks
from megatron_rl.errors import CheckpointError
from megatron_rl.families import Architecture, ModelLayout, Parameter
from megatron_rl.families.parts import EMBEDDING, HEAD
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.platform.groups import ParallelGroups

_NUMBERS = (torch.float32, torch.bfloat16, torch.float16)
_LAYER = re.compile(r"(?<=decoder\.layers\.)\d+")
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+")
_NUMBERED_EXPERT = re.compile(r"(.*\.experts\.)(linear_fc[12]\.(?:weight|bias))(\d+)")
"""Of Transformer Engine's grouped experts: ``experts.linear_fc1.weight3``."""
_STACKED_EXPERTS = re.compile(r"(.*\.mlp\.)experts\.weight([12])")
"""Of megatron-core's own grouped experts: all of a layer side by side, inputs first."""


class RankFiles:
    """The weights in a directory with a file a rank; see `StoredWeights`. Tensors are read as they are asked for.

    Raises:
        CheckpointError: a file is absent or cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        topology = topology_of(directory)
        self._parts: dict[str, dict[int, torch.Tensor]] = {}
        for rank, expert_rank, part in topology.places:
            folders = [directory / topology.name(rank, stage, expert_rank) for stage in range(topology.stages)]
            stages = [read_models(folder / MODEL_FILE) for folder in folders]
            for name, tensor in _by_global_names(stages, expert_rank, topology.experts):
                is_shared = topology.experts > 1 and ".local_experts." in name
                self._parts.setdefault(name, {}).setdefault(part if is_shared else rank, tensor)
        self.names = set(self._parts)
        """Of all parameters."""

    def shape(self, parameter: Parameter) -> tuple[int, ...]:
        """Return the shape of the unsharded parameter."""
        parts = self._parts_of(parameter)
        shape = list(parts[0].shape)
        shape[1 if parameter.cut == "columns" else 0] *= len(parts)
        return tuple(shape)

    def dtype(self, name: str) -> torch.dtype:
        """Return the stored number format."""
        return next(iter(self._parts[name].values())).dtype

    def read(self, parameter: Parameter, start: int, stop: int) -> torch.Tensor:
        """Read rows ``start`` to ``stop`` of the parameter, within one block; columns where it is cut by columns."""
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


StoredWeights = DistFiles | RankFiles
"""Both have ``names``, and by them ``shape(parameter)``, ``dtype(name)`` and ``read(parameter, start, stop)``."""


def open_weights(directory: Path) -> StoredWeights:
    """Open the weights of a checkpoint directory, in Megatron's format torch or in torch_dist.

    Raises:
        CheckpointError: files are missing or damaged.
    """
    return RankFiles(directory) if has_rank_files(directory) else DistFiles(directory)


def load_weights(directory: Path, policy: PolicyModel, groups: ParallelGroups) -> None:
    """Fill the model, in any layout; collective over the job.

    Raises:
        CheckpointError: on every rank; the checkpoint is damaged, or of another model.
    """
    succeed_on_all_ranks(lambda: _fill(directory, policy, groups))


@torch.no_grad()
def _fill(directory: Path, policy: PolicyModel, groups: ParallelGroups) -> None:
    stored = open_weights(directory)
    for problem in misfits(directory, stored, policy.layout.architecture, policy.vocab_size):
        raise CheckpointError(problem)
    known = {parameter.name: parameter for parameter in policy.layout.parameters}
    for name, values in policy.named_parameters():
        values.copy_(part_of_stored(stored, known[name], groups.part_of(known[name])))


def part_of_stored(stored: StoredWeights, parameter: Parameter, rank: int = 0) -> torch.Tensor:
    """Read what ``rank`` holds of a parameter: ``parameter.local_shape``, zeros for rows that are not stored."""
    dimension = 1 if parameter.cut == "columns" else 0
    size = parameter.shape[dimension]
    height = size // parameter.blocks
    part = height // parameter.ranks if parameter.cut else height
    found, end = [], stored.shape(parameter)[dimension]
    for block in range(parameter.blocks):
        start = block * height + (rank * part if parameter.cut else 0)
        if start < end:
            found.append(stored.read(parameter, start, min(start + part, end)))
    filled = sum(values.shape[dimension] for values in found)
    missing = parameter.local_shape[dimension] - filled
    if missing:  # only the vocabulary is padded
        found.append(torch.zeros(missing, *parameter.shape[1:], dtype=stored.dtype(parameter.name)))
    return torch.cat(found, dimension)


def misfits(directory: Path, stored: StoredWeights, model: Architecture, tokens: int) -> list[str]:
    """Return one line for each kind of tensor by which a checkpoint is not of ``model``, naming its first one.

    Args:
        tokens: of the tokenizer; the embedding has at least as many rows.
    """
    parameters = {parameter.name: parameter for parameter in ModelLayout.of(model).parameters}
    may_be_there = set() if model.untie_embeddings_and_output_weights else {HEAD}  # the last stage's copy
    own, has, what = parameters.keys(), stored.names, f"checkpoint {str(directory)!r}"
    problems = []
    if unknown := has - own - may_be_there:
        problems.append(
            f"{what} has {_first(unknown)}, which the model of this run has not; use the flags it was trained with, or "
            "another checkpoint if no flag builds that"
        )
    if missing := own - has:
        advice = "use the flags it was trained with, or another checkpoint"
        problems.append(f"{what} lacks {_first(missing)}; {advice}")
    for name in sorted(own & has):
        shape, wants = stored.shape(parameters[name]), parameters[name].shape
        if name == EMBEDDING and shape[0] < tokens:
            problems.append(
                f"{what} has {shape[0]} rows in {name}, too few for a vocabulary of {tokens}; use the tokenizer it "
                "was trained with"
            )
        padded = 1 if parameters[name].is_over_the_vocabulary else 0  # the height is compared of all others
        if shape[padded:] != wants[padded:]:
            shapes = f"it has {list(shape[padded:])}, the model wants {list(wants[padded:])}"
            problems.append(f"{what} does not fit this model ({name}: {shapes}); use the flags it was trained with")
            break
    if others := {name for name in own & has if stored.dtype(name) not in _NUMBERS}:
        formats = "another number format than fp32, bf16 or fp16"
        problems.append(f"{what} stores {_first(others)} in {formats}; save it unquantised")
    return problems


def _first(names: set[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return min(names) + more


def embedding_rows(stored: StoredWeights, model: Architecture) -> int:
    """Count the rows of the embedding as stored, padding included; 0 without one."""
    (embedding,) = ModelLayout.of(model).before
    return stored.shape(embedding)[0] if EMBEDDING in stored.names else 0


# -- names of the whole model, out of those in the file of one rank --------------------------------


def _by_global_names(
    stages: Sequence[dict[str, Any]], expert_rank: int, expert_ranks: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of one rank of each stage. In the model all stages' first chunks come before all second ones."""
    first_layer = 0
    for key in chunks_of(stages[0]):
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
