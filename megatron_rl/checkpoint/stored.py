"""The weights of a checkpoint by their names in the whole model, whatever ranks and files they lie in.

So any layout takes them: a rank reads the rows or columns that it holds.

    embedding of 64 rows, stored by 4 ranks      0-15 | 16-31 | 32-47 | 48-63
    the second of 2 ranks reads                                 32-63
"""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_rl.checkpoint.dist_files import DistFiles
from megatron_rl.checkpoint.saving import succeed_on_all_ranks
from megatron_rl.checkpoint.torch_format import converted, first_file
from megatron_rl.errors import CheckpointError
from megatron_rl.families import Architecture, ModelLayout, Parameter
from megatron_rl.families.parts import EMBEDDING, HEAD
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.platform.groups import ParallelGroups

_NUMBERS = (torch.float32, torch.bfloat16, torch.float16)


def open_weights(directory: Path) -> DistFiles:
    """Open the weights of a checkpoint directory; one in Megatron's format torch is converted first, once.

    Raises:
        CheckpointError: files are missing or damaged.
    """
    return DistFiles(directory if first_file(directory) is None else converted(directory))


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


def part_of_stored(stored: DistFiles, parameter: Parameter, rank: int = 0) -> torch.Tensor:
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


def misfits(directory: Path, stored: DistFiles, model: Architecture, tokens: int) -> list[str]:
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


def embedding_rows(stored: DistFiles, model: Architecture) -> int:
    """Count the rows of the embedding as stored, padding included; 0 without one."""
    (embedding,) = ModelLayout.of(model).before
    return stored.shape(embedding)[0] if EMBEDDING in stored.names else 0
