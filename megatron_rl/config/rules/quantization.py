"""Quantised rollouts and aligned training, as far as flags alone can tell.

Recipe names, the device and the layers' shapes are looked at before a model is built, too: see
``megatron_rl.preflight.quantization``.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config.rl_config import RLConfig
from megatron_rl.config.rules.wording import Rule


def _aligned_training(config: RLConfig) -> Iterator[str]:
    settings = config.quantization
    if settings.rl_train_forward != "quantized":
        return
    what = "--rl-train-forward quantized"
    if settings.rl_rollout_quantization == "none":
        yield f"{what} has nothing to quantise with; give --rl-rollout-quantization, for example int8"
    if not config.training.perform_rl_step:
        yield f"{what} without --perform-rl-step: supervised training has no rollouts to agree with; leave it out"
    if config.parallel.overlap_param_gather:
        yield (
            f"{what} with --overlap-param-gather: the weights to quantise after an update are still on their way "
            "then; leave out --overlap-param-gather"
        )
    if settings.rl_mismatch_action == "fallback":
        yield (
            f"{what} with --rl-mismatch-action fallback: another recipe for the rollouts alone would open the gap "
            "that alignment closes; use --rl-mismatch-action stop"
        )


def _skip(config: RLConfig) -> Iterator[str]:
    settings = config.quantization
    if settings.rl_quantization_skip and settings.rl_rollout_quantization == "none":
        yield "--rl-quantization-skip without --rl-rollout-quantization has nothing to skip; leave it out"


def _kv_cache(config: RLConfig) -> Iterator[str]:
    settings = config.quantization
    if not config.kv_cache_is_rounded:
        return
    what = f"--rl-kv-cache-dtype {settings.rl_kv_cache_dtype}"
    if config.rollout.rl_inference_engine == "mcore":
        yield f"{what} with --rl-inference-engine mcore, which stores the model's numbers; use --rl-kv-cache-dtype auto"
    if settings.rl_train_forward == "quantized":
        yield (
            f"{what} with --rl-train-forward quantized: the trainer keeps keys and values in full precision, which "
            "would open the gap that alignment closes; use --rl-kv-cache-dtype auto"
        )
    if settings.rl_mismatch_action == "fallback" and settings.rl_rollout_quantization == "none":
        yield (
            f"{what} with --rl-mismatch-action fallback and unquantised linear layers: there is no safer format to "
            "fall back to, the KV cache keeps its own; use --rl-mismatch-action stop or warn"
        )


def _fp8_training(config: RLConfig) -> Iterator[str]:
    precision = config.precision
    form, recipe = precision.fp8_format, precision.fp8_recipe
    flags = fp8_flags(config)
    if not flags or config.kernels.transformer_impl == "transformer_engine":
        return
    if form == "hybrid" or recipe in ("tensorwise", "delayed", "mxfp8"):
        yield (
            f"{flags} is refused: fp8 training on local layers is e4m3 with blockwise scales; use --fp8-format e4m3 "
            "--fp8-recipe blockwise"
        )
        return
    if form is None or recipe is None:
        missing = "--fp8-format e4m3" if form is None else "--fp8-recipe blockwise"
        yield f"{flags} needs {missing} beside it; add it"
        return
    if not config.training.perform_rl_step:
        yield f"{flags} without --perform-rl-step: supervised training runs in full precision; leave it out"
    rollouts = config.quantization.rl_rollout_quantization
    if config.typed.get("rl_train_forward") == "plain":
        yield f"{flags} with --rl-train-forward plain: one asks for what the other forbids; leave one of them out"
    elif rollouts not in ("fp8_block", "fp8_block_pow2"):
        yield (
            f"{flags} with --rl-rollout-quantization {rollouts}: trainer and rollouts would round differently, which "
            "is worse than no fp8 training; use --rl-rollout-quantization fp8_block_pow2"
        )


def fp8_flags(config: RLConfig) -> str:
    """As they are typed; empty without any."""
    given = (("format", config.precision.fp8_format), ("recipe", config.precision.fp8_recipe))
    return " ".join(f"--fp8-{name} {value}" for name, value in given if value is not None)


RULES: tuple[Rule, ...] = (_aligned_training, _skip, _kv_cache, _fp8_training)
