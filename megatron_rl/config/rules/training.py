"""Number formats, kernels, checkpoints and the learning-rate schedule."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config.rl_config import RLConfig
from megatron_rl.config.rules.wording import Rule, divisors, named


def _precision(config: RLConfig) -> Iterator[str]:
    precision = config.precision
    if precision.fp16:
        yield "--fp16 is refused: gradients of RL losses underflow in fp16 without loss scaling; use --bf16"


def _dropout(config: RLConfig) -> Iterator[str]:
    model = config.model
    if model.attention_dropout > 0:
        yield (
            f"--attention-dropout {model.attention_dropout} is not built: the attention kernels here have none; "
            "use --attention-dropout 0"
        )
    if model.hidden_dropout > 0 and config.training.perform_rl_step:
        yield (
            f"--hidden-dropout {model.hidden_dropout} with --perform-rl-step: the trainer's log-probs would "
            "differ from the rollout's, which has no dropout; use --hidden-dropout 0"
        )


def _optimizer(config: RLConfig) -> Iterator[str]:
    if config.optimizer.optimizer == "sgd" and config.parallel.use_distributed_optimizer:
        yield (
            "--optimizer sgd with --use-distributed-optimizer: megatron-core spreads the state of adam only; "
            "leave out --use-distributed-optimizer, or use --optimizer adam"
        )


def _positions(config: RLConfig) -> Iterator[str]:
    kind = config.model.position_embedding_type
    if kind != "rope":
        yield (
            f"--position-embedding-type {kind} is not built yet in this version: the rollout engine rotates "
            "queries and keys; use --position-embedding-type rope"
        )


def _rotation(config: RLConfig) -> Iterator[str]:
    """Rotary positions turn pairs of numbers."""
    model = config.model
    if model.kv_channels is None:
        return
    rotated = int(model.kv_channels * model.rotary_percent)
    if rotated < 2 or rotated % 2:
        what = named(config, "kv_channels", model.kv_channels, "--hidden-size / --num-attention-heads")
        share = f" at --rotary-percent {model.rotary_percent:g}" if model.rotary_percent < 1 else ""
        yield f"{what}{share} gives {rotated} numbers of a head to rotate, which go in pairs; use an even number"


def _attention_backend(config: RLConfig) -> Iterator[str]:
    backend = config.kernels.attention_backend
    if backend in ("fused", "unfused", "local"):
        yield (
            f"--attention-backend {backend} is refused: it has no kernel for packed sequences and a KV cache "
            "here; use auto, sdpa or flash (with flash-attn installed)"
        )


def _recompute(config: RLConfig) -> Iterator[str]:
    kernels, layers = config.kernels, config.model.num_layers
    count = kernels.recompute_num_layers
    if kernels.recompute_granularity == "full":
        if kernels.recompute_activations:
            yield (
                "--recompute-activations means selective, but --recompute-granularity is full; keep one"
            )
        if kernels.recompute_method is None or count is None:
            yield (
                "--recompute-granularity full needs to know which layers: give --recompute-method uniform "
                "--recompute-num-layers 1"
            )
    elif kernels.recompute_method is not None or count is not None:
        yield (
            "--recompute-method and --recompute-num-layers choose whole layers, which only "
            "--recompute-granularity full recomputes; add it, or leave them out"
        )
    if kernels.recompute_modules is not None and kernels.recompute_granularity != "selective":
        yield (
            "--recompute-modules chooses parts of a layer, which only --recompute-granularity selective "
            "recomputes; add it, or leave them out"
        )
    if count is not None and layers is not None and count > layers:
        yield f"--recompute-num-layers {count} is more than the model's {layers} layers; use at most {layers}"
    elif kernels.recompute_method == "uniform" and count and layers and layers % count:
        yield (
            f"--recompute-method uniform --recompute-num-layers {count} does not divide the model's {layers} layers "
            f"into equal groups; use {divisors(layers)}"
        )


def _checkpoint(config: RLConfig) -> Iterator[str]:
    if config.checkpoint.ckpt_format == "torch" and config.checkpoint.async_save:
        yield "--async-save cannot write --ckpt-format torch in the background; leave it out, or use torch_dist"
    best = config.checkpoint.keep_best
    if best is not None and not best.startswith("val/"):
        yield f"--keep-best {best} is no metric of an evaluation; they are called val/ENVIRONMENT/MEASURE"
    if best is not None and config.training.eval_interval is None:
        yield f"--keep-best {best} needs evaluations; add --eval-interval"


def _schedule_unit(config: RLConfig) -> Iterator[str]:
    """Megatron counts a schedule in what the run is counted in."""
    training, schedule = config.training, config.schedule
    if (training.train_iters is None) == (training.train_samples is None):
        return
    length, unit, other = "train-iters", "iters", "samples"
    if training.train_iters is None:
        length, unit, other = "train-samples", "samples", "iters"
    for phase in ("warmup", "decay", "wsd_decay"):
        value = getattr(schedule, f"lr_{phase}_{other}")
        if value:
            flag = f"--lr-{phase.replace('_', '-')}"
            yield (
                f"{flag}-{other} {value} with --{length}: run and schedule are counted in one unit; "
                f"use {flag}-{unit}"
            )
    if schedule.lr_warmup_fraction is not None and getattr(schedule, f"lr_warmup_{unit}"):
        yield f"--lr-warmup-fraction and --lr-warmup-{unit} both set the warm-up; keep one of them"


def _schedule_phases(config: RLConfig) -> Iterator[str]:
    schedule = config.schedule
    warmup, decay, last = config.lr_warmup_steps, config.lr_decay_steps, config.lr_wsd_decay_steps
    if decay and warmup >= decay:
        yield (
            f"the learning rate warms up for {warmup} steps but decays after {decay}; "
            f"use a warm-up of at most {decay - 1}, or a longer decay"
        )
    if schedule.lr_decay_style != "WSD":
        return
    if schedule.lr_wsd_decay_iters is None and schedule.lr_wsd_decay_samples is None:
        unit = "iters" if config.training.train_samples is None else "samples"
        yield (
            "--lr-decay-style WSD needs the length of its last phase, which has no default; "
            f"give --lr-wsd-decay-{unit} N"
        )
    elif decay and warmup + last > decay:
        yield (
            f"--lr-decay-style WSD: a warm-up of {warmup} and a last phase of {last} steps do not fit a "
            f"decay of {decay}; use a last phase of at most {max(0, decay - warmup)}"
        )


def _learning_rates(config: RLConfig) -> Iterator[str]:
    lr, schedule = config.optimizer.lr, config.schedule
    if lr is None:
        return
    if schedule.min_lr > lr:
        yield f"--min-lr {schedule.min_lr} is above --lr {lr}: the schedule would rise; use at most {lr}"
    if schedule.lr_warmup_init > lr:
        yield f"--lr-warmup-init {schedule.lr_warmup_init} is above --lr {lr}, its end; use at most {lr}"


RULES: tuple[Rule, ...] = (
    _precision, _dropout, _optimizer, _positions, _rotation, _attention_backend, _recompute, _checkpoint,
    _schedule_unit, _schedule_phases, _learning_rates,
)
