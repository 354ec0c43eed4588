"""How much is trained, on what batches, by which optimizer, when the run stops; the critic and teacher of RL."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron_rl.config.flags import Finding, Second, flag, in_unit, nearest_divisors, nearest_multiples, without_effect
from megatron_rl.errors import Problem

if TYPE_CHECKING:
    from megatron_rl.config.rl_config import RLConfig


def _global_batch_size(config: RLConfig, world_size: int) -> int | None:
    if config.training.perform_rl_step:
        return config.samples_per_step or None
    return config.training.micro_batch_size * config.data_parallel_size(world_size)


def _in_samples(spelling: str, field: str, least: int = 1) -> Second:
    """Make Megatron's spelling of a length in samples."""
    return in_unit(spelling, field, int, lambda config, samples: samples // (config.samples_per_step or 1), ge=least)


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Length of the run, batch sizes, evaluation and stopping."""

    config: str | None = flag(None, path=True, common=True)
    """YAML file that sets flags (name: value). May be repeated: a later file overrides an earlier one, the command line
    overrides all."""
    perform_rl_step: bool = flag(False, common=True)
    """Train by RL. Without it, the run is SFT on the environments' demonstrations."""
    micro_batch_size: int = flag(1, ge=1)
    """Full-length sequences per micro-batch; sets --rl-sequence-packing-bin-size."""
    global_batch_size: int | None = flag(None, ge=1, common=True, derived=_global_batch_size)
    """Most samples per optimizer update, e.g. 512. A rollout whose samples are dropped makes fewer updates. Default:
    all samples of a rollout; in SFT one micro-batch per replica."""
    train_iters: int | None = flag(None, ge=1, common=True, aliases=(_in_samples("--train-samples", "train_iters"),))
    """Number of steps, e.g. 200. An RL step is a rollout with all its updates, an SFT step one update. Or the number of
    samples, counting each rollout once, e.g. --train-samples 100000."""
    seq_length: int | None = flag(None, ge=2, common=True, needed=("batches are sized by it", "4096"))
    """Longest training sequence, prompt included, in tokens, e.g. 4096."""
    rl_sequence_packing_bin_size: int | None = flag(
        None, ge=2, source="--micro-batch-size x --seq-length",
        derived=lambda config, _: config.training.micro_batch_size * (config.training.seq_length or 0) or None,
    )
    """Tokens of a packed micro-batch, e.g. 16384. Default: micro-batch-size x seq-length; on a GPU without either flag
    as many sequences as fit, up to 16,384 tokens."""
    rl_share_prompts: bool = flag(False)
    """In training, compute a prompt that several samples share once per micro-batch instead of once per sample. Pays
    off when prompts are long compared with answers (verl's PrefixGrouper)."""
    seed: int = flag(1234, ge=0, le=2**32 - 1)
    """Random seed of weights, data order and sampling. With --eval-only, the seed of the run that saved the weights."""
    eval_interval: int | None = flag(None, ge=1, common=True)
    """Evaluate every this many steps, e.g. 10. Default: never (Megatron's default: 1000)."""
    eval_only: bool = flag(False, common=True)
    """Evaluate the weights of --load or --pretrained-checkpoint once on the held-out tasks and stop."""
    exit_interval: int | None = flag(None, ge=1)
    """Save and stop after a step that is a multiple of this, e.g. 100."""
    exit_duration_in_mins: int | None = flag(None, ge=1)
    """Save and stop after this many minutes, e.g. 230 for a four-hour job."""
    exit_grace_seconds: int = flag(0, ge=0, le=86_400)
    """Seconds that running rollouts get to finish after Ctrl-C or SIGTERM. torchrun kills a rank after 30 s."""
    empty_unused_memory_level: int = flag(0, ge=0, le=2)
    """Free cached device memory: 0 never, 1 after the backward pass, 2 also after the update."""
    check: bool = flag(False, common=True)
    """Check this configuration and stop before the model is built."""
    check_world_size: int | None = flag(None, ge=1)
    """With --check or --estimate: number of ranks to assume, e.g. 64."""
    estimate: bool = flag(False)
    """Print the memory that each rank needs in rollouts and in training, and stop."""
    estimate_vocab_size: int | None = flag(None, ge=1)
    """With --estimate: size of the vocabulary, if there is no tokenizer to read."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer and its hyperparameters."""

    optimizer: Literal["adam", "sgd"] = flag("adam")
    """Optimizer; adam is AdamW."""
    lr: float | None = flag(
        None, gt=0, le=10, common=True, needed=("there is no learning rate for every model", "1e-6")
    )
    """Peak learning rate, e.g. 1e-6."""
    weight_decay: float = flag(0.01, ge=0, le=10)
    """Weight decay."""
    adam_beta1: float = flag(0.9, ge=0, lt=1)
    """Adam beta1."""
    adam_beta2: float = flag(0.999, ge=0, lt=1)
    """Adam beta2."""
    adam_eps: float = flag(1e-8, gt=0, le=1)
    """Adam epsilon."""
    sgd_momentum: float = flag(0.9, ge=0, lt=1)
    """Momentum of sgd."""
    clip_grad: float = flag(1.0, ge=0)
    """Clip the global gradient norm at this value; 0 turns clipping off."""


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning-rate schedule. All updates of a step have the same learning rate."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = flag("linear")
    """Shape of the decay from --lr to --min-lr."""
    min_lr: float = flag(0.0, ge=0)
    """Learning rate at the end of the decay."""
    lr_decay_iters: int | None = flag(
        None, ge=1, aliases=(_in_samples("--lr-decay-samples", "lr_decay_iters"),),
        derived=lambda config, _: config.training.train_iters or None,
    )
    """Steps, or samples, until --min-lr is reached. Default: --train-iters."""
    lr_warmup_iters: int = flag(
        0, ge=0, aliases=(
            _in_samples("--lr-warmup-samples", "lr_warmup_iters", 0),
            in_unit("--lr-warmup-fraction", "lr_warmup_iters", float,
                    lambda config, share: int(share * config.lr_decay_steps), ge=0, lt=1),
        ),
    )  # fmt: skip
    """Steps of linear warm-up, e.g. 10; or samples, or a fraction of the decay, e.g. 0.03."""
    lr_warmup_init: float = flag(0.0, ge=0)
    """Learning rate at the start of the warm-up."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = flag("exponential")
    """Shape of the decay phase of WSD (warm-up, stable, decay)."""
    lr_wsd_decay_iters: int | None = flag(
        None, ge=1, aliases=(_in_samples("--lr-wsd-decay-samples", "lr_wsd_decay_iters"),)
    )
    """Steps, or samples, of the decay phase of WSD."""


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """Critic (value model) of --rl-advantage gae."""

    rl_critic_lr: float | None = flag(None, gt=0, derived=lambda config, _: config.optimizer.lr)
    """Peak learning rate of the critic, e.g. 1e-5; its schedule is the policy's, scaled. Default: --lr."""
    rl_critic_clip_range: float = flag(0.5, gt=0)
    """PPO's value clipping: largest change of a value per step that the loss counts."""
    rl_critic_warmup_steps: int = flag(0, ge=0)
    """Steps at the start of the run that train only the critic."""
    rl_critic_load_hf: str | None = flag(None, path=True)
    """Model to start the critic from, with the policy's architecture and tokenizer: a Hugging Face directory or a name
    on the hub. Default: the policy's weights. The value head starts at 0."""
    rl_critic_lora_rank: int | None = flag(None, ge=1)
    """Make the critic adapters of this rank, e.g. 8, and a value head on the policy's frozen base, not a whole model;
    alpha and targets are the policy's. Needs --lora-rank."""
    rl_kl_in_reward: bool = flag(False)
    """Subtract grpo-kl-beta x (old - reference log-prob) from each token's reward, instead of adding a KL loss."""


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """On-policy distillation from a frozen teacher."""

    rl_teacher_load_hf: str | None = flag(None, path=True)
    """Teacher model for on-policy distillation: a Hugging Face directory or a name on the hub, of any size and
    supported family, with the policy's tokenizer."""
    rl_teacher_lora: str | None = flag(None, path=True)
    """Teacher as adapters on the policy's frozen base, in the same memory: a directory in PEFT's format. Needs
    --lora-rank."""
    rl_teacher_as: Literal["advantage", "loss"] = flag("advantage")
    """How a token's teacher minus student log-prob is used: added to its advantage, or as a KL term in the loss."""
    rl_teacher_weight: float = flag(1.0, gt=0, le=1000)
    """Weight of the teacher."""
    rl_teacher_kl_estimator: Literal["k2", "k3"] = flag("k2")
    """KL estimator of --rl-teacher-as loss; k2 has the gradient of KL(student, teacher), k3 of KL(teacher, student)."""
    rl_reward_weight: float = flag(1.0, ge=0, le=1000)
    """Weight of the rewards' advantage beside a teacher; 0 learns from the teacher alone."""

    @property
    def given(self) -> str | None:
        """The setting that names the teacher; None without one."""
        names = ("rl_teacher_load_hf", "rl_teacher_lora")
        return next((name for name in names if getattr(self, name) is not None), None)


def batch_problems(config: RLConfig, world_size: int) -> Iterator[Finding]:
    """Report batches that do not divide what a step brings."""
    training, algorithm, replicas = config.training, config.algorithm, config.data_parallel_size(world_size)
    batch, samples = training.global_batch_size, config.samples_per_step
    if training.train_iters == 0:
        yield "train_iters", f"is less than one step of {samples} samples; use at least {samples}"
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
    """Report a length of the run, and learning rates, that do not fit."""
    training, schedule, lr = config.training, config.schedule, config.optimizer.lr
    if training.train_iters is None and not training.estimate:
        yield "train_iters", "is missing: the run needs an end; give --train-iters N or --train-samples N"
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
    """Report phases of the schedule that do not fit the decay."""
    schedule, decay = config.schedule, config.lr_decay_steps
    warmup, last = schedule.lr_warmup_iters, schedule.lr_wsd_decay_iters
    if decay and warmup >= decay:
        yield Problem(
            None,
            f"the learning rate warms up for {warmup} steps but decays after {decay}; use a warm-up of at most "
            f"{decay - 1}, or a longer decay",
        )
    if schedule.lr_decay_style != "WSD":
        return
    if last is None:
        yield "lr_decay_style", "needs the length of its last phase; give --lr-wsd-decay-iters N"
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
    """Report flags that have no effect without a critic, and combinations that are not built."""
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
        yield config.teacher.given, "with a critic is not built; use one of the two"
    if critic.rl_critic_lora_rank is not None and config.lora.lora_rank is None:
        yield "rl_critic_lora_rank", "needs a policy whose base stays as it is; add --lora-rank, or leave this out"
    if critic.rl_critic_lora_rank is not None and critic.rl_critic_load_hf is not None:
        yield "rl_critic_load_hf", "with --rl-critic-lora-rank would be another base than the policy's; leave one out"
    if not critic.rl_kl_in_reward:
        return
    if algorithm.grpo_kl_beta == 0:
        yield "rl_kl_in_reward", "has no effect with --grpo-kl-beta 0; give it a weight, or leave this out"
    if "rl_kl_estimator" in config.typed and algorithm.rl_kl_estimator != "k1":
        yield "rl_kl_estimator", "is of the loss; with --rl-kl-in-reward the reward takes k1; leave it out"


def teacher_problems(config: RLConfig, _: int) -> Iterator[Finding]:
    """Report flags that have no effect without a teacher, and programs without samples to score."""
    teacher, given = config.teacher, config.teacher.given
    if given is None:
        names = TeacherConfig.__dataclass_fields__
        yield from without_effect(config, names, "a teacher; add --rl-teacher-load-hf DIR, or leave this out")
        return
    if teacher.rl_teacher_load_hf is not None and teacher.rl_teacher_lora is not None:
        yield "rl_teacher_lora", "and --rl-teacher-load-hf are two teachers; use one of the two"
    if teacher.rl_teacher_lora is not None and config.lora.lora_rank is None:
        yield "rl_teacher_lora", "needs a policy whose base stays as it is; add --lora-rank, or --rl-teacher-load-hf"
    if not config.training.perform_rl_step and not config.training.eval_only:
        yield given, "scores what the policy samples: add --perform-rl-step, or leave it out"
    if teacher.rl_teacher_as == "advantage" and "rl_teacher_kl_estimator" in config.typed:
        yield "rl_teacher_kl_estimator", "has no effect with --rl-teacher-as advantage; use --rl-teacher-as loss"
