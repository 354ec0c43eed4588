"""What layers of Transformer Engine are not built for."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config.rl_config import RLConfig
from megatron_rl.config.rules.quantization import fp8_flags
from megatron_rl.config.rules.wording import Rule

_WHAT = "--transformer-impl transformer_engine"


def _model_and_rollouts(config: RLConfig) -> Iterator[str]:
    if config.kernels.transformer_impl != "transformer_engine":
        return
    recipe = config.quantization.rl_rollout_quantization
    if recipe != "none":
        yield (
            f"{_WHAT} with --rl-rollout-quantization {recipe}: only megatron's own linears have quantised copies; "
            "leave one of them out"
        )
    if config.rollout.rl_inference_engine == "mcore":
        yield f"{_WHAT} with --rl-inference-engine mcore is not built: it was never tried; use rollout"
    if config.model.num_experts is not None:
        yield f"{_WHAT} with --num-experts is not built; use --transformer-impl local"


def _checkpoints(config: RLConfig) -> Iterator[str]:
    if config.kernels.transformer_impl == "transformer_engine" and config.checkpoint.ckpt_format == "torch":
        yield (
            f"{_WHAT} with --ckpt-format torch: it keeps the optimizer's state in the order of the parameters, which "
            "other layers change; use torch_dist"
        )


def _fp8(config: RLConfig) -> Iterator[str]:
    flags = fp8_flags(config)
    if config.kernels.transformer_impl != "transformer_engine" or not flags:
        return
    what, precision = f"{_WHAT} {flags}", config.precision
    if precision.fp8_format is None or precision.fp8_recipe is None:
        missing = "--fp8-format e4m3" if precision.fp8_format is None else "--fp8-recipe blockwise"
        yield f"{what} needs {missing} beside it; add it"
        return
    if precision.fp8_recipe == "delayed":
        yield (
            f"{what}: delayed scales come from the steps before, and ranks exchange them after every micro-batch, of "
            "which ranks have different numbers here; use --fp8-recipe tensorwise or blockwise"
        )
    if precision.fp8_recipe == "mxfp8":
        yield f"{what} needs a Blackwell GPU and was never tried; use --fp8-recipe blockwise"
    if not precision.bf16:
        yield f"{what} without --bf16: fp8 products come out in bf16; add --bf16"


RULES: tuple[Rule, ...] = (_model_and_rollouts, _checkpoints, _fp8)
