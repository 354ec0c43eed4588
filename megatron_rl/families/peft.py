"""LoRA adapters in PEFT's format: ``adapter_config.json`` and ``adapter_model.safetensors``. Without torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_rl.errors import CheckpointError, ConfigError, shorten
from megatron_rl.families.layout import ModelLayout
from megatron_rl.families.lora import Lora, LowRank, adapters_of
from megatron_rl.families.parts import Parameter
from megatron_rl.families.weights import Entry, WeightMap
from megatron_rl.tensor_files import stored_tensors
from megatron_rl.user_files import read_json

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_ENDINGS = (".lora_A.weight", ".lora_B.weight")
_FREE = frozenset((
    "r", "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern", "target_modules", "exclude_modules", "task_type",
    "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "megatron_core",
    "qalora_group_size", "runtime_config", "eva_config",
))  # fmt: skip
"""Settings that are read, follow from the tensors, or have no effect here."""
_BUILT: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),
    "alpha_pattern": ({},), "loftq_config": ({},), "modules_to_save": ([],), "layers_to_transform": ([],),
    "target_parameters": ([],),
}  # fmt: skip
"""Supported values, which leave W + s B A (PiSSA and others also change W). Other settings must be null or false."""


def settings_of(directory: str | Path) -> dict[str, Any]:
    """Return the ``--lora-rank``, ``--lora-alpha`` and ``--lora-targets`` of a PEFT adapter.

    Raises:
        ConfigError: missing, damaged, or unsupported; one line.
    """
    path = Path(directory) / CONFIG_FILE
    try:
        values = read_json(path)
        rank, alpha = values["r"], float(values["lora_alpha"])
        for name, value in values.items():
            if not (value is None or value is False or name in _FREE or value in _BUILT.get(name, ())):
                what = f"{name} {shorten(value)} is not built, only plain LoRA (W + s B A) is"
                raise ConfigError([f"{path}: {what}; merge the adapter into its base with peft"])
        if type(rank) is not int or rank < 1 or not 0 < alpha < math.inf:
            what = f"r {shorten(rank)} and lora_alpha {shorten(values['lora_alpha'])}, which must be above 0"
            raise ConfigError([f"{path} has {what}, r a whole number; take the file as peft wrote it"])
        if values.get("use_rslora") and values.get("rank_pattern"):
            what = "use_rslora with a rank_pattern is not built: the scale would depend on the rank"
            raise ConfigError([f"{path}: {what}; merge the adapter into its base with peft"])
        ending = _ENDINGS[0]
        names = [n.removesuffix(ending) for n in stored_tensors(Path(directory)) if n.endswith(ending)]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ConfigError([f"{path} is no adapter_config.json of PEFT ({error})"]) from error
    except CheckpointError as error:
        raise ConfigError([str(error)]) from error
    if values.get("use_rslora"):  # alpha / sqrt(rank)
        alpha *= math.sqrt(rank)
    targets = tuple(sorted({name.rpartition(".")[2] for name in names}))
    return {"lora_rank": rank, "lora_alpha": alpha, "lora_targets": targets}


def lora_at(directory: str | Path) -> Lora:
    """Return the adapters of a PEFT directory; raises like `settings_of`."""
    found = settings_of(directory)
    return Lora(found["lora_rank"], found["lora_alpha"], found["lora_targets"], 0.0)


def config_of(lora: Lora, parts: list[LowRank], base: str) -> dict[str, Any]:
    """Return ``adapter_config.json`` for ``parts``; ``base``: the model's directory or name."""
    ranks = {rf"experts\.\d+\.{name}": p.rank for p in parts if p.rank != lora.rank for name in p.adapted}
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True,
        "r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout, "bias": "none", "use_rslora": False,
        "fan_in_fan_out": False, "rank_pattern": ranks, "target_modules": sorted({n for p in parts for n in p.adapted}),
    }  # fmt: skip


def adapter_entries(layout: ModelLayout, lora: Lora, weights: WeightMap) -> Iterator[tuple[Parameter, Entry]]:
    """Yield each A and B of a rank with its PEFT tensors; ``weights``: those of the family."""
    for part in adapters_of(layout, lora):
        weight = weights[f"decoder.{part.linear.name}.weight"]
        if any(piece.index is not None for piece in weight.order):
            stack = next(iter(weight.tensors))
            raise ConfigError([f"adapters of experts in one tensor ({stack}) have no form in PEFT's files"])
        own = dict(zip(part.matrices, weight.tensors, strict=True))
        names = {own[name]: _PREFIX + own[name].removesuffix(".weight") for name in part.adapted}
        a, b = _ENDINGS
        yield part.a, Entry({names[own[name]] + a: (part.rank, part.linear.inputs) for name in part.adapted})
        shapes = {names[name] + b: (shape[0], part.rank) for name, shape in weight.tensors.items() if name in names}
        # Rows of matrices without an adapter are 0 and not stored.
        order = tuple(
            replace(piece, tensor=names[piece.tensor] + b if piece.tensor in names else None) for piece in weight.order
        )
        yield part.b, Entry(shapes, order)


def file_problems(directory: Path, layout: ModelLayout, lora: Lora, weights: WeightMap) -> list[str]:
    """Return one line per difference between an adapter's tensors and ``lora`` on this model."""
    try:
        stored = stored_tensors(directory)
    except CheckpointError as error:
        return [str(error)]
    entries = [entry for _, entry in adapter_entries(layout, lora, weights)]
    expected = {name: shape for entry in entries for name, shape in entry.tensors.items()}
    problems = []
    for names, what in (
        ([name for name in stored if name not in expected], "is of no matrix of this model; name its own base"),
        ([name for name in expected if name not in stored], "is missing: every layer needs the same adapters"),
    ):
        problems += [f"{directory}: tensor {name} {what}" for name in names[:1]]
    for name in expected.keys() & stored.keys():
        if stored[name].shape != expected[name]:
            found, wanted = (" x ".join(map(str, shape)) for shape in (stored[name].shape, expected[name]))
            text = f"tensor {name} has shape {found}, this model means {wanted}; name its own base"
            problems.append(f"{directory}: {text}")
            break
    return problems
