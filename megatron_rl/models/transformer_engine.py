"""Layers of Transformer Engine (`--transformer-impl transformer_engine`), with our attention.

The norms before attention and MLP are part of the products that follow them (``linear_qkv.layer_norm_weight``).
Checkpoints and Hugging Face files know both spellings; see ``checkpoint.torch_files.own_name``.
"""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.attention import PlannedSelfAttention
from megatron_rl.config import RLConfig
from megatron_rl.errors import ConfigError

IMPLEMENTATION = "transformer_engine"


def layer_spec(config: TransformerConfig) -> ModuleSpec:
    """One decoder layer.

    Raises:
        ConfigError: megatron-core found no Transformer Engine that it can use.
    """
    if not gpt_layer_specs.HAVE_TE:
        raise ConfigError([
            "--transformer-impl transformer_engine: megatron-core cannot import Transformer Engine; python -c 'import "
            "megatron.core.extensions.transformer_engine_spec_provider' says why, or use --transformer-impl local"
        ])
    spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    attention = spec.submodules.self_attention
    attention.module = PlannedSelfAttention
    # The plan attends. What stands here is not called, and must have no state that the other layers lack.
    attention.submodules.core_attention = DotProductAttention
    return spec


def fp8_settings(config: RLConfig) -> dict[str, Any]:
    """Of the `TransformerConfig`: megatron runs the layers in ``fp8_autocast`` when they are set.

    With local layers the same flags mean aligned training, which needs none of it.
    """
    precision = config.precision
    if config.kernels.transformer_impl != IMPLEMENTATION or precision.fp8_format is None:
        return {}
    return {
        "fp8": precision.fp8_format,
        "fp8_recipe": precision.fp8_recipe,
        # Otherwise the fp8 weights are kept from one forward pass to the next until megatron's training schedule
        # says that they have changed: scoring and rollouts after an update would run on those before it.
        "disable_parameter_transpose_cache": True,
    }


def prepare_for_fp8(gpt: GPTModel, config: TransformerConfig) -> None:
    """Let fp8 products take any number of tokens: Transformer Engine wants multiples of 16."""
    if config.fp8:
        from megatron.core.fp8_utils import prepare_model_for_fp8_inference

        prepare_model_for_fp8_inference(gpt)
