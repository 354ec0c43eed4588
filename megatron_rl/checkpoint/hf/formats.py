"""The formats that other engines load: the recipe behind each, its tensors' names, its ``quantization_config``.

Which tensors are converted, and what each format writes, is told in docs/export.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.arithmetic import TILE
from megatron_rl.errors import ConfigError
from megatron_rl.registry import unknown

_LINEARS = (
    r"(q|k|v|o|qkv)_proj",  # attention; one matrix for all three in Phi-3
    r"(q_a|q_b|kv_b)_proj|kv_a_proj_with_mqa",  # DeepSeek's latent attention
    r"(gate|up|down|gate_up)_proj",  # MLP, experts, shared experts
    r"experts\.\d+\.w[123]",  # Mixtral's experts
)
_CONVERTED = re.compile(
    r"(model\.|language_model\.|text_model\.)*layers\.\d+\.(self_attn|mlp|block_sparse_moe)\."
    rf"(.+\.)?({'|'.join(_LINEARS)})\.weight"
)
_EMBEDDING = re.compile(r"(^|\.)\w*(embed|wte|wpe)\w*(\.|$)")
_NORM = re.compile(r"(^|\.)\w*norm\w*\.weight$")
_OUTPUT_HEAD = "lm_head"


@dataclass(frozen=True)
class TargetFormat:
    """One format. The number type of a compressed-tensors format is ``float`` or ``int``; None: tiles."""

    name: str
    recipe_name: str
    """The rollouts' own recipe, whose codes and scales these are."""
    code_type: str
    """As safetensors headers write it."""
    scale_suffix: str
    """``X.weight`` -> ``X.weight_scale_inv``, ``X.weight_scale``."""
    number: str | None = None
    powers_of_two: bool = False

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Of a weight [rows, columns]."""
        return (rows, 1) if self.number else (-(-rows // TILE), -(-columns // TILE))

    def quantization_config(self, skipped: Sequence[str]) -> dict[str, Any]:
        """For ``config.json``; ``skipped`` are the modules left in full precision."""
        if self.number is not None:
            return self._compressed_tensors(self.number, skipped)
        config: dict[str, Any] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [TILE, TILE],
            "modules_to_not_convert": list(skipped),
        }
        return {**config, "scale_fmt": "ue8m0"} if self.powers_of_two else config

    @staticmethod
    def _compressed_tensors(number: str, skipped: Sequence[str]) -> dict[str, Any]:
        def numbers(strategy: str, dynamic: bool) -> dict[str, Any]:
            return {"num_bits": 8, "type": number, "symmetric": True, "strategy": strategy, "dynamic": dynamic}

        form = f"{number}-quantized"
        group = {
            "targets": ["Linear"],
            "weights": numbers("channel", dynamic=False),
            "input_activations": numbers("token", dynamic=True),
            "output_activations": None,
            "format": form,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": form,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": list(skipped),
            "kv_cache_scheme": None,
        }


FORMATS = {
    "fp8_block": TargetFormat("fp8_block", "fp8_block", "F8_E4M3", "_scale_inv"),
    "fp8_channel": TargetFormat("fp8_channel", "fp8", "F8_E4M3", "_scale", number="float"),
    "int8": TargetFormat("int8", "int8", "I8", "_scale", number="int"),
}
_BLOCK_POW2 = TargetFormat("fp8_block", "fp8_block_pow2", "F8_E4M3", "_scale_inv", powers_of_two=True)


def target_format(name: str, powers_of_two: bool | None = None) -> TargetFormat:
    """The format of that name; with None its default, powers of two where it has them.

    Raises:
        ConfigError: there is none, or it has no scales that are powers of two.
    """
    if name not in FORMATS:
        raise ConfigError([f"there is no export format {unknown(name, FORMATS)}"])
    if name == "fp8_block":
        return FORMATS[name] if powers_of_two is False else _BLOCK_POW2
    if powers_of_two:
        raise ConfigError(
            [f"--force-pow-2-scale True is for fp8_block, {name} has no such variant; use --format fp8_block, or False"]
        )
    return FORMATS[name]


def is_converted(name: str, shape: tuple[int, ...]) -> bool:
    """True for the weight [N, K] of a linear layer of the decoder."""
    return len(shape) == 2 and _CONVERTED.fullmatch(name) is not None


def modules_left_alone(kept: Iterable[tuple[str, tuple[int, ...]]]) -> list[str]:
    """The modules a loader has to leave in full precision, of the tensors that were kept.

    The output head always; a router and any other tensor of two or more dimensions by its module's name, or a loader
    that looks at layer types would take its weight for codes.
    """
    names = {
        name.rpartition(".")[0]
        for name, shape in kept
        if len(shape) >= 2 and not _EMBEDDING.search(name) and not _NORM.search(name)
    }
    return [_OUTPUT_HEAD, *sorted(names - {_OUTPUT_HEAD, ""}, key=_natural)]


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
