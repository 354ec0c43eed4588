"""GPTModel from flags, and its two phases."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.attention import Attention, RopeTable, numbers_of, proven_attention
from megatron_rl.config import RLConfig
from megatron_rl.families import ModelLayout
from megatron_rl.models.spec import block_spec, fp8_settings
from megatron_rl.parallel.groups import pipeline_stage
from megatron_rl.platform import Platform

logger = logging.getLogger(__name__)

_SWITCHES = ("sequence_parallel", "scatter_to_sequence_parallel", "reduce_scatter_embeddings")
"""Attributes by which megatron's modules cut a sequence over the tensor-parallel ranks."""


class _TrainableRotaryEmbedding(RotaryEmbedding):
    """megatron caches the embedding; made inside ``inference_mode`` it could never be trained with."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with torch.inference_mode(False):
            return super().forward(*args, **kwargs)


@dataclass(frozen=True)
class PolicyModel:
    """The one model of this process: training and rollouts share its parameters."""

    gpt: GPTModel
    config: TransformerConfig
    rope: RopeTable
    attention: Attention
    layout: ModelLayout
    vocab_size: int
    """Real vocabulary; columns from here to ``padded_vocab_size`` are never sampled or scored."""
    dtype: torch.dtype
    device: torch.device

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding over all tensor-parallel ranks."""
        return self.layout.padded_vocab_size

    @property
    def num_parameters(self) -> int:
        """Parameters held by this rank."""
        return sum(parameter.numel() for parameter in self.gpt.parameters())


def build_transformer_config(config: RLConfig, platform: Platform) -> TransformerConfig:
    """Flags of the model's shape and of parallelism reach megatron under their own names.

    Fused kernels stay off where there is no CUDA to run them.
    """
    model, kernels, known = config.model, config.kernels, {f.name for f in dataclasses.fields(TransformerConfig)}
    given = {name: value for name, value in {**vars(model), **vars(config.parallel)}.items() if name in known}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TransformerConfig(
            **given,
            layernorm_epsilon=model.norm_epsilon,
            gated_linear_unit=model.swiglu,
            activation_func=functional.silu if model.swiglu else functional.gelu,
            num_moe_experts=model.num_experts,
            moe_router_dtype=None if model.num_experts is None else "fp32",  # so that near ties fall alike
            use_cpu_initialization=kernels.use_cpu_initialization or not platform.is_cuda,
            params_dtype=numbers_of(config).dtype,
            pipeline_dtype=numbers_of(config).dtype,
            bf16=config.precision.bf16,
            transformer_impl=kernels.transformer_impl,
            **fp8_settings(config),
            recompute_granularity=kernels.recompute_granularity,
            recompute_method=kernels.recompute_method,
            recompute_num_layers=kernels.recompute_num_layers,
            recompute_modules=None if kernels.recompute_modules is None else list(kernels.recompute_modules),
            # Our losses are sums with an explicit global denominator, which this switch makes
            # megatron divide by once, after the data-parallel reduction.
            calculate_per_token_loss=True,
            # Fusions that need Apex, Transformer Engine or a CUDA kernel; parity before speed.
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            apply_rope_fusion=False,
        )


def build_model(config: RLConfig, platform: Platform, vocab_size: int) -> PolicyModel:
    """Build this rank's part of the model with random weights (seed first); ``vocab_size`` is the tokenizer's."""
    transformer_config = build_transformer_config(config, platform)
    layout = config.layout(vocab_size, pipeline_stage())
    max_length = max(config.model.max_position_embeddings, config.training.seq_length)
    gpt = GPTModel(
        transformer_config,
        block_spec(transformer_config),
        vocab_size=layout.padded_vocab_size,
        max_sequence_length=max_length,
        position_embedding_type=config.model.position_embedding_type,
        rotary_base=config.model.rotary_base,
        rotary_percent=config.model.rotary_percent,
        rope_scaling=config.model.use_rope_scaling,
        rope_scaling_factor=config.model.rope_scaling_factor,
        pre_process=layout.is_first,
        post_process=layout.is_last,
        share_embeddings_and_output_weights=layout.is_tied,
    ).to(platform.device)
    if transformer_config.fp8:  # lets products take any number of tokens: Transformer Engine wants multiples of 16
        from megatron.core.fp8_utils import prepare_model_for_fp8_inference

        prepare_model_for_fp8_inference(gpt)
    gpt.rotary_pos_emb.__class__ = _TrainableRotaryEmbedding
    # Sized to what a run can reach, not to the model's advertised context of 131072.
    reach = max(config.training.seq_length, config.rollout.inference_max_seq_length)
    policy = PolicyModel(
        gpt=gpt,
        config=transformer_config,
        rope=RopeTable(gpt.rotary_pos_emb, reach),
        attention=proven_attention(config, platform, layout),
        layout=layout,
        vocab_size=vocab_size,
        dtype=transformer_config.params_dtype,
        device=platform.device,
    )
    if config.precision.bf16:
        gpt.to(torch.bfloat16)
    logger.info("model: %s parameters on this rank, vocabulary %d (padded to %d)",
                f"{policy.num_parameters:,}", vocab_size, layout.padded_vocab_size)
    logger.info("%s", policy.attention.reason)
    return policy


@contextlib.contextmanager
def rollout_mode(policy: PolicyModel, wrapped: DistributedDataParallel | None = None) -> Iterator[None]:
    """Evaluation mode, all parameters gathered, sequence parallelism off.

    Sequence parallelism would cut a decode batch of one token a row into uneven pieces; the
    results are the same without it. ``wrapped`` is given in training runs: with
    `--overlap-param-gather` the updated parameters are still on their way after the optimizer
    step, and a rollout on half of them would be silently stale.
    """
    hooked = wrapped is not None and wrapped.ddp_config.overlap_param_gather
    if hooked:
        wrapped.disable_forward_pre_hook(param_sync=True)
    # megatron's `set_model_to_sequence_parallel` remembers the modules of a model by ``id(model)`` for ever: a model
    # made where another one lay before kept its sequence parallelism, and the modules of the old one were never freed.
    owners = (policy.config, *policy.gpt.modules()) if policy.config.sequence_parallel else ()
    on = [(owner, name) for owner in owners for name in _SWITCHES if getattr(owner, name, None) is True]
    policy.gpt.eval()
    try:
        for owner, name in on:
            setattr(owner, name, False)
        yield
    finally:
        for owner, name in on:
            setattr(owner, name, True)
        if hooked:
            wrapped.enable_forward_pre_hook()
        policy.gpt.train()
