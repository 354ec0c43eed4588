"""Number formats: of training, of rollouts, and how far the two may drift apart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron_rl.config.flags import Finding, flag
from megatron_rl.families.architecture import ExpertShare
from megatron_rl.families.blocks import BLOCKS
from megatron_rl.families.layout import ModelLayout
from megatron_rl.registry import RECIPES

if TYPE_CHECKING:
    from megatron_rl.config.rl_config import RLConfig


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Dtypes of training. Parameters are fp32 unless --bf16 is given."""

    bf16: bool = flag(False, common=True)
    """Train parameters and activations in bfloat16, with fp32 main parameters."""
    accumulate_allreduce_grads_in_fp32: bool = flag(
        True, off="--no-accumulate-allreduce-grads-in-fp32", off_aliases=("--grad-reduce-in-bf16",)
    )
    """Accumulation and reduction of gradients in fp32 instead of the parameters' dtype."""
    dither_main_params: bool = flag(True, off="--no-dither-main-params")
    """Dithering: with --bf16, fp32 main parameters start at a random point among the numbers that round to the bf16
    weights, so that updates much smaller than a bf16 step take effect at once."""
    fp8_format: Literal["e4m3", "hybrid"] | None = flag(None)
    """Train in fp8. Local layers (with --fp8-recipe blockwise) run the forward pass on the rollouts' quantized weights;
    layers of --transformer-impl transformer_engine run all GEMMs in fp8, backward pass included."""
    fp8_recipe: Literal["tensorwise", "delayed", "blockwise", "mxfp8"] | None = flag(None)
    """Scaling of fp8 training: blockwise, a power-of-two scale per tile of 128 x 128; tensorwise, one scale per tensor,
    with transformer_engine only. The others are refused."""
    fp8_param_gather: bool = flag(False)
    """Keep the weights of Transformer Engine's fp8 linears as codes, made of the main parameters after each update, and
    gather codes; experts stay in bf16. Needs --fp8-format and --use-distributed-optimizer."""
    use_precision_aware_optimizer: bool = flag(False)
    """Keep Adam's moments in --exp-avg-dtype and --exp-avg-sq-dtype. Needs --use-distributed-optimizer."""
    exp_avg_dtype: Literal["fp32", "fp16", "bf16", "fp8"] = flag("fp32")
    """Dtype of Adam's running mean of gradients; fp8 is E4M3 with a scale per 128 numbers."""
    exp_avg_sq_dtype: Literal["fp32", "fp16", "bf16", "fp8"] = flag("fp32")
    """Dtype of Adam's running mean of squared gradients; fp8 stores its square root."""


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """Quantized rollouts, and the check of the rollout-trainer mismatch."""

    rl_rollout_quantization: str = flag("none", common=True, names_of=RECIPES)
    """Format of the linear layers in rollouts, e.g. fp8_block."""
    rl_quantization_skip: tuple[str, ...] = flag(())
    """Linear layers to leave unquantized: patterns such as layers.0.* or *.linear_fc2, first:N, last:N. Example:
    first:1 last:1."""
    rl_kv_cache_dtype: Literal["auto", "bf16", "fp8"] = flag("auto")
    """Dtype of the KV cache in rollouts: the model's (auto), bf16, or fp8 (E4M3 with one scale per layer and KV
    head)."""
    rl_train_forward: Literal["plain", "quantized"] = flag("plain")
    """With quantized, the trainer's forward pass uses the rollouts' quantized weights and activations too."""
    rl_train_backward: Literal["plain", "quantized"] = flag("plain")
    """With quantized, the GEMMs of the backward pass use the rollouts' format too. Needs --rl-train-forward
    quantized."""
    rl_evaluate_unquantized: bool = flag(False)
    """Run evaluations without quantization. By default they use the rollouts' format."""
    rl_mismatch_action: Literal["warn", "stop", "fallback"] = flag("warn")
    """What to do when the rollout-trainer mismatch is too large: warn, stop, or fallback, which repeats the rollout in
    the next safer format."""
    rl_mismatch_max_kl: float = flag(0.02, gt=0)
    """Largest KL between rollout and trainer (k3 estimate), in nats per token."""
    rl_mismatch_max_gap: float = flag(0.15, gt=0)
    """Largest mean difference of rollout and trainer log-probs, in nats per token."""
    rl_mismatch_interval: int = flag(0, ge=0)
    """Steps between two full mismatch checks; 0 checks only before the first update of a launch."""


def precision_problems(config: RLConfig, _: int) -> Iterator[Finding]:
    """Report fp8 training that local layers or those of Transformer Engine do not take."""
    form, recipe = config.precision.fp8_format, config.precision.fp8_recipe
    if form is None and recipe is None:
        return
    engine = config.kernels.transformer_impl == "transformer_engine"
    if not engine and (form == "hybrid" or recipe in ("tensorwise", "delayed", "mxfp8")):
        text = "is refused: fp8 training on local layers needs --fp8-format e4m3 --fp8-recipe blockwise"
        yield "fp8_format" if form == "hybrid" else "fp8_recipe", text
    elif recipe is None:
        yield "fp8_format", "needs --fp8-recipe blockwise beside it; add it"
    elif form is None:
        yield "fp8_recipe", "needs --fp8-format e4m3 beside it; add it"
    else:
        yield from _engine_fp8(config) if engine else _aligned_fp8(config)


def _aligned_fp8(config: RLConfig) -> Iterator[Finding]:
    """fp8 training on local layers is aligned training: the trainer's forward pass on the rollouts' weights."""
    rollouts = config.quantization.rl_rollout_quantization
    if not (config.training.perform_rl_step or config.training.eval_only):
        yield "fp8_format", "without --perform-rl-step: SFT runs in full precision; leave it out"
    if config.typed.get("rl_train_forward") == "plain":
        yield "fp8_format", "with --rl-train-forward plain: one asks for what the other forbids; leave one of them out"
    elif rollouts not in ("fp8_block", "fp8_block_pow2"):
        yield "fp8_format", (
            f"with --rl-rollout-quantization {rollouts}: trainer and rollouts would round differently; use "
            "--rl-rollout-quantization fp8_block_pow2"
        )


def _engine_fp8(config: RLConfig) -> Iterator[Finding]:
    if config.precision.fp8_recipe == "delayed":
        yield "fp8_recipe", (
            ": delayed scales are exchanged after every micro-batch, of which ranks have different numbers here; use "
            "--fp8-recipe tensorwise or blockwise"
        )
    if config.precision.fp8_recipe == "mxfp8":
        yield "fp8_recipe", "needs a Blackwell GPU and was never tried; use --fp8-recipe blockwise"
    if not config.precision.bf16:
        yield "fp8_format", "without --bf16: fp8 products come out in bf16; add --bf16"
    if not config.has_shape:
        return
    parallel = config.parallel
    experts = ExpertShare(tensor_size=parallel.expert_tensor_parallel_size)
    layout = ModelLayout.of(config.architecture(), parallel.tensor_model_parallel_size, experts=experts)
    odd = next((each for each in layout.linears if each.rows % 16 or each.columns % 16), None)
    if odd is not None:
        yield "fp8_format", (
            f"with --tensor-model-parallel-size {parallel.tensor_model_parallel_size}: a rank's part of {odd.name} is "
            f"{odd.rows} x {odd.columns}, and fp8 products take multiples of 16; use another tensor-parallel size, or "
            "leave --fp8-format and --fp8-recipe out"
        )


def code_problems(config: RLConfig, _: int) -> Iterator[Finding]:
    """Report what a model whose weights are fp8 codes needs, and what is not built for it."""
    if not config.precision.fp8_param_gather:
        return
    parallel = config.parallel
    needed = {
        "--transformer-impl transformer_engine": config.kernels.transformer_impl == "transformer_engine",
        "--fp8-format e4m3 --fp8-recipe blockwise": config.precision.fp8_format is not None,
        "--use-distributed-optimizer": parallel.use_distributed_optimizer,
    }
    refused = {
        # megatron-core turns codes for the backward pass only where a forward pass has waited for them: not rollouts.
        "--overlap-param-gather": parallel.overlap_param_gather,
        "--lora-rank": config.lora.lora_rank is not None,
        "--grpo-kl-beta": config.wants_reference,
        "--rl-advantage gae": config.wants_critic,
        "a teacher": config.wants_teacher,
        "--rl-train-forward quantized": config.quantization.rl_train_forward == "quantized",
        "--use-precision-aware-optimizer": config.precision.use_precision_aware_optimizer,
        "--use-cpu-initialization": config.kernels.use_cpu_initialization,
        "--eval-only": config.training.eval_only,
    }
    if missing := [name for name, is_there in needed.items() if not is_there]:
        yield "fp8_param_gather", f"needs {' '.join(missing)} beside it; add {'it' if len(missing) == 1 else 'them'}"
    for name, is_there in refused.items():
        if is_there:
            yield "fp8_param_gather", f"with {name} is not built; leave one of them out"


def moment_problems(config: RLConfig, _: int) -> Iterator[Finding]:
    """Report a wrong `--use-precision-aware-optimizer`, and dtypes that do nothing without it."""
    precision, flag_ = config.precision, "use_precision_aware_optimizer"
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        dtype = getattr(precision, name)
        if dtype == "fp16":
            yield name, "is not built: squared gradients underflow in fp16; use bf16"
        elif dtype != "fp32" and not precision.use_precision_aware_optimizer:
            yield name, "needs --use-precision-aware-optimizer beside it; add it"
    if not precision.use_precision_aware_optimizer:
        return
    if config.optimizer.optimizer != "adam":
        yield flag_, f"with --optimizer {config.optimizer.optimizer}, which has no such moments; use --optimizer adam"
    elif not config.parallel.use_distributed_optimizer:
        yield flag_, "needs --use-distributed-optimizer beside it; add it"


def engine_problems(config: RLConfig, _: int) -> Iterator[Finding]:
    """Report what layers of Transformer Engine are not built for."""
    if config.kernels.transformer_impl != "transformer_engine":
        return
    if config.model.num_experts is not None and not config.model.moe_grouped_gemm:
        yield "transformer_impl", (
            "with --num-experts needs --moe-grouped-gemm: its experts are one product; add it, or use "
            "--transformer-impl local"
        )


def alignment_problems(config: RLConfig, _: int) -> Iterator[Finding]:
    """Report wrong quantised rollouts and aligned training by flags alone; `preflight` looks at the layers."""
    settings, plain = config.quantization, config.quantization.rl_rollout_quantization == "none"
    if settings.rl_quantization_skip and plain:
        yield "rl_quantization_skip", "without --rl-rollout-quantization has nothing to skip; leave it out"
    if settings.rl_train_forward != "quantized":
        if settings.rl_train_backward == "quantized":
            yield "rl_train_backward", "without --rl-train-forward quantized; add it, or leave this out"
        return
    if plain:
        yield "rl_train_forward", "has nothing to quantise with; give --rl-rollout-quantization, for example int8"
    if not config.training.perform_rl_step:
        text = "without --perform-rl-step: SFT has no rollouts to agree with; leave it out"
        yield "rl_train_forward", text
    if config.parallel.overlap_param_gather:
        yield "rl_train_forward", (
            "with --overlap-param-gather: the weights to quantise are still on their way then; leave out "
            "--overlap-param-gather"
        )
    if settings.rl_mismatch_action == "fallback":
        yield "rl_train_forward", (
            "with --rl-mismatch-action fallback, which changes the recipe of rollouts alone; use --rl-mismatch-action "
            "stop"
        )


def cache_problems(config: RLConfig, _: int) -> Iterator[Finding]:
    """Report a KV cache with fewer bits than the model's numbers."""
    settings = config.quantization
    if not config.kv_cache_is_rounded:
        return
    if settings.rl_train_forward == "quantized":
        yield "rl_kv_cache_dtype", (
            "with --rl-train-forward quantized: the trainer keeps keys and values in full precision; use "
            "--rl-kv-cache-dtype auto"
        )
    if settings.rl_mismatch_action == "fallback" and settings.rl_rollout_quantization == "none":
        yield "rl_kv_cache_dtype", (
            "with --rl-mismatch-action fallback and unquantised linear layers: there is no safer format; use "
            "--rl-mismatch-action stop or warn"
        )


def invariance_problems(config: RLConfig, _: int) -> Iterator[Finding]:
    """Report what has no equal bits in rollouts and trainer, or in another batch, with `--batch-invariant-mode`."""
    if not config.kernels.batch_invariant_mode:
        return
    form, forward = config.quantization.rl_rollout_quantization, config.quantization.rl_train_forward
    kinds = config.architecture().kinds if config.model.num_layers else ()
    for is_on, text in (
        (not config.precision.bf16, "needs --bf16, which its kernels are for; add it"),
        (form not in ("none", "int8"), f"with --rl-rollout-quantization {form}: its GEMMs of few rows round "
         "otherwise; use none or int8"),
        (form == "int8" and forward == "plain", "with int8 rollouts needs --rl-train-forward quantized; add it"),
        (config.kv_cache_is_rounded, "with --rl-kv-cache-dtype: the trainer rounds no keys and values; use auto"),
        (config.kernels.transformer_impl != "local", "with --transformer-impl transformer_engine: use local"),
        (config.model.rotary_percent < 1, "with --rotary-percent below 1: the trainer rotates such heads otherwise; "
         "leave one of them out"),
        (config.lora.lora_rank, "with --lora-rank: such narrow GEMMs may vary with the batch; leave one of them out"),
        (config.parallel.context_parallel_size > 1, "with --context-parallel-size: attention is cut otherwise; use 1"),
        (config.training.rl_share_prompts, "with --rl-share-prompts, which cuts attention otherwise; leave it out"),
        *((BLOCKS[name].varies, f"is not built for this model: {BLOCKS[name].varies}; leave it out")
          for name in sorted({name for kind in kinds for name in (kind.mixer, kind.mlp)})),
    ):  # fmt: skip
        if is_on:
            yield "batch_invariant_mode", text
