"""The layer specification: megatron's local backend with our attention, norm and, where one rank holds the model whole,
linears; or Transformer Engine's.

megatron wraps each product in an autograd function written in Python and in a second one that is the identity without
tensor-parallel ranks. For a decode batch of 16 rows and 64 columns they took 13 of a layer's 19 microseconds. The
linears here are the product and nothing around it; the forward pass gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.config.rl_config import RLConfig
from megatron_rl.errors import ConfigError
from megatron_rl.families import PLAIN, LayerKind
from megatron_rl.models.attention.self_attention import PlannedSelfAttention
from megatron_rl.models.experts import GroupedExperts
from megatron_rl.models.rollout import RolloutLayer
from megatron_rl.models.rollout_ops import TorchNorm
from megatron_rl.platform.megatron import submodules_of

_ENGINE = "transformer_engine"
WIDE, STRIP = 2048, 384


def layer_spec(config: TransformerConfig, kind: LayerKind = PLAIN) -> ModuleSpec:
    """One decoder layer."""
    if config.transformer_impl == _ENGINE:
        return _engine_layer_spec(config)
    spec = gpt_layer_specs.get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        normalization=config.normalization,
        # megatron skips a gradient all-reduce when only one of spec and config says so.
        qk_layernorm=config.qk_layernorm,
    )
    spec.module, spec.params = RolloutLayer, {"kind": kind}
    layer = spec.submodules
    layer.input_layernorm = TorchNorm
    layer.pre_mlp_layernorm = TorchNorm
    layer.self_attention.module = PlannedSelfAttention
    if config.qk_layernorm:
        layer.self_attention.submodules.q_layernorm = TorchNorm
        layer.self_attention.submodules.k_layernorm = TorchNorm
    if config.context_parallel_size > 1:  # megatron's own, which nothing calls, cannot even be built
        layer.self_attention.submodules.core_attention = IdentityOp
    mlp, ranks = submodules_of(layer.mlp), config.tensor_model_parallel_size
    if ranks == 1:
        layer.self_attention.submodules.linear_qkv = WholeColumnLinear
        layer.self_attention.submodules.linear_proj = WholeRowLinear
    if isinstance(mlp, MoESubmodules):
        if config.moe_grouped_gemm:
            mlp.experts = GroupedExperts
            return spec
        mlp, ranks = submodules_of(mlp.experts), config.expert_tensor_parallel_size
    if ranks == 1:
        mlp.linear_fc1, mlp.linear_fc2 = WholeColumnLinear, WholeRowLinear
    return spec


def block_spec(config: TransformerConfig, kinds: Sequence[LayerKind]) -> TransformerBlockSubmodules:
    """The decoder layers of this pipeline stage, or of one of its chunks, and the final norm."""
    specs = {kind: layer_spec(config, kind) for kind in set(kinds)}
    return TransformerBlockSubmodules(layer_specs=[specs[kind] for kind in kinds], layer_norm=TorchNorm)


class WholeColumnLinear(ColumnParallelLinear):
    """A `ColumnParallelLinear` whose only rank has all columns."""

    def forward(
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``[T, 1, in]`` -> ``[T, 1, out]`` and the bias if the caller adds it."""
        weight = self.weight if weight is None else weight
        in_rollout = input_.dim() == 2 and not torch.is_grad_enabled()
        is_wide = in_rollout and weight.shape[0] >= WIDE and weight.device.type == "cpu"
        product = _wide_product(input_, weight) if is_wide else torch.matmul(input_, weight.t())
        return _with_bias(product, self.bias, self.skip_bias_add)


class WholeRowLinear(RowParallelLinear):
    """A `RowParallelLinear` whose only rank has all rows."""

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``[T, 1, in]`` -> ``[T, 1, out]`` and the bias if the caller adds it."""
        return _with_bias(torch.matmul(input_, self.weight.t()), self.bias, self.skip_bias_add)


def _wide_product(tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``tokens weight^T`` in strips of columns: on a CPU the same bits in 0.82 to 0.88 of the time at 512 x 3072.

    The last strip takes the rest, so that none is narrow enough for another kernel.
    """
    product = tokens.new_empty(tokens.shape[0], weight.shape[0])
    starts = range(0, weight.shape[0] - STRIP + 1, STRIP)
    for start in starts:
        end = weight.shape[0] if start == starts[-1] else start + STRIP
        torch.mm(tokens, weight[start:end].t(), out=product[:, start:end])
    return product


def _with_bias(
    product: torch.Tensor, bias: torch.Tensor | None, left_to_caller: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Added after the product, not within it, as stock does: ``addmm`` may round differently."""
    if left_to_caller:
        return product, bias
    return (product if bias is None else product + bias), None


def _engine_layer_spec(config: TransformerConfig) -> ModuleSpec:
    """One decoder layer of Transformer Engine, with our attention.

    The norms before attention and MLP are part of the products that follow them (``linear_qkv.layer_norm_weight``);
    checkpoints and Hugging Face files know both spellings, see `own_name`.

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
    attention.submodules.core_attention = IdentityOp
    return spec


def fp8_settings(config: RLConfig) -> dict[str, Any]:
    """Of the `TransformerConfig`: megatron runs the layers in ``fp8_autocast`` when they are set.

    With local layers the same flags mean aligned training, which needs none of it.
    """
    precision = config.precision
    if config.kernels.transformer_impl != _ENGINE or precision.fp8_format is None:
        return {}
    return {
        "fp8": precision.fp8_format,
        "fp8_recipe": precision.fp8_recipe,
        # Otherwise the fp8 weights are kept from one forward pass to the next until megatron's training schedule
        # says that they have changed: scoring and rollouts after an update would run on those before it.
        "disable_parameter_transpose_cache": True,
    }

