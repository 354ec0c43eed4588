"""Specifications of decoder layers: our blocks, or Transformer Engine's layers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as functional
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.config.rl_config import RLConfig
from megatron_rl.errors import ConfigError
from megatron_rl.families import PLAIN, LayerKind
from megatron_rl.models.attention.self_attention import PlannedSelfAttention
from megatron_rl.models.blocks import BLOCKS
from megatron_rl.models.rollout import RolloutLayer
from megatron_rl.models.rollout_ops import TorchNorm
from megatron_rl.platform.megatron import submodules_of

_ENGINE = "transformer_engine"
_NORMS_IN_CHECKPOINTS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_", "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}  # fmt: skip
"""Norm names in megatron's checkpoints, used for all models, so that files are read alike."""


def layer_spec(config: TransformerConfig, kind: LayerKind = PLAIN) -> ModuleSpec:
    """Return the specification of one decoder layer.

    Raises:
        ConfigError: a block is unknown or does not support a setting.
    """
    if config.transformer_impl == _ENGINE:
        return _engine_layer_spec(config, kind)
    mixer, mlp = BLOCKS.get(kind.mixer), BLOCKS.get(kind.mlp)
    for name, value in {**mixer.expects, **mlp.expects}.items():
        given = getattr(config, name, value)
        if given != value:
            raise ConfigError([f"{name} {given} is not built of {kind.mixer} and {kind.mlp}, only {value} is"])
    spec = gpt_layer_specs.get_gpt_layer_local_spec(
        normalization=config.normalization, **mixer.stock(config), **mlp.stock(config)
    )
    spec.module, spec.params = RolloutLayer, {"kind": kind}
    layer = spec.submodules
    layer.sharded_state_dict_keys_map = dict(_NORMS_IN_CHECKPOINTS)
    layer.input_layernorm = layer.pre_mlp_layernorm = TorchNorm if kind.pre_norms else IdentityOp
    if mixer.module is not None:
        layer.self_attention = ModuleSpec(module=mixer.module)
    else:
        mixer.replace_modules(layer.self_attention.submodules, config)
    mlp.replace_modules(submodules_of(layer.mlp), config)
    return spec


def block_spec(config: TransformerConfig, kinds: Sequence[LayerKind]) -> TransformerBlockSubmodules:
    """Return the decoder layers of this pipeline stage (or chunk), and the final norm."""
    specs = {kind: layer_spec(config, kind) for kind in set(kinds)}
    return TransformerBlockSubmodules(layer_specs=[specs[kind] for kind in kinds], layer_norm=TorchNorm)


def _engine_layer_spec(config: TransformerConfig, kind: LayerKind) -> ModuleSpec:
    """Return a Transformer Engine layer, with our attention, and our experts around its grouped products.

    Norms before attention and dense MLPs are part of the following linear (``linear_qkv.layer_norm_weight``), the one
    before experts is not; checkpoints and Hugging Face files accept both spellings, see `own_name`.

    Raises:
        ConfigError: megatron-core found no usable Transformer Engine, or the layer is not Llama-like.
    """
    if dataclasses.replace(kind, mlp="dense") != PLAIN or kind.mlp not in ("dense", "experts"):
        raise ConfigError([f"--transformer-impl transformer_engine: its layers are none of {kind}; use local"])
    if not gpt_layer_specs.HAVE_TE:
        raise ConfigError([
            "--transformer-impl transformer_engine: megatron-core cannot import Transformer Engine; python -c 'import "
            "megatron.core.extensions.transformer_engine_spec_provider' says why, or use --transformer-impl local"
        ])
    spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
        qk_layernorm=config.qk_layernorm, **BLOCKS.get(kind.mlp).stock(config)
    )
    spec.module, spec.params = RolloutLayer, {"kind": kind}
    spec.submodules.sharded_state_dict_keys_map = dict(_NORMS_IN_CHECKPOINTS)
    if kind.mlp == "experts":
        from megatron_rl.models.engine_experts import EngineExperts

        submodules_of(spec.submodules.mlp).experts = EngineExperts
    attention = spec.submodules.self_attention
    attention.module = PlannedSelfAttention
    # The plan attends. This placeholder is not called, and must have no state.
    attention.submodules.core_attention = IdentityOp
    return spec


def fp8_settings(config: RLConfig) -> dict[str, Any]:
    """Return the fp8 settings of `TransformerConfig`, with which megatron runs layers in ``fp8_autocast``.

    Empty for local layers, where the same flags mean aligned training.
    """
    precision = config.precision
    if config.kernels.transformer_impl != _ENGINE or precision.fp8_format is None:
        return {}
    return {
        "fp8": precision.fp8_format,
        "fp8_recipe": precision.fp8_recipe,
        "fp8_param": precision.fp8_param_gather,
        # Otherwise fp8 weights are cached until megatron's training schedule reports a change: scoring and rollouts
        # after an update would use the old ones.
        "disable_parameter_transpose_cache": True,
    }


def pad_products(model: torch.nn.Module) -> None:
    """Make Transformer Engine's fp8 linears accept any number of tokens; their products need multiples of 16.

    megatron's padding exchanges sequence shares outside of the linear, which would then sum twice.
    """
    for module in model.modules():
        if hasattr(module, "te_return_bias"):
            module.forward = functools.partial(_padded, module, module.forward)


def _padded(module: Any, forward: Callable[[torch.Tensor], Any], tokens: torch.Tensor) -> Any:
    """Run ``forward`` on [T, B, in] with zero padding after each rank's share, gathered or scattered by the linear."""
    ranks = module.tp_size if module.sequence_parallel else 1
    taken, given = (ranks, 1) if module.parallel_mode == "row" else (1, ranks)
    missing = -(tokens.shape[0] // taken) % 16
    if not missing:
        return forward(tokens)
    padded = functional.pad(tokens.unflatten(0, (taken, -1)), (0, 0, 0, 0, 0, missing))
    output, bias = forward(padded.flatten(0, 1))
    return output.unflatten(0, (given, -1))[:, :-missing].flatten(0, 1), bias
