"""The weights of a checkpoint by their names in the whole model, whatever ranks and files they lie in.

So any layout takes them: a rank reads the rows or columns that it holds.

    embedding of 64 rows, stored by 4 ranks      0-15 | 16-31 | 32-47 | 48-63
    the second of 2 ranks reads                                 32-63
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch

from megatron_rl.checkpoint.dist_files import DistFiles
from megatron_rl.checkpoint.saving import together
from megatron_rl.checkpoint.torch_files import RankFiles, has_rank_files
from megatron_rl.errors import CheckpointError
from megatron_rl.families import Architecture, ModelLayout, Parameter
from megatron_rl.families.blocks import EMBEDDING, HEAD
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.platform.groups import ParallelGroups

_NUMBERS = (torch.float32, torch.bfloat16, torch.float16)


class StoredWeights(Protocol):
    """What `DistFiles` and `RankFiles` offer. What they are asked for must be among their names."""

    @property
    def names(self) -> set[str]:
        """Of all parameters."""

    def shape(self, parameter: Parameter) -> tuple[int, ...]:
        """Of the whole parameter, as it is stored."""

    def dtype(self, name: str) -> torch.dtype:
        """The stored number format."""

    def read(self, parameter: Parameter, start: int, stop: int) -> torch.Tensor:
        """Rows ``start`` to ``stop`` of the whole parameter, within one block; columns where it is cut by columns."""


def open_weights(directory: Path) -> StoredWeights:
    """The weights of a checkpoint directory, in Megatron's format torch or in torch_dist.

    Raises:
        CheckpointError: files are missing or damaged.
    """
    return RankFiles(directory) if has_rank_files(directory) else DistFiles(directory)


def load_weights(directory: Path, policy: PolicyModel, groups: ParallelGroups) -> None:
    """Fill the model, in any layout; collective over the job.

    Raises:
        CheckpointError: on every rank; the checkpoint is damaged, or of another model.
    """
    together(lambda: _fill(directory, policy, groups))


@torch.no_grad()
def _fill(directory: Path, policy: PolicyModel, groups: ParallelGroups) -> None:
    stored = open_weights(directory)
    for problem in misfits(directory, stored, policy.layout.architecture, policy.vocab_size):
        raise CheckpointError(problem)
    known = {parameter.name: parameter for parameter in policy.layout.parameters}
    for name, values in policy.named_parameters():
        values.copy_(part_of_stored(stored, known[name], groups.part_of(known[name])))


def part_of_stored(stored: StoredWeights, parameter: Parameter, rank: int = 0) -> torch.Tensor:
    """What part ``rank`` of a parameter holds: ``parameter.local_shape``, with zeros for rows that are not stored."""
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
    """One line for each kind of tensor by which a checkpoint is not of ``model``; the first of each kind is named.

    Args:
        tokens: of the tokenizer; the embedding has at least as many rows.
    """
    parameters = {parameter.name: parameter for parameter in ModelLayout.of(model).parameters}
    may_be_there = set() if model.untie_embeddings_and_output_weights else {HEAD}  # the last stage's copy
    own, has = parameters.keys(), stored.names
    what = f"checkpoint {str(directory)!r}"

    def line(names: Iterable[str], text: str) -> list[str]:
        first, *more = sorted(names) or [""]
        others = f" and {len(more)} more" if more else ""
        return [f"{what} {text.format(name=first + others)}"] if first else []

    unknown = line(
        has - own - may_be_there,
        "has {name}, which the model of this run has not; use the flags it was trained with, or another checkpoint if "
        "no flag builds that",
    )
    missing = line(own - has, "lacks {name}; use the flags it was trained with, or another checkpoint")
    problems = [*unknown, *missing]
    for name in sorted(own & has):
        shape, wants = stored.shape(parameters[name]), parameters[name].shape
        if parameters[name].is_over_the_vocabulary:
            if shape[0] < tokens and name == EMBEDDING:
                problems.append(
                    f"{what} has {shape[0]} rows in {name}, too few for a vocabulary of {tokens}; use the tokenizer it "
                    "was trained with"
                )
            shape, wants = shape[1:], wants[1:]
        if shape != wants:
            problems.append(
                f"{what} does not fit this model ({name}: it has {list(shape)}, the model wants {list(wants)}); use "
                "the flags it was trained with"
            )
            break
    numbers = line((name for name in own & has if stored.dtype(name) not in _NUMBERS),
                   "stores {name} in another number format than fp32, bf16 or fp16; save it unquantised")  # fmt: skip
    return [*problems, *numbers]


def embedding_rows(stored: StoredWeights, model: Architecture) -> int:
    """Rows of the embedding as stored, padding included; 0 without one."""
    (embedding,) = ModelLayout.of(model).before
    return stored.shape(embedding)[0] if EMBEDDING in stored.names else 0
