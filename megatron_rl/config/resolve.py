"""Defaults that follow from other values, filled in once. What the user typed is never overwritten."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_rl.config.rl_config import RLConfig
from megatron_rl.config.schedule import ScheduleConfig
from megatron_rl.registry import LOSSES

MOST_DECODED_AT_ONCE = 256
"""Bound of the default decode batch: beyond it, the KV cache grows faster than the throughput."""


def resolve(config: RLConfig, world_size: int) -> RLConfig:
    """``config`` with every derived default filled in; resolving twice changes nothing.

    A value that cannot be derived, because what it derives from is absent or wrong, stays None:
    ``validate`` says so.
    """
    config = _training(_model(_evaluation(config)), world_size)
    for step in (_kernels, _parallel, _schedule, _quantization, _policy_loss, _correction, _paths):
        config = step(config)
    return _rollout(config, world_size)


def _evaluation(config: RLConfig) -> RLConfig:
    """An evaluation alone takes weights and no step: what only training needs has any value."""
    if not config.training.eval_only:
        return config
    training = replace(config.training, perform_rl_step=False, train_samples=None, train_iters=1, eval_interval=1)
    return replace(
        config,
        training=training,
        optimizer=_fill(config.optimizer, lr=1.0),
        schedule=ScheduleConfig(),  # that of a training command is of another length
        checkpoint=replace(config.checkpoint, finetune=True, resume=False),
    )


def _model(config: RLConfig) -> RLConfig:
    model = config.model
    heads, hidden = model.num_attention_heads, model.hidden_size
    filled = _fill(
        model,
        ffn_hidden_size=_ffn_hidden_size(hidden, model.swiglu) if hidden else None,
        num_query_groups=1 if model.group_query_attention else heads,
        kv_channels=hidden // heads if hidden and heads and hidden % heads == 0 else None,
        max_position_embeddings=config.training.seq_length,
        embedding_init_method_std=model.init_method_std,
    )
    if filled.num_experts is not None:
        filled = _fill(filled, moe_ffn_hidden_size=filled.ffn_hidden_size)
    return replace(config, model=filled)


def _ffn_hidden_size(hidden_size: int, swiglu: bool) -> int:
    """Megatron's rule: a gated MLP has a third matrix, so 2/3 of the width has as many parameters."""
    return max(64, int(4 * hidden_size * 2 / 3 / 64) * 64) if swiglu else 4 * hidden_size


def _kernels(config: RLConfig) -> RLConfig:
    kernels = config.kernels
    if kernels.recompute_activations:
        kernels = _fill(kernels, recompute_granularity="selective")
    if kernels.recompute_granularity == "selective":
        kernels = _fill(kernels, recompute_modules=("core_attn",))
    return replace(config, kernels=kernels)


def _parallel(config: RLConfig) -> RLConfig:
    if config.parallel.tensor_model_parallel_size > 1:
        return config
    # As Megatron does; ``notes`` tells whoever typed the flag.
    return replace(config, parallel=replace(config.parallel, sequence_parallel=False))


def _training(config: RLConfig, world_size: int) -> RLConfig:
    training = config.training
    supervised_batch = training.micro_batch_size * config.data_parallel_size(world_size)
    batch = config.samples_per_step if training.perform_rl_step else supervised_batch
    filled = _fill(
        training,
        global_batch_size=batch or None,
        rl_sequence_packing_bin_size=training.micro_batch_size * (training.seq_length or 0) or None,
    )
    return replace(config, training=filled)


def _schedule(config: RLConfig) -> RLConfig:
    training = config.training
    filled = _fill(
        config.schedule,
        lr_decay_iters=training.train_iters,
        lr_decay_samples=training.train_samples,
    )
    return replace(config, schedule=filled)


def _quantization(config: RLConfig) -> RLConfig:
    """fp8 training is aligned training with the tiles that Transformer Engine's blockwise recipe has."""
    precision, settings = config.precision, config.quantization
    if config.kernels.transformer_impl == "transformer_engine":  # which has fp8 products of its own
        return config
    if precision.fp8_format != "e4m3" or precision.fp8_recipe != "blockwise":
        return config
    if settings.rl_rollout_quantization == "none" and "rl_rollout_quantization" not in config.typed:
        settings = replace(settings, rl_rollout_quantization="fp8_block_pow2")
    if "rl_train_forward" not in config.typed:
        settings = replace(settings, rl_train_forward="quantized")
    return replace(config, quantization=settings)


def _policy_loss(config: RLConfig) -> RLConfig:
    """Clip ranges of one loss mean nothing in another: those of a sequence's ratio are a thousandth of a token's."""
    algorithm = config.algorithm
    lower, upper = LOSSES.stated(algorithm.rl_policy_loss, "DEFAULT_CLAMP") or (0.2, 0.2)
    aggregation = LOSSES.stated(algorithm.rl_policy_loss, "DEFAULT_AGGREGATION") or "token-mean"
    filled = _fill(
        algorithm,
        grpo_clamp_eps_lower=lower,
        grpo_clamp_eps_upper=upper,
        rl_loss_aggregation="token-mean" if algorithm.calculate_per_token_loss else aggregation,
    )
    return replace(config, algorithm=filled)


def _correction(config: RLConfig) -> RLConfig:
    """Quantised rollouts are of another policy than the trainer's by construction: that is corrected."""
    quantized = config.quantization.rl_rollout_quantization != "none" or config.kv_cache_is_rounded
    name = "token_tis" if quantized else "none"
    return replace(config, algorithm=_fill(config.algorithm, rl_correction=name))


def _paths(config: RLConfig) -> RLConfig:
    if (config.logging.run_dir or config.checkpoint.save) is None:
        return config
    run_dir = Path(config.logging.run_dir or config.checkpoint.save)
    logging = _fill(
        config.logging,
        run_dir=str(run_dir),
        tensorboard_dir=str(run_dir / "tensorboard"),
        wandb_exp_name=run_dir.name,
        wandb_save_dir=str(run_dir / "wandb"),
    )
    checkpoint = _fill(config.checkpoint, save=str(run_dir / "checkpoints"))
    return replace(config, logging=logging, checkpoint=checkpoint)


def _rollout(config: RLConfig, world_size: int) -> RLConfig:
    rollout = config.rollout
    longest = rollout.inference_max_seq_length or config.training.seq_length
    prompts, samples = _generated(config)
    share = math.ceil(prompts / config.data_parallel_size(world_size)) * samples  # a group stays on one rank
    filled = _fill(
        rollout,
        inference_max_seq_length=longest,
        rl_max_new_tokens=longest - 1 if longest else None,  # a prompt has at least one token
        inference_max_batch_size=max(1, min(share, MOST_DECODED_AT_ONCE)),
    )
    # Megatron writes "off" as top-p 0 and top-k -1.
    return replace(
        config,
        rollout=replace(filled, rl_top_p=filled.rl_top_p or 1.0, rl_top_k=max(0, filled.rl_top_k)),
    )


def _generated(config: RLConfig) -> tuple[int, int]:
    """Prompts and completions of each wanted at once: a rollout's, or in supervised training an evaluation's."""
    environment, algorithm = config.environment, config.algorithm
    if config.training.perform_rl_step:
        return algorithm.grpo_prompts_per_step or 0, algorithm.grpo_group_size or 0
    return environment.rl_prompts_per_eval, environment.rl_samples_per_eval_prompt


def _fill(section: Any, **derived: Any) -> Any:
    """The section with ``derived`` values where it has none."""
    return replace(section, **{name: v for name, v in derived.items() if getattr(section, name) is None})
