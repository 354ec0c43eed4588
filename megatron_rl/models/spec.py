"""The layer specification: megatron's local backend, or Transformer Engine's, with our attention and norm."""

from __future__ import annotations

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.attention import PlannedSelfAttention
from megatron_rl.models import transformer_engine
from megatron_rl.models.layer import RolloutLayer
from megatron_rl.models.linear import use_whole_linears
from megatron_rl.models.norm import TorchNorm


def layer_spec(config: TransformerConfig) -> ModuleSpec:
    """One decoder layer."""
    if config.transformer_impl == transformer_engine.IMPLEMENTATION:
        return transformer_engine.layer_spec(config)
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        normalization=config.normalization,
        # megatron skips a gradient all-reduce when only one of spec and config says so.
        qk_layernorm=config.qk_layernorm,
    )
    spec.module = RolloutLayer
    layer = spec.submodules
    layer.input_layernorm = TorchNorm
    layer.pre_mlp_layernorm = TorchNorm
    layer.self_attention.module = PlannedSelfAttention
    if config.qk_layernorm:
        layer.self_attention.submodules.q_layernorm = TorchNorm
        layer.self_attention.submodules.k_layernorm = TorchNorm
    if config.tensor_model_parallel_size == 1:
        use_whole_linears(spec)
    return spec


def block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """All decoder layers of this pipeline stage and the final norm."""
    return TransformerBlockSubmodules(
        layer_specs=[layer_spec(config)] * get_num_layers_to_build(config),
        layer_norm=TorchNorm,
    )
