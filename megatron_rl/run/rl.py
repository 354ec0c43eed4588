"""The parts of an RL run, built from flags."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import torch

from megatron_rl.algorithms import StepRewards
from megatron_rl.algorithms.extension import Function, advantage_of, filter_of
from megatron_rl.algorithms.objective import PolicyObjective
from megatron_rl.checkpoint.hf.load import load_hf
from megatron_rl.checkpoint.hf.peft import load_peft
from megatron_rl.checkpoint.state import StateRegistry
from megatron_rl.checkpoint.tensors import fingerprints, weights_fingerprint
from megatron_rl.config.rl_config import RLConfig
from megatron_rl.config.rules import teacher_of
from megatron_rl.environments.config import list_text
from megatron_rl.families import read_model
from megatron_rl.families.peft import lora_at
from megatron_rl.inference.engine import Engine
from megatron_rl.inference.rollout_engine import RolloutEngine
from megatron_rl.inference.staged import StagedEngine, StagedRouting
from megatron_rl.models.attention.kv_format import rounded_attention
from megatron_rl.models.gpt import PolicyModel, build_model
from megatron_rl.models.lora import adapt
from megatron_rl.models.routing import BalanceLosses
from megatron_rl.platform import current_platform
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.registry import CORRECTIONS
from megatron_rl.rollout.collector import Collector, StepRollouts
from megatron_rl.rollout.dynamic_sampling import DynamicCollector
from megatron_rl.rollout.filtering import DynamicSampling
from megatron_rl.rollout.journal import ExtraGroups, RolloutJournal, StepJournal
from megatron_rl.rollout.partial import PartialCollector, PartialRollouts, UnfinishedGroups
from megatron_rl.rollout.prompt_source import ExpectedLengths, PromptSource, RequestFactory
from megatron_rl.rollout.rollouter import Rollouter
from megatron_rl.rollout.statistics import engine_metrics, environment_metrics, reward_by_environment, rollout_metrics
from megatron_rl.run.base import Run
from megatron_rl.run.generation import (
    build_engine,
    build_evaluator,
    build_rollouter,
    calibration_requests,
    request_factory,
    stop_strings,
)
from megatron_rl.run.memory.phases import out_of_memory_reported
from megatron_rl.run.preflight.starts import family_weights
from megatron_rl.run.resume import PromptFormats
from megatron_rl.run.training import TrainingRun, assemble, start_training
from megatron_rl.run.weights import share_base
from megatron_rl.trainer.critic import Critic, ValueScorer
from megatron_rl.trainer.optimizer import Optimization
from megatron_rl.trainer.parity import ParityGate
from megatron_rl.trainer.policy import PolicyTrainer
from megatron_rl.trainer.samples import SampleBuilder, reward_metrics
from megatron_rl.trainer.scoring import Scorer
from megatron_rl.trainer.teacher import DistillationAdvantage, Teacher
from megatron_rl.trainer.update import TrainOutcome, Updates
from megatron_rl.types import Task

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class RLRun(TrainingRun):
    """Trains on what the model generates."""

    source: PromptSource
    collector: Collector
    trainer: PolicyTrainer
    samples: SampleBuilder
    parity: ParityGate
    journal: RolloutJournal | None
    """None where no checkpoint is made on the way, and a run that is killed begins anew; and of partial rollouts: which
    groups are generated when a step has enough of them depends on those beside them, so it is generated anew.
    """

    def committed(self, step: int) -> None:
        """Drop from the journal what a checkpoint covers."""
        if self.journal is not None:
            self.journal.forget(step)

    def open_journal(self, step: int, seed: int) -> StepJournal:
        """Open the finished groups of an earlier start of this step, and the place for new ones; collective."""
        if self.journal is None:
            return StepJournal({}, extra_groups=self.collector.extra_groups)
        with out_of_memory_reported(self.config, "rollout"):
            self.optimization.gather_parameters()  # the journal is of the weights that rollouts will have
            weights = weights_fingerprint(self.policy, self.groups)
        header = {
            "seed": seed,
            "sampling": dataclasses.asdict(self.collector.factory.sampling),
            "longest": self.collector.factory.max_sequence_length,
            "ends": self.tokenizer.end_token_ids,
            "recipe": self.phases.quantization.recipe,
            "kv_cache": self.config.kv_cache_dtype,
            "environments": self._environment_list,
            "weights": weights,
        }
        return self.journal.open(step, header, self.collector.extra_groups)

    def checked_parity(self, step: int, updates: Updates, rewards: StepRewards) -> dict[str, float] | None:
        """Return what the mismatch check logs if it is due; None if the step is to be repeated. Collective."""
        if not self.parity.is_due(step):
            return {}
        with self.phases.update(), self.timer.phase("parity"):
            report = self.parity.check(updates, rewards)
            return None if self.parity.act_on(report) else self.parity.step_metrics(step, report)

    def step_metrics(self, rollouts: StepRollouts, rewards: StepRewards, outcome: TrainOutcome) -> dict[str, float]:
        """Collect the metrics of a finished step; its rollouts count from now on. Collective."""
        replicas, signal = self.groups.rollout_group, rewards.informative_tasks[list(rollouts.numbers)].tolist()
        return {
            **rollout_metrics(list(rollouts.answered.values()), replicas),
            **engine_metrics(rollouts.statistics, replicas),
            **reward_metrics(rewards), **outcome.metrics,
            "training/updates": float(len(outcome.of_policy)),
            "training/samples_per_update": float(rewards.in_loss.sum()) / max(1, len(outcome.updates)),
            **reward_by_environment(rollouts.groups, signal, replicas),
            **environment_metrics(self.environments.counters.since_last_call(), rollouts.failures),
            **self.collector.commit(rollouts),
            "timing_s/reward": rollouts.grade_wait_seconds,
        }  # fmt: skip

    @cached_property
    def _environment_list(self) -> str:
        """Checksum of the YAML list as the run began with it: the user may edit or remove the file meanwhile."""
        return hashlib.sha256(list_text(self.config.environment.langrl_env_config).encode()).hexdigest()


def build(base: Run) -> RLRun:
    """Build the program's parts; collective over the job."""
    start, states = start_training(base)
    config, policy, groups, phases = base.config, base.policy, base.groups, base.phases
    if config.quantization.rl_train_forward == "quantized":
        base.closing.enter_context(phases.quantization.aligned())
    factory = request_factory(config, base.tokenizer)
    source = _prompt_source(base, factory.max_prompt_tokens, states)
    teacher = build_teacher(base, states)
    engine = build_engine(config, policy, base.tokenizer, groups, phases.cache_budget_gb())
    phases.hold(engine, lambda: calibration_requests(factory, source))
    rollouter, algorithm = build_rollouter(base, engine), config.algorithm
    collector = _collector(base, states, source, factory, rollouter)
    evaluates = config.training.eval_interval is not None
    scorer = build_scorer(config, policy, groups, BalanceLosses.of(config, policy.device))
    advantage, objective = advantage_of(config), PolicyObjective.of(config)
    is_exact = rollout_is_exact(config, policy.device, base.environments.harnesses)
    if is_exact:
        objective = replace(objective, correction=CORRECTIONS.get("none")())
        logger.info("--batch-invariant-mode: no correction, and rollouts' log-probs are the old log-probs")
    baseline = "teacher" if teacher is not None else getattr(advantage, "BASELINE", "group")
    return assemble(
        RLRun, base, start, states,
        source=source,
        collector=collector,
        samples=SampleBuilder(
            baseline, algorithm.rl_keep_zero_variance_groups, groups,
            masks_truncated=algorithm.rl_truncated == "mask",
            reward_names=getattr(advantage, "reward_names", ()),
            max_failed_share=config.environment.rl_max_failed_share,
            turn_discount=algorithm.rl_turn_discount,
        ),
        trainer=PolicyTrainer(
            start.optimization, scorer, build_advantage(config), objective,
            algorithm.grpo_iterations, base.timer,
            reference=start.reference,
            teacher=teacher,
            critic=_critic(base, start.critic),
            rollout_is_exact=is_exact,
        ),
        parity=_parity_gate(base, scorer, engine, is_exact),
        evaluator=build_evaluator(base, rollouter) if evaluates else None,
        journal=_journal(base),
    )  # fmt: skip


def rollout_is_exact(config: RLConfig, device: torch.device, harnesses: Collection[str]) -> bool:
    """Return whether `--batch-invariant-mode` makes the log-probs of rollouts those of the trainer, to the bit.

    Not those of older weights, and not in calls of ``harnesses``, which may have a temperature of their own.
    """
    is_current = not (config.algorithm.has_stale_samples or harnesses)
    return config.kernels.batch_invariant_mode and device.type == "cuda" and is_current


def _prompt_source(base: Run, max_prompt_tokens: int, states: StateRegistry) -> PromptSource:
    tokenizer, pools = base.tokenizer, base.environments.training_pools()
    prompts = ((pool.environment, task.prompt) for pool in pools for task in pool.tasks)
    formats = states.register("chats", PromptFormats(tokenizer, prompts), optional=True)
    if base.groups.is_main:
        formats.warn_of_open_ends([*tokenizer.end_token_ids, *stop_strings(base.config, tokenizer)[0]])

    def encode(task: Task, environment: str) -> list[int]:
        return tokenizer.encode_prompt(task.prompt, environment)

    source = PromptSource(pools, encode, max_prompt_tokens, base.config.training.seed)
    return states.register("prompts", source)


def build_scorer(
    config: RLConfig, policy: PolicyModel, groups: ParallelGroups, balance: BalanceLosses | None = None
) -> Scorer:
    """Build what gives log-probs of the distribution that is sampled; ``balance`` of a model that is trained."""
    return Scorer(policy, groups, config.rollout.rl_temperature, config.kernels.rl_fused_output_layer, balance)


def build_teacher(base: Run, states: StateRegistry) -> Teacher | None:
    """Build the model that scores the samples, None without one; collective. A resumed run compares it.

    Raises:
        CheckpointError: its files are damaged, or it is not the teacher that the run began with.
    """
    config, groups = base.config, base.groups
    if not config.wants_teacher:
        return None
    whole, adapters = config.teacher.rl_teacher_load_hf, config.teacher.rl_teacher_lora
    logger.info("teacher: %s", whole or f"adapters {adapters} on the policy's base")
    model = build_teacher_model(config, base.policy, groups)
    # What is the policy's memory too stays where it is.
    stays = whole is None or "teacher" in config.rollout.rl_keep_in_rollouts
    weights = fingerprints(model, groups, with_adapters=True)
    teacher = Teacher(model, build_scorer(config, model, groups), whole or adapters, weights, stays)
    return states.register("teacher", teacher, optional=True)


def build_teacher_model(config: RLConfig, policy: PolicyModel, groups: ParallelGroups) -> PolicyModel:
    """Build the frozen teacher in the policy's layout, of a directory of its own or adapters on the policy's base.

    Raises:
        CheckpointError: its files are damaged.
    """
    adapters, settings = config.teacher.rl_teacher_lora, teacher_of(config, groups.world_size)
    model = build_model(settings, current_platform(), policy.vocab_size, is_filled_later=True)
    if adapters is None:
        load_hf(read_model(config.teacher.rl_teacher_load_hf), model, groups)
    else:
        lora = lora_at(adapters)
        share_base(policy, model)
        adapt(model, config, lora, groups)
        load_peft(Path(adapters), model, lora, family_weights(config), groups)
    for gpt in model.chunks:
        gpt.eval().requires_grad_(False)
    return model


def build_advantage(config: RLConfig) -> Function:
    """Build the advantage of the rewards, and of the teacher if it is part of the advantage."""
    advantage, teacher = advantage_of(config), config.teacher
    if not config.wants_teacher:
        return advantage
    weight = teacher.rl_teacher_weight if teacher.rl_teacher_as == "advantage" else 0.0
    return DistillationAdvantage(of_rewards=advantage, weight=weight, reward_weight=teacher.rl_reward_weight)


def _critic(base: Run, critic: Optimization | None) -> Critic | None:
    if critic is None:
        return None
    balance = BalanceLosses.of(base.config, critic.policy.device, of_critic=True)
    scorer = ValueScorer(critic.policy, base.groups, balance)
    return Critic(critic, scorer, base.config.critic.rl_critic_clip_range)


def _collector(
    base: Run, states: StateRegistry, source: PromptSource, factory: RequestFactory, rollouter: Rollouter
) -> Collector:
    config, algorithm = base.config, base.config.algorithm
    parts = {
        "source": source,
        "factory": dataclasses.replace(factory, wants_routing=config.rollout.rl_router_replay),
        "rollouter": rollouter,
        "groups": base.groups,
        "expected_lengths": states.register("expected_lengths", ExpectedLengths(), optional=True),
        "prompts_per_step": algorithm.grpo_prompts_per_step,
        "group_size": algorithm.grpo_group_size,
        "max_failed_share": config.environment.rl_max_failed_share,
        "extra_groups": states.register("surplus", ExtraGroups(), optional=True),
    }
    unfinished = states.register("put_aside", UnfinishedGroups(), optional=True)
    if algorithm.rl_dynamic_sampling:
        parts["dynamic"] = DynamicSampling(filter_of(config), algorithm.rl_max_refills)
    if algorithm.rl_partial_rollouts:
        finishes = algorithm.rl_stale_samples == "finish"
        trained = [spec for spec in base.environments.served if not spec.evaluation_only]
        replies = any(spec.max_turns > 1 or spec.is_harness for spec in trained)
        lag, by_clock = int(algorithm.rl_generation_lag), base.environments.harnesses
        rollouts = PartialRollouts(algorithm.rl_oversampling, lag, finishes, replies, by_clock)
        return PartialCollector(**parts, partial=rollouts, unfinished=unfinished)
    if algorithm.rl_dynamic_sampling:
        max_staleness = int(algorithm.rl_generation_lag) if algorithm.rl_surplus == "keep" else 0
        return DynamicCollector(**parts, at_once=algorithm.rl_oversampling, max_staleness=max_staleness)
    return Collector(**parts)


def _parity_gate(base: Run, scorer: Scorer, engine: Engine, is_exact: bool) -> ParityGate:
    rounded = None
    if base.config.kv_cache_is_rounded and isinstance(engine, RolloutEngine | StagedEngine):
        rounded = partial(rounded_attention, base.policy.layers, engine.kv_format)
    absorbed, latent = None, base.config.latent
    if latent.multi_latent_attention and latent.rl_mla_absorb:
        from megatron_rl.models.blocks.latent import absorbed_attention

        absorbed = partial(absorbed_attention, base.policy.layers)
    of_run = base.config, scorer, base.phases.quantization, base.groups.data_group
    return ParityGate(*of_run, rounded, absorbed, is_exact)


def _journal(base: Run) -> RolloutJournal | None:
    if base.config.checkpoint.save_interval is None or base.config.algorithm.rl_partial_rollouts:
        return None
    groups, layout, staged = base.groups, base.policy.layout, None
    if groups.pipeline_group.size() > 1 and base.config.rollout.rl_router_replay:
        own = tuple(layer.index for layer in layout.layers)
        staged = StagedRouting(own, layout.architecture.num_layers, groups)
    journal = RolloutJournal(base.directory.journal, groups, staged)
    if base.groups.is_main:
        journal.forget(base.progress.step)  # a kill may have come between the checkpoint and this
    return journal
