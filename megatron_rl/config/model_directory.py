"""What a model's directory says so that the command line need not: Hugging Face's config.json, a checkpoint of ours."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_rl.config.flags import flags_of
from megatron_rl.config.megatron_args import model_flags
from megatron_rl.config.rl_config import all_flags, section_classes
from megatron_rl.errors import Problem, collecting
from megatron_rl.families import read_model
from megatron_rl.families.architecture import YARN
from megatron_rl.families.peft import settings_of
from megatron_rl.user_files import read_json

if TYPE_CHECKING:
    from megatron_rl.config.arguments import Reading

FILE_NAME = "run_state.json"
_STEP = re.compile(r"(?:step|iter)_(\d{7,})")
_SHAPE = ("hidden_size", "num_attention_heads", "num_layers", "tokenizer_model")
"""Flags without a default that a directory may replace."""
_WITH_GROUPS = {"group_query_attention": True}
"""Megatron ignores --num-query-groups without it."""
_FLAGS = tuple(
    flag
    for section in ("model", "layers", "experts", "rotation")
    for flag in flags_of(section_classes()[section])
    if flag.name not in (*YARN, "rope_type")  # which are of latent attention there
)
"""That may be read from a checkpoint of Megatron-LM."""
_UP_TO_THE_RUN = ("init_method_std", "rl_mla_absorb", "tokenizer_model")
"""How fresh weights are drawn, what rollouts cache; a tokenizer may lie elsewhere, and is compared by its size."""
_NOT_COMPARED = ("ffn_hidden_size", "moe_layer_freq", "max_position_embeddings", "norm_epsilon")
"""In args of Megatron-LM: they may differ, or be spelt otherwise. Names and shapes of tensors are compared later."""


class SavedModel(NamedTuple):
    """A checkpoint's record of its model and run."""

    file: Path
    architecture: dict[str, Any]
    """Flags that two runs must share to share weights; compared where the checkpoint is looked at."""
    flags: dict[str, Any]
    """Other flags of the model."""
    seed: int


def read_model_directory(reading: Reading) -> None:
    """Add what the directory of the model says and the user did not, and problems where the two contradict."""
    names = {"--load-hf": "load_hf", "--hf-config": "hf_config"}
    given = {flag: reading.values[name] for flag, name in names.items() if reading.values.get(name)}
    problems: list[Problem] = []
    if len(set(map(os.path.realpath, given.values()))) > 1:
        both = " and ".join(f"{flag} {directory}" for flag, directory in given.items())
        problems.append(Problem("--hf-config", f"{both} both say what the model is; keep one of them"))
    elif given:
        flag, directory = next(iter(given.items()))
        with collecting(problems, flag):
            model = read_model(directory)
            settings = model.architecture.settings()
            problems += _contradictions(reading.values, settings, f"{directory}/config.json")
            if (model.directory / "tokenizer_config.json").is_file():
                settings["tokenizer_model"] = str(model.directory)
            _derive(reading, settings | _WITH_GROUPS)
    saved = _saved_model_of(reading)
    for path in _checkpoints(reading).values() if saved is None else ():
        flags = model_flags(path, _FLAGS)
        compared = {name: value for name, value in flags.items() if name not in _NOT_COMPARED}
        problems += _contradictions(reading.values | (reading.derived if given else {}), compared, path)
        if not given:
            _derive(reading, {name: value for name, value in flags.items() if value is not None})
    if not given:
        problems += _missing_shape(reading) if saved is None else _read_checkpoint(reading, saved)
    if (problems and not reading.derived) or reading.failed & set(names):
        reading.failed.update(map(_spelling, _SHAPE))  # to call them missing too would repeat the problem
    if saved is not None and reading.values.get("eval_only"):
        _derive(reading, {"seed": saved.seed})  # another seed would give other answers to held-out tasks
    reading.problems += problems


def read_adapter_directory(reading: Reading) -> None:
    """Add rank, alpha and targets of `--load-lora`, and problems where the flags say something else."""
    directory = reading.values.get("load_lora")
    if directory is not None and (problem := _adapters_twice(reading)):
        reading.problems.append(problem)
    elif directory is not None:
        with collecting(reading.problems, "--load-lora"):
            settings = settings_of(directory)
            _derive(reading, settings)
            reading.problems += _contradictions(reading.values, settings, directory)


def _adapters_twice(reading: Reading) -> Problem | None:
    """The checkpoint that weights are taken from has adapters already; a run that goes on keeps its own."""
    saved, values = _saved_model_of(reading), reading.values
    begins = any(values.get(name) for name in ("eval_only", "finetune", "pretrained_checkpoint"))
    if saved is None or "lora_rank" not in saved.flags or not begins:
        return None
    text = f"--load-lora {values['load_lora']}: {saved.file.parent} has adapters of its own; name its base, or leave "
    return Problem("--load-lora", f"{text}the flag out")


def _derive(reading: Reading, settings: Mapping[str, Any]) -> None:
    known = {flag.name for flag in all_flags()} - reading.values.keys()  # an earlier version saved more
    reading.derived |= {name: value for name, value in settings.items() if name in known}


def _read_checkpoint(reading: Reading, saved: SavedModel) -> Iterator[Problem]:
    _derive(reading, saved.architecture | saved.flags | _WITH_GROUPS)
    compared = {name: value for name, value in saved.flags.items() if not name.startswith("lora_")}
    yield from _contradictions(reading.values, compared, str(saved.file))  # adapters where the checkpoint is looked at
    tokenizer = reading.derived.get("tokenizer_model", "")
    if Path(tokenizer).is_absolute() and not Path(tokenizer).exists():
        del reading.derived["tokenizer_model"]
        reading.failed.add("--tokenizer-model")
        yield Problem(
            "--tokenizer-model",
            f"{saved.file} was saved with the tokenizer {tokenizer}, which is gone; name one with --tokenizer-model "
            "DIR",
        )


def _saved_model_of(reading: Reading) -> SavedModel | None:
    return next(filter(None, map(saved_model, _checkpoints(reading).values())), None)


def _checkpoints(reading: Reading) -> dict[str, str]:
    return {name: reading.values[name] for name in ("load", "pretrained_checkpoint") if reading.values.get(name)}


def saved_model(path: str) -> SavedModel | None:
    """Return what a checkpoint of ours says; None where there is none, or one of Megatron-LM or of an earlier version.

    Whether it is whole is found out later: all checkpoints of a run say the same. A pattern stands for what it matches.
    """
    for place in sorted(glob(path)) or [path]:
        for root in (Path(place), Path(place) / "checkpoints"):
            steps = [found for found in root.glob(f"*/{FILE_NAME}") if _STEP.fullmatch(found.parent.name)]
            steps.sort(key=lambda found: int(_STEP.fullmatch(found.parent.name)[1]))
            for file in (root / FILE_NAME, *reversed(steps)):
                try:
                    values = read_json(file)
                    if values.get("flags"):
                        flags = {
                            name: tuple(value) if isinstance(value, list) else value
                            for name, value in values["flags"].items()
                        }
                        return SavedModel(file, dict(values["architecture"]), flags, int(values["seed"]))
                except (ValueError, KeyError, TypeError, AttributeError):
                    continue  # whoever loads it tells what is wrong
    return None


def _missing_shape(reading: Reading) -> Iterator[Problem]:
    """One line in place of one for each flag that a checkpoint does not make up for."""
    given = _checkpoints(reading)
    missing = [_spelling(name) for name in _SHAPE if name not in reading.values | reading.derived]
    if given and missing:
        name, path = next(iter(given.items()))
        reading.failed.update(map(_spelling, _SHAPE))
        yield Problem(
            _spelling(name),
            f"{_spelling(name)} {path} does not say what its model is; add --hf-config DIR with the model's "
            "config.json, or "
            f"{', '.join(missing)} and what else it was made with",
        )


def _spelling(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _contradictions(typed: Mapping[str, Any], settings: Mapping[str, Any], source: str) -> Iterator[Problem]:
    for flag in all_flags():
        if flag.name not in typed or flag.name not in settings or flag.name in _UP_TO_THE_RUN:
            continue
        wanted, found = typed[flag.name], settings[flag.name]
        fits = wanted <= found if flag.name == "max_position_embeddings" else wanted == found
        if not fits:
            yield Problem(
                flag.spelling,
                f"{flag.typed(wanted)} contradicts {source}, which means {flag.typed(found)}; leave the flag "
                "out, or take another model",
            )
