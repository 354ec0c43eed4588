"""How much is trained, on what batches, by which optimizer, when the run stops; the critic and teacher of RL."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron_rl.config.flags import Finding, flag, nearest_divisors, nearest_multiples, without_effect
from megatron_rl.errors import Problem

if TYPE_CHECKING:
    from megatron_rl.config.rl_config import RLConfig


def _global_batch_size(config: RLConfig, world_size: int) -> int | None:
    if config.training.perform_rl_step:
        return config.samples_per_step or None
    return config.training.micro_batch_size * config.data_parallel_size(world_size)


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Length, batch sizes and life cycle of the run."""

    config: str | None = flag(None, path=True, common=True)
    """YAML file that sets flags (name: value); of several the later one wins, and the command line over all."""
    perform_rl_step: bool = flag(False, common=True)
    """Train by reinforcement; without it, on the environments' demonstrations."""
    train_iters: int | None = flag(None, ge=1, common=True)
    """Steps of the run: in RL a rollout with all its updates, else one update. Or give --train-samples."""
    train_samples: int | None = flag(None, ge=1)
    """Samples of the run, those of a rollout counted once; or give --train-iters."""
    micro_batch_size: int = flag(1, ge=1)
    """Sequences of full length in a micro-batch; sets --rl-sequence-packing-bin-size."""
    global_batch_size: int | None = flag(None, ge=1, common=True, derived=_global_batch_size)
    """Most samples of an optimizer update; where samples are dropped, a rollout makes fewer updates.

    Without it those of a rollout; supervised: a micro-batch a replica.
    """
    seq_length: int | None = flag(None, ge=2, common=True, needed=("batches are sized by it", "4096"))
    """Longest training sequence in tokens, prompt included."""
    rl_sequence_packing_bin_size: int | None = flag(
        None, ge=2, source="--micro-batch-size x --seq-length",
        derived=lambda config, _: config.training.micro_batch_size * (config.training.seq_length or 0) or None,
    )
    """Tokens of a packed micro-batch. Without it micro-batch-size x seq-length."""
    rl_share_prompts: bool = flag(False)
    """In training, compute the tokens that several samples begin with once a micro-batch, not once a sample: pays where
    prompts are long beside answers (PrefixGrouper in verl)."""
    seed: int = flag(1234, ge=0, le=2**32 - 1)
    """Seed of weights, data order and sampling. With --eval-only that of the run that saved the weights."""
    eval_interval: int | None = flag(None, ge=1, common=True)
    """Evaluate every this many steps; without it never (Megatron's default: 1000)."""
    eval_only: bool = flag(False, common=True)
    """Evaluate the weights of --load or --pretrained-checkpoint on the held-out tasks once, and stop."""
    exit_interval: int | None = flag(None, ge=1)
    """Save and stop after a step that is a multiple of this."""
    exit_duration_in_mins: int | None = flag(None, ge=1)
    """Save and stop after this many minutes."""
    exit_grace_seconds: int = flag(0, ge=0, le=86_400)
    """Time that running rollouts get to finish after Ctrl-C or SIGTERM; torchrun kills a rank after 30 s."""
    empty_unused_memory_level: int = flag(0, ge=0, le=2)
    """Return cached device memory: 0 never, 1 after the backward pass, 2 also after the update."""
    check: bool = flag(False, common=True)
    """Check this configuration and stop before the model is built."""
    check_world_size: int | None = flag(None, ge=1)
    """With --check or --estimate: the number of ranks to look at, instead of those of this launch."""
    estimate: bool = flag(False)
    """Print how many bytes each rank will need in rollouts and in training, and stop."""
    estimate_vocab_size: int | None = flag(None, ge=1)
    """With --estimate: tokens of the vocabulary, where there is no tokenizer to read."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer and its constants."""

    optimizer: Literal["adam", "sgd"] = flag("adam")
    """Update rule; adam decouples weight decay."""
    lr: float | None = flag(
        None, gt=0, le=10, common=True, needed=("there is no learning rate for every model", "1e-6")
    )
    """Peak learning rate."""
    weight_decay: float = flag(0.01, ge=0, le=10)
    """Weight decay."""
    adam_beta1: float = flag(0.9, ge=0, lt=1)
    """Decay of the running mean of gradients."""
    adam_beta2: float = flag(0.999, ge=0, lt=1)
    """Decay of the running mean of squared gradients."""
    adam_eps: float = flag(1e-8, gt=0, le=1)
    """Added to the denominator of an update."""
    sgd_momentum: float = flag(0.9, ge=0, lt=1)
    """Momentum of sgd."""
    clip_grad: float = flag(1.0, ge=0)
    """Largest global gradient norm; 0 leaves gradients alone."""


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Warm-up and decay of the learning rate, which all updates of a step share."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = flag("linear")
    """Shape of the decay from --lr to --min-lr."""
    min_lr: float = flag(0.0, ge=0)
    """Learning rate at the end of the decay."""
    lr_warmup_iters: int = flag(0, ge=0)
    """Steps of linear warm-up."""
    lr_warmup_samples: int = flag(0, ge=0)
    """Samples of linear warm-up."""
    lr_warmup_fraction: float | None = flag(None, ge=0, lt=1)
    """Warm-up as a share of the decay, instead of the two flags above."""
    lr_warmup_init: float = flag(0.0, ge=0)
    """Learning rate at the start of the warm-up."""
    lr_decay_iters: int | None = flag(None, ge=1, derived=lambda config, _: config.training.train_iters)
    """Steps after which --min-lr is reached. Without it --train-iters."""
    lr_decay_samples: int | None = flag(None, ge=1, derived=lambda config, _: config.training.train_samples)
    """Samples after which --min-lr is reached. Without it --train-samples."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = flag("exponential")
    """Shape of the last phase of WSD."""
    lr_wsd_decay_iters: int | None = flag(None, ge=1)
    """Steps of the last phase of WSD."""
    lr_wsd_decay_samples: int | None = flag(None, ge=1)
    """Samples of the last phase of WSD."""


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """The value model of --rl-advantage gae, its optimizer and its loss."""

    rl_critic_lr: float | None = flag(None, gt=0, derived=lambda config, _: config.optimizer.lr)
    """Peak learning rate of the critic; its schedule is the policy's, scaled. Without it --lr."""
    rl_critic_clip_range: float = flag(0.5, gt=0)
    """PPO's value clipping: largest change of a value in a step that the loss counts."""
    rl_critic_warmup_steps: int = flag(0, ge=0)
    """First steps of the run that train the critic alone."""
    rl_critic_load_hf: str | None = flag(None, path=True)
    """Hugging Face directory or name on the hub, of the policy's architecture and tokenizer, to start the critic from.
    Without it the critic starts as the policy does. The value head starts at 0."""
    rl_kl_in_reward: bool = flag(False)
    """Subtract --grpo-kl-beta x (old - reference log-prob) from the reward of each token, in place of the KL loss."""


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """A frozen model beside the policy, and what becomes of its log-probs."""

    rl_teacher_load_hf: str | None = flag(None, path=True)
    """Teacher: a Hugging Face directory or name on the hub, of any size and known family, with the policy's
    tokenizer."""
    rl_teacher_as: Literal["advantage", "loss"] = flag("advantage")
    """How a token's teacher log-prob - student log-prob is used: as part of its advantage, or as a KL in the loss."""
    rl_teacher_weight: float = flag(1.0, gt=0, le=1000)
    """Weight of the teacher."""
    rl_teacher_kl_estimator: Literal["k2", "k3"] = flag("k2")
    """Estimator of the KL in the loss: k2 has the gradient of KL(student, teacher), k3 that of KL(teacher, student)."""
    rl_reward_weight: float = flag(1.0, ge=0, le=1000)
    """Weight of the rewards' advantage with a teacher; 0 learns from the teacher alone."""


def batch_problems(config: RLConfig, world_size: int) -> Iterator[Finding]:
    """Batches that do not divide what a step brings."""
    training, algorithm, replicas = config.training, config.algorithm, config.data_parallel_size(world_size)
    batch, samples = training.global_batch_size, config.samples_per_step
    if training.train_samples is not None and training.train_samples < samples:
        yield "train_samples", f"is less than one step of {samples} samples; use at least {samples}"
    parallel = config.parallel
    if training.rl_share_prompts and (parallel.context_parallel_size > 1 or parallel.pipeline_model_parallel_size > 1):
        yield "rl_share_prompts", (
            "runs with neither --context-parallel-size nor --pipeline-model-parallel-size above 1, whose ranks need "
            "equal parts of a batch; leave it out"
        )
    if training.rl_share_prompts and (config.model.moe_aux_loss_coeff or config.model.moe_z_loss_coeff):
        yield "rl_share_prompts", (
            "leaves tokens out of the routers' losses (--moe-aux-loss-coeff, --moe-z-loss-coeff); leave it or them out"
        )
    if not training.perform_rl_step:
        if batch and batch % replicas and world_size % config.model_parallel_size == 0:
            text = f"is not divisible by {replicas} data-parallel replicas: each takes an equal share"
            yield "global_batch_size", f"{text}; use {nearest_multiples(batch, replicas)}"
        return
    if samples and batch and samples % batch:
        yield "global_batch_size", (
            f"does not divide the {samples} samples of a rollout ({algorithm.grpo_prompts_per_step} prompts x "
            f"{algorithm.grpo_group_size} completions); use {nearest_divisors(samples, batch)}"
        )


def optimizer_problems(config: RLConfig, _: int) -> Iterator[Finding]:
    """The length of the run, and learning rates."""
    training, schedule, lr = config.training, config.schedule, config.optimizer.lr
    if training.train_iters is None and training.train_samples is None and not training.estimate:
        yield "train_iters", "is missing: the run needs an end; give --train-iters N or --train-samples N"
    if training.train_iters is not None and training.train_samples is not None:
        yield "train_iters", f"and --train-samples {training.train_samples} are two lengths of one run; keep one"
    if config.optimizer.optimizer == "sgd" and config.parallel.use_distributed_optimizer:
        yield "optimizer", (
            "with --use-distributed-optimizer, which spreads the state of adam only; leave it out, or use --optimizer "
            "adam"
        )
    if lr is not None and schedule.min_lr > lr:
        yield "min_lr", f"is above --lr {lr:g}: the schedule would rise; use at most {lr:g}"
    if lr is not None and schedule.lr_warmup_init > lr:
        yield "lr_warmup_init", f"is above --lr {lr:g}, its end; use at most {lr:g}"


def schedule_problems(config: RLConfig, _: int) -> Iterator[Finding]:
    """Phases of the schedule that are counted in another unit than the run, or do not fit the decay."""
    training, schedule = config.training, config.schedule
    by_steps = training.train_samples is None
    length, unit, other = ("train-iters", "iters", "samples") if by_steps else ("train-samples", "samples", "iters")
    if by_steps != (training.train_iters is None):
        for phase in ("warmup", "decay", "wsd_decay"):
            if getattr(schedule, f"lr_{phase}_{other}"):
                right = f"--lr-{phase.replace('_', '-')}-{unit}"
                yield f"lr_{phase}_{other}", f"with --{length}: run and schedule are counted in one unit; use {right}"
        if schedule.lr_warmup_fraction is not None and getattr(schedule, f"lr_warmup_{unit}"):
            yield "lr_warmup_fraction", f"and --lr-warmup-{unit} both set the warm-up; keep one of them"
    warmup, decay, last = config.lr_warmup_steps, config.lr_decay_steps, config.lr_wsd_decay_steps
    if decay and warmup >= decay:
        yield Problem(
            None,
            f"the learning rate warms up for {warmup} steps but decays after {decay}; use a warm-up of at most "
            f"{decay - 1}, or a longer decay",
        )
    if schedule.lr_decay_style != "WSD":
        return
    if schedule.lr_wsd_decay_iters is None and schedule.lr_wsd_decay_samples is None:
        yield "lr_decay_style", f"needs the length of its last phase; give --lr-wsd-decay-{unit} N"
    elif decay and warmup + last > decay:
        yield "lr_decay_style", (
            f": a warm-up of {warmup} and a last phase of {last} steps do not fit a decay of {decay}; use at most "
            f"{max(0, decay - warmup)} for the last phase"
        )


def critic_config(config: RLConfig) -> RLConfig:
    """Return the critic's optimizer settings: the policy's, with every learning rate scaled."""
    scale = config.critic.rl_critic_lr / config.optimizer.lr
    schedule = config.schedule
    return config.with_values(
        lr=config.critic.rl_critic_lr, min_lr=scale * schedule.min_lr, lr_warmup_init=scale * schedule.lr_warmup_init
    )


def critic_problems(config: RLConfig, _: int) -> Iterator[Finding]:
    """Flags that have no effect without a critic, and combinations that are not built."""
    critic, algorithm, steps = config.critic, config.algorithm, config.total_steps
    if config.training.eval_only:
        return
    if not config.wants_critic:
        names = CriticConfig.__dataclass_fields__
        yield from without_effect(config, names, "a critic; add --rl-advantage gae, or leave it out")
        return
    if steps and critic.rl_critic_warmup_steps >= steps:
        text = f"leaves no step of {steps} that trains the policy; use at most {steps - 1}, or a longer run"
        yield "rl_critic_warmup_steps", text
    if config.wants_teacher:
        yield "rl_teacher_load_hf", "with a critic is not built; use one of the two"
    if not critic.rl_kl_in_reward:
        return
    if algorithm.grpo_kl_beta == 0:
        yield "rl_kl_in_reward", "has no effect with --grpo-kl-beta 0; give it a weight, or leave this out"
    if "rl_kl_estimator" in config.typed and algorithm.rl_kl_estimator != "k1":
        yield "rl_kl_estimator", "is of the loss; with --rl-kl-in-reward the reward takes k1; leave it out"


def teacher_problems(config: RLConfig, _: int) -> Iterator[Finding]:
    """Flags that have no effect without a teacher, and programs without samples to score."""
    teacher = config.teacher
    if teacher.rl_teacher_load_hf is None:
        names = TeacherConfig.__dataclass_fields__
        yield from without_effect(config, names, "a teacher; add --rl-teacher-load-hf DIR, or leave this out")
        return
    if not config.training.perform_rl_step and not config.training.eval_only:
        yield "rl_teacher_load_hf", "scores what the policy samples: add --perform-rl-step, or leave it out"
    if teacher.rl_teacher_as == "advantage" and "rl_teacher_kl_estimator" in config.typed:
        yield "rl_teacher_kl_estimator", "has no effect with --rl-teacher-as advantage; use --rl-teacher-as loss"
