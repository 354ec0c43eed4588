"""Writes a model as a Hugging Face directory, a parameter at a time."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rl.atomic import TEMPORARY, remove, whole_directory
from megatron_rl.checkpoint.layout import find_checkpoint
from megatron_rl.checkpoint.run_state import differences, read_run_state
from megatron_rl.checkpoint.stored import embedding_rows, misfits, open_weights, part_of_stored
from megatron_rl.errors import CheckpointError, ConfigError
from megatron_rl.families import Entry, ExpertShare, HfModel, ModelLayout, Parameter, read_model
from megatron_rl.models import PolicyModel
from megatron_rl.parallel import ParallelGroups
from megatron_rl.parallel.collectives import broadcast_json, gather_json
from megatron_rl.tensor_files import TensorEntry, TensorWriter, plan_files, write_index, write_json

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 5 * 10**9
LONGEST_DESCENT = 100
"""Runs, each begun with the weights of the one before: a directory that was used again could make a circle."""
COPIED_FILES = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
"""What a directory has besides ``config.json`` and weights; copied where it is there."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NUMBERS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}

Produce = Callable[[str], Sequence[torch.Tensor]]
"""A parameter's name -> its parts on all tensor-parallel ranks, in rank order."""


def save_hf(
    policy: PolicyModel, origin: HfModel, target: Path, groups: ParallelGroups, dtype: torch.dtype | None = None
) -> None:
    """Write the model in memory; collective over the job. ``origin`` gives ``config.json`` and the tokenizer.

    Args:
        dtype: of the numbers; None takes what the origin's ``config.json`` says.

    Raises:
        CheckpointError: ``target`` exists.
    """
    if broadcast_json(target.exists() if groups.is_main else None, source=0):
        raise CheckpointError(f"{target} exists; choose another directory")
    layout, cut = policy.layout, ExpertShare(tensor_size=groups.expert_tensor_group.size())
    whole = ModelLayout.of(layout.architecture, layout.tensor_size, layout.padded_vocab_size, experts=cut)
    if groups.is_main:
        write_hf(origin, target, whole, _Gathering(policy, whole, groups).parts, dtype)
    elif any(_has_main(group) for group in (groups.model_group, groups.expert_group)):
        gathering = _Gathering(policy, whole, groups)
        for parameter in whole.parameters:
            gathering.parts(parameter.name)
    dist.barrier()


def origin_of(path: str | Path, option: str) -> HfModel:
    """The Hugging Face directory that the weights of a checkpoint came from, by way of other checkpoints or not.

    Raises:
        CheckpointError: there is no such checkpoint.
        ConfigError: it does not say, or something on the way is gone; ``option`` names the directory instead.
    """
    directory = find_checkpoint(path, contents=False)
    state = read_run_state(directory)
    try:
        for _ in range(LONGEST_DESCENT):
            if not state.hf_directory and state.origin is not None and state.origin.kind == "checkpoint":
                state = read_run_state(Path(state.origin.path))
        if state.hf_directory:
            return read_model(state.hf_directory)
        if state.origin is not None and state.origin.kind == "hugging_face":
            return read_model(state.origin.path)
        fault = "does not say which Hugging Face directory its model came from"
    except (CheckpointError, ConfigError) as error:
        fault = f"came from what is gone ({error})"
    raise ConfigError([f"{directory} {fault}; name a directory with its config.json and tokenizer as {option} DIR"])


def export_checkpoint(path: str | Path, origin: HfModel, target: Path, dtype: torch.dtype | None = None) -> None:
    """Write what one of our checkpoints holds, whatever its topology. One process; no model is built.

    Memory holds one parameter and its tensors.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged or of another model, or ``target`` is there.
    """
    directory, model = find_checkpoint(path), origin.architecture
    state, means = read_run_state(directory), f"{origin.directory / 'config.json'} means"
    problems = differences(directory, state, model, means)
    stored = open_weights(directory)
    if problems := problems or misfits(directory, stored, model, model.vocab_size):
        raise CheckpointError("; ".join(problems))
    layout = ModelLayout.of(model, padded_vocab_size=embedding_rows(stored, model))
    known = {parameter.name: parameter for parameter in layout.parameters}
    write_hf(origin, target, layout, lambda name: [part_of_stored(stored, known[name])], dtype)


def write_hf(
    origin: HfModel, target: Path, layout: ModelLayout, produce: Produce, dtype: torch.dtype | None = None
) -> None:
    """Write ``target`` from the parameters that ``produce`` gives; in place only once it is complete."""
    remove(target.with_name(target.name + TEMPORARY))
    weights, dtype = origin.weights, dtype or dtype_of(origin)
    entries = {name: TensorEntry(_NUMBERS[dtype], shape) for name, shape in weights.tensors.items()}
    files = plan_files(entries, MAX_FILE_BYTES)
    with whole_directory(target, origin.directory) as directory:
        with TensorWriter(directory, files) as writer:
            for parameter in layout.parameters:
                shards = produce(parameter.name)
                for name, tensor in tensors_of(weights[parameter.name], parameter, shards).items():
                    writer.append(name, tensor.to(dtype))
        if len(files) > 1:
            write_index(directory, files)
        _write_config(origin, directory, dtype)
        for name in COPIED_FILES:
            if (origin.directory / name).is_file():
                shutil.copyfile(origin.directory / name, directory / name)
    logger.info("wrote %s", target)


def tensors_of(entry: Entry, parameter: Parameter, shards: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The Hugging Face tensors of a parameter, from its parts on all tensor-parallel ranks."""
    if parameter.cut is None:
        shards = shards[:1]
    found = {name: torch.empty(shape, dtype=shards[0].dtype) for name, shape in entry.tensors.items()}
    for rank, shard in enumerate(shards):
        start = 0
        for piece in entry.pieces(parameter, rank):
            if piece.tensor is not None:
                target = found[piece.tensor][slice(*piece.rows)]
                block = shard[start : start + piece.height]
                (target if piece.columns is None else target[:, slice(*piece.columns)]).copy_(block)
            start += piece.height
    return found


def dtype_of(origin: HfModel) -> torch.dtype:
    """The number format ``config.json`` speaks of; fp32 where it does not."""
    return _DTYPES.get(origin.config.get("dtype", origin.config.get("torch_dtype")), torch.float32)


def _write_config(origin: HfModel, directory: Path, dtype: torch.dtype) -> None:
    if dtype == dtype_of(origin):
        shutil.copyfile(origin.directory / "config.json", directory / "config.json")
        return
    key = "torch_dtype" if "torch_dtype" in origin.config else "dtype"
    write_json(directory / "config.json", {**origin.config, key: str(dtype).removeprefix("torch.")})


class _Gathering:
    """Hands the main rank one parameter after the other, from the ranks of its model copy or of the same experts."""

    def __init__(self, policy: PolicyModel, whole: ModelLayout, groups: ParallelGroups) -> None:
        self._known = {parameter.name: parameter for parameter in whole.parameters}
        self._own = dict(policy.named_parameters())
        self._policy, self._groups = policy, groups
        self._holders: dict[str, list[int]] = {}
        for kind, group in ((False, groups.model_group), (True, groups.expert_group)):
            for rank, names in enumerate(gather_json([*self._own], group) if _has_main(group) else ()):
                for name in names:
                    if self._known[name].is_of_an_expert == kind:
                        self._holders.setdefault(name, []).append(rank)

    def parts(self, name: str) -> Sequence[torch.Tensor]:
        """On the main rank, in rank order; what the others get is of no use. Collective over those who have any."""
        parameter, policy = self._known[name], self._policy
        group = self._groups.expert_group if parameter.is_of_an_expert else self._groups.model_group
        if not _has_main(group):
            return []
        found = []
        # One on each rank where all have all of it; of a tied one the first stage's.
        for rank in self._holders[name][: parameter.ranks if parameter.cut else 1]:
            if rank == group.rank():
                part = self._own[name].detach()
                if rank > 0:
                    dist.send(part.contiguous(), group=group, group_dst=0)
            elif group.rank() == 0:
                part = torch.empty(parameter.local_shape, dtype=policy.dtype, device=policy.device)
                dist.recv(part, group=group, group_src=rank)
            else:
                continue
            found.append(part)
        return found


def _has_main(group: dist.ProcessGroup) -> bool:
    return dist.get_global_rank(group, 0) == 0
