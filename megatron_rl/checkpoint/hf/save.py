"""Writes a model as a Hugging Face directory, a parameter at a time."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from megatron_rl import mxfp4
from megatron_rl.atomic import TEMPORARY, remove, whole_directory
from megatron_rl.checkpoint.layout import find_checkpoint
from megatron_rl.checkpoint.run_state import differences, read_run_state
from megatron_rl.checkpoint.stored import embedding_rows, misfits, open_weights, part_of_stored
from megatron_rl.errors import CheckpointError, ConfigError
from megatron_rl.families import Entry, HfModel, ModelLayout, Parameter, read_model
from megatron_rl.tensor_files import TensorEntry, TensorReader, TensorWriter, plan_files, write_index, write_json

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 5 * 10**9
_COPIED_BYTES = 2**24
LONGEST_DESCENT = 100
"""Runs, each begun with the weights of the one before: a directory that was used again could make a circle."""
COPIED_FILES = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
"""What a directory has besides ``config.json`` and weights; copied where it is there."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NUMBERS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}

Produce = Callable[[Parameter], torch.Tensor]
"""A parameter of the whole model -> its numbers."""


def origin_of(path: str | Path, option: str) -> HfModel:
    """Return the Hugging Face directory that the weights of a checkpoint came from, by way of other checkpoints or not.

    Raises:
        CheckpointError: there is no such checkpoint.
        ConfigError: it does not say, or something on the way is gone; ``option`` names the directory instead.
    """
    directory = find_checkpoint(path, contents=False)
    state = read_run_state(directory)
    try:
        for _ in range(LONGEST_DESCENT):
            if not state.model.hf_directory and state.origin is not None and state.origin.kind == "checkpoint":
                state = read_run_state(Path(state.origin.path))
        if state.model.hf_directory:
            return read_model(state.model.hf_directory)
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
    if target.exists():  # before minutes of checksums
        raise CheckpointError(f"{target} exists; choose another directory")
    directory, model = find_checkpoint(path), origin.architecture
    state, means = read_run_state(directory), f"{origin.directory / 'config.json'} means"
    problems = differences(directory, state, model, means)
    stored = open_weights(directory)
    if problems := problems or misfits(directory, stored, model, model.vocab_size):
        raise CheckpointError("; ".join(problems))
    layout = ModelLayout.of(model, padded_vocab_size=embedding_rows(stored, model))
    write_hf(origin, target, layout, partial(part_of_stored, stored), dtype)


def write_hf(
    origin: HfModel, target: Path, layout: ModelLayout, produce: Produce, dtype: torch.dtype | None = None
) -> None:
    """Write ``target`` from the parameters that ``produce`` gives, of a ``layout`` on one rank.

    It is in place only once it is complete.
    """
    remove(target.with_name(target.name + TEMPORARY))
    weights, in_mxfp4 = origin.weights, dtype is None and origin.is_mxfp4
    formats = _formats(origin, layout, dtype)
    dtype = dtype or dtype_of(origin)
    blocks = weights.stacked_matrices if in_mxfp4 else frozenset()
    entries = passed_through(origin)
    for name, shape in weights.tensors.items():
        own = {name: TensorEntry(_NUMBERS[formats[name]], shape)}
        entries |= mxfp4.entries(name, shape) if name in blocks else own
    files = plan_files(entries, MAX_FILE_BYTES)
    with whole_directory(target, origin.directory) as directory, _originals(origin, in_mxfp4) as originals:
        encoder = mxfp4.Encoder(originals)
        with TensorWriter(directory, files) as writer:
            for parameter in layout.parameters:
                for name, tensor in tensors_of(weights[parameter.name], parameter, produce(parameter)).items():
                    parts = encoder.parts(name, tensor.t()) if name in blocks else [(name, tensor.to(formats[name]))]
                    for part, numbers in parts:
                        writer.append(part, numbers)
            _copy_tensors(origin, writer)
        if len(files) > 1:
            write_index(directory, files)
        _write_config(origin, directory, dtype, in_mxfp4)
        for name in COPIED_FILES:
            if (origin.directory / name).is_file():
                shutil.copyfile(origin.directory / name, directory / name)
    logger.info("wrote %s", target)
    if encoder.rounded:
        logger.warning(
            "%s holds its experts in MXFP4, as %s does: %.1f %% of their numbers were rounded to 4 bits, and what "
            "training changed by less than that is gone; write them in bf16 with --dtype bfloat16", target,
            origin.directory, 100 * encoder.rounded / encoder.numbers,
        )  # fmt: skip


def _formats(origin: HfModel, layout: ModelLayout, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """Each tensor's dtype: that of the origin's files, where they are there and no other ``dtype`` is asked for."""
    own, kinds = dict[str, torch.dtype](), {name: kind for kind, name in _NUMBERS.items()}
    with contextlib.suppress(CheckpointError), TensorReader(origin.directory) as reader:
        own = {name: kinds[tensor.dtype] for name, tensor in reader.stored.items() if tensor.dtype in kinds}
    formats = dict.fromkeys(origin.weights.tensors, dtype or dtype_of(origin)) | (own if dtype is None else {})
    for parameter in layout.parameters:
        if parameter.is_stored_in_fp32 and dtype != torch.float32:
            formats |= {name: own.get(name, torch.float32) for name in origin.weights[parameter.name].tensors}
    return formats


def _originals(origin: HfModel, in_mxfp4: bool) -> contextlib.AbstractContextManager[TensorReader | None]:
    """The files whose blocks are kept where their numbers are; None where they are gone."""
    try:
        return TensorReader(origin.directory) if in_mxfp4 else contextlib.nullcontext()
    except CheckpointError:
        return contextlib.nullcontext()


def passed_through(origin: HfModel) -> dict[str, TensorEntry]:
    """Return tensors of the origin that no parameter is made of and an export keeps: see `HfModel.passed_through`."""
    try:
        return {**origin.passed_through()}
    except CheckpointError as error:
        logger.warning("the export lacks what may have been in the files beside the model's weights: %s", error)
        return {}


def _copy_tensors(origin: HfModel, writer: TensorWriter) -> None:
    if tensors := passed_through(origin):
        with TensorReader(origin.directory) as reader:
            for name, tensor in tensors.items():
                rows = max(1, _COPIED_BYTES * tensor.shape[0] // max(1, tensor.num_bytes)) if tensor.shape else 1
                for part in reader.pieces(name, rows):
                    writer.append(name, part)


def tensors_of(entry: Entry, parameter: Parameter, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the Hugging Face tensors that the ``values`` of a whole parameter are; of a stack their part."""
    start, found = 0, dict[str, torch.Tensor]()
    for piece in entry.pieces(parameter):
        if piece.tensor is not None:
            shape = entry.tensors[piece.tensor][0 if piece.index is None else 1 :]
            whole = found.setdefault(piece.tensor, torch.empty(shape, dtype=values.dtype))
            replace(piece, index=None).of(whole).copy_(values[start : start + piece.height])
        start += piece.height
    return found


def dtype_of(origin: HfModel) -> torch.dtype:
    """Return the number format ``config.json`` speaks of; fp32 where it does not."""
    return _DTYPES.get(origin.config.get("dtype", origin.config.get("torch_dtype")), torch.float32)


def _write_config(origin: HfModel, directory: Path, dtype: torch.dtype, in_mxfp4: bool) -> None:
    if dtype == dtype_of(origin) and in_mxfp4 == origin.is_mxfp4:
        shutil.copyfile(origin.directory / "config.json", directory / "config.json")
        return
    key = "torch_dtype" if "torch_dtype" in origin.config else "dtype"
    config = {**origin.config, key: str(dtype).removeprefix("torch.")}
    if origin.is_mxfp4:
        del config["quantization_config"]
    write_json(directory / "config.json", config)
