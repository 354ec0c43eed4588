"""Build GPTModel from flags, and switch it to rollouts."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_rl.config.rl_config import RLConfig
from megatron_rl.errors import ConfigError
from megatron_rl.families import Architecture, Head, ModelLayout
from megatron_rl.models.attention.plan import Ropes
from megatron_rl.models.attention.rotation import rope_tables
from megatron_rl.models.attention.selection import Attention, checked_attention, requirements_of
from megatron_rl.models.blocks import BLOCKS
from megatron_rl.models.expert_ops import quick_gelu
from megatron_rl.models.fp8_weights import Fp8Weights
from megatron_rl.models.parameters import draw_parameters, named_parameters, no_init, refuse_buffers
from megatron_rl.models.rollout_ops import ValueHead, scale_embedding
from megatron_rl.models.spec import block_spec, fp8_settings, pad_products
from megatron_rl.platform import Platform
from megatron_rl.platform.cuda import forbid_split_k
from megatron_rl.platform.groups import current_groups
from megatron_rl.platform.megatron import pipeline_settings, reduce_in_rank_order, skip_weight_init

logger = logging.getLogger(__name__)

_SWITCHES = ("sequence_parallel", "scatter_to_sequence_parallel", "reduce_scatter_embeddings")
"""Attributes of megatron's modules that split a sequence over tensor-parallel ranks."""


class _TrainableRotaryEmbedding(RotaryEmbedding):
    """Computes embeddings outside of ``inference_mode``: megatron caches them, and training needs normal tensors."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with torch.inference_mode(False):
            return super().forward(*args, **kwargs)


@dataclass(frozen=True)
class PolicyModel:
    """The model that this process trains and generates with, on one set of parameters; or its critic."""

    chunks: tuple[GPTModel, ...]
    """This rank's parts in forward order: one, or one per virtual pipeline stage."""
    config: TransformerConfig
    ropes: Ropes
    attention: Attention
    layout: ModelLayout
    vocab_size: int
    """Real vocabulary; columns from here to ``padded_vocab_size`` are never sampled or scored."""
    dtype: torch.dtype
    device: torch.device
    fp8_weights: Fp8Weights | None = None
    """With `--fp8-param-gather`."""

    @property
    def gpt(self) -> GPTModel:
        """The whole model, if this rank has all layers."""
        (whole,) = self.chunks
        return whole

    @property
    def layers(self) -> list[TransformerLayer]:
        """This rank's decoder layers, in forward order."""
        return [layer for gpt in self.chunks for layer in gpt.decoder.layers]

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        return (parameter for gpt in self.chunks for parameter in gpt.parameters())

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield parameters with their global names."""
        return named_parameters(self.chunks)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The distinct windows of this rank's layers; None: full attention."""
        return tuple(dict.fromkeys(layer.kind.window for layer in self.layout.layers))

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding over all tensor-parallel ranks."""
        return self.layout.padded_vocab_size

    @property
    def num_parameters(self) -> int:
        """Number of parameter elements on this rank."""
        return sum(parameter.numel() for parameter in self.parameters())


def build_transformer_config(config: RLConfig, platform: Platform) -> TransformerConfig:
    """Build megatron's configuration; flags keep their names. Fused kernels stay off without CUDA."""
    model, kernels, shape = config.model, config.kernels, config.architecture()
    blocks = {BLOCKS.get(name) for kind in shape.kinds for name in (kind.mixer, kind.mlp)}
    settings = next((block.settings for block in blocks if "settings" in vars(block)), TransformerConfig)
    common, known = ({field.name for field in dataclasses.fields(cls)} for cls in (TransformerConfig, settings))
    flags = vars(model) | vars(config.experts) | vars(config.parallel) | vars(config.delta)
    values = {name: value for name, value in flags.items() if name in known}
    of_layers = vars(config.layers) | vars(config.latent) | vars(config.rotation)
    values |= {name: value for name, value in of_layers.items() if name in known - common}
    # megatron would weight its own losses differently: see `BalanceLosses`.
    values |= {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": None}
    has_state = [int(kind.mixer == "delta") for kind in shape.kinds]
    values["linear_attention_freq"] = has_state if any(has_state) else None  # a list: checkpoints name each layer
    experts_in = [kind.mlp == "experts" for kind in shape.kinds]
    values["moe_layer_freq"] = 1 if len(set(experts_in)) == 1 else [int(has_experts) for has_experts in experts_in]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return settings(
            **values,
            attention_dropout=0.0,  # rollouts have none
            layernorm_epsilon=model.norm_epsilon,
            layernorm_zero_centered_gamma=shape.apply_layernorm_1p,
            gated_linear_unit=shape.is_gated,
            activation_func=_activation(shape),
            softmax_type=shape.softmax_type,
            activation_func_clamp_value=shape.activation_func_clamp_value,
            glu_linear_offset=shape.glu_linear_offset,
            num_moe_experts=model.num_experts,
            moe_router_dtype=None if model.num_experts is None else "fp32",  # so that near ties fall alike
            moe_token_dispatcher_type="alltoall",  # the other one wants as many tokens on every rank
            init_method=no_init,
            output_layer_init_method=no_init,
            embedding_init_method=no_init,
            use_cpu_initialization=kernels.use_cpu_initialization or not platform.is_cuda,
            params_dtype=requirements_of(config).dtype,
            **pipeline_settings(config.stages, requirements_of(config).dtype, platform.is_cuda),
            bf16=config.precision.bf16,
            transformer_impl=kernels.transformer_impl,
            deterministic_mode=kernels.is_deterministic and platform.is_cuda,  # the embedding's gradient is sorted
            **fp8_settings(config),
            recompute_granularity=kernels.recompute_granularity,
            recompute_method=kernels.recompute_method,
            recompute_num_layers=kernels.recompute_num_layers,
            recompute_modules=None if kernels.recompute_modules is None else list(kernels.recompute_modules),
            # Our losses are sums with an explicit global denominator: with this switch megatron divides once by it,
            # after the data-parallel reduction.
            calculate_per_token_loss=True,
            # Fusions that need Apex, Transformer Engine or a CUDA kernel: parity before speed.
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            apply_rope_fusion=False,
        )


def _activation(shape: Architecture) -> Callable[[torch.Tensor], torch.Tensor]:
    if shape.swiglu:
        return functional.silu
    if shape.quick_geglu:
        return quick_gelu
    return functools.partial(functional.gelu, approximate="tanh") if shape.geglu else functional.gelu


def build_model(
    config: RLConfig, platform: Platform, vocab_size: int, head: Head = "vocabulary", is_filled_later: bool = False
) -> PolicyModel:
    """Build this rank's part of the model with random weights from torch's seed; ``vocab_size`` is the tokenizer's.

    The head ``value`` makes it a critic with the same trunk and no router replay. With ``is_filled_later`` weights are
    uninitialised: the caller loads all of them.
    """
    _fix_summation_orders(config, platform)
    transformer_config = build_transformer_config(config, platform)
    # Set late: megatron's own mode would require its attention backend. `rollout_ops.is_thin` reads it.
    transformer_config.batch_invariant_mode = config.kernels.batch_invariant_mode
    groups = current_groups()
    layout = config.layout(vocab_size, groups.stage, groups.experts.parallel.rank(), head)
    if len({layer.cache for layer in layout.key_layers}) > 1:  # one shape is tried, and given to megatron's own engine
        raise ConfigError(["layers whose heads differ in number or width are not built: the KV cache has one shape"])
    with skip_weight_init():
        chunks = [_build_chunk(config, transformer_config, layout, chunk) for chunk in range(config.stages.chunks)]
    fp8_weights = Fp8Weights(chunks) if transformer_config.fp8_param else None
    chunks = tuple(gpt.to(platform.device) for gpt in chunks)
    refuse_buffers(chunks)
    transformer_config.moe_router_enable_expert_bias = False  # else megatron moves the frozen biases after each update
    on_cpu = transformer_config.use_cpu_initialization
    if not is_filled_later:
        draw_parameters(chunks, layout, config.model, torch.initial_seed(), groups.part_of, on_cpu)
    for gpt in chunks:
        if transformer_config.fp8:
            pad_products(gpt)
        if not transformer_config.multi_latent_attention:  # whose layers would have one each
            gpt.rotary_pos_emb.__class__ = _TrainableRotaryEmbedding
        if config.rollout.rl_router_replay and head == "vocabulary":
            for layer in gpt.decoder.layers:
                if layer.is_moe_layer:
                    layer.mlp.replay_routing()
    # Sized to the longest sequence of the run, not to the model's context of e.g. 131072.
    reach = max(config.training.seq_length, config.rollout.inference_max_seq_length)
    policy = PolicyModel(
        chunks=chunks,
        config=transformer_config,
        ropes=rope_tables(layout.architecture, reach, transformer_config.use_cpu_initialization),
        attention=checked_attention(config, platform, layout),
        layout=layout,
        vocab_size=vocab_size,
        dtype=transformer_config.params_dtype,
        device=platform.device,
        fp8_weights=fp8_weights,
    )
    logger.info("%s: %s parameters on this rank, vocabulary %d (padded to %d)",
                "model" if head == "vocabulary" else "critic", f"{policy.num_parameters:,}", vocab_size,
                layout.padded_vocab_size)
    if head == "vocabulary":
        logger.info("%s", policy.attention.reason)
    return policy


def _fix_summation_orders(config: RLConfig, platform: Platform) -> None:
    if config.kernels.batch_invariant_mode and platform.is_cuda:
        forbid_split_k()
        reduce_in_rank_order()


def _build_chunk(config: RLConfig, settings: TransformerConfig, layout: ModelLayout, chunk: int) -> GPTModel:
    model, chunks = config.model, config.stages.chunks
    number = chunk if chunks > 1 else None
    size = len(layout.layers) // chunks
    kinds = [layer.kind for layer in layout.layers[chunk * size : (chunk + 1) * size]]
    gpt = GPTModel(
        settings,
        block_spec(settings, kinds),
        vocab_size=layout.padded_vocab_size,
        max_sequence_length=max(model.max_position_embeddings, config.training.seq_length),
        position_embedding_type=layout.architecture.position_embedding_type,
        rotary_base=model.rotary_base,
        rotary_percent=model.rotary_percent,
        seq_len_interpolation_factor=layout.architecture.rotary_seq_len_interpolation_factor,
        rope_scaling=model.use_rope_scaling,
        rope_scaling_factor=model.rope_scaling_factor,
        pre_process=layout.is_first and chunk == 0,
        post_process=layout.is_last and chunk == chunks - 1,
        share_embeddings_and_output_weights=layout.is_tied,
        vp_stage=number,
    )
    if gpt.pre_process and layout.architecture.scale_embedding:
        scale_embedding(gpt, settings)
    if gpt.post_process and layout.head == "value":
        gpt.output_layer = ValueHead(settings)
    return gpt


@contextlib.contextmanager
def rollout_mode(policy: PolicyModel, wrapped: Sequence[DistributedDataParallel] = ()) -> Iterator[None]:
    """Switch to evaluation mode, with all parameters gathered, and no sequence parallelism (it cannot split single
    tokens).

    ``wrapped``: the DDP chunks in training runs. With `--overlap-param-gather` updated parameters are still being
    gathered after the optimizer step; the rollout waits for them.
    """
    hooked = [chunk for chunk in wrapped if chunk.ddp_config.overlap_param_gather]
    for chunk in hooked:
        chunk.disable_forward_pre_hook(param_sync=True)
    # Not megatron's `set_model_to_sequence_parallel`: it remembers modules by ``id(model)`` for ever, so a new model at
    # an old address would get old settings, and old modules would never be freed.
    modules = [module for gpt in policy.chunks for module in gpt.modules()]
    owners = (policy.config, *modules) if policy.config.sequence_parallel else ()
    on = [(owner, name) for owner in owners for name in _SWITCHES if getattr(owner, name, None) is True]
    for gpt in policy.chunks:
        gpt.eval()
    try:
        for owner, name in on:
            setattr(owner, name, False)
        yield
    finally:
        for owner, name in on:
            setattr(owner, name, True)
        for chunk in hooked:
            chunk.enable_forward_pre_hook()
        for gpt in policy.chunks:
            gpt.train()
