"""The composition root: the only module that reads the whole configuration.

    groups ─► tokenizer ─► environment server ─► model ─► weights ─► reference ─► optimizer ─► resume
                                 │                                                    │
                            task sources                              trainer, rollouter, evaluator
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch.distributed as dist

from megatron_rl.algorithms.corrections.composition import get_correction
from megatron_rl.algorithms.interfaces import AdvantageConfig
from megatron_rl.algorithms.settings import correction_config, loss_config
from megatron_rl.build_engine import build_engine, stop_strings
from megatron_rl.build_environments import EnvironmentAccess, open_environments
from megatron_rl.build_memory import PhaseMemory
from megatron_rl.build_quantization import build_parity_gate, build_quantization, calibration
from megatron_rl.build_weights import start_weights
from megatron_rl.checkpoint import CheckpointManager, RandomState, StateRegistry
from megatron_rl.config import RLConfig
from megatron_rl.metrics.rundir import RunDirectory
from megatron_rl.metrics.timers import PhaseTimer
from megatron_rl.models import build_model
from megatron_rl.parallel import ParallelGroups, seed_everything
from megatron_rl.platform import Platform
from megatron_rl.progress import Progress
from megatron_rl.registry import ADVANTAGES, LOSSES
from megatron_rl.reporting import Reporter
from megatron_rl.rollout import Evaluator, PromptSource, RequestFactory, Rollouter
from megatron_rl.rollout.expected_length import ExpectedLengths
from megatron_rl.rollout.journal import RolloutJournal
from megatron_rl.run import Run
from megatron_rl.signals import StopRequest
from megatron_rl.tokenizer import Tokenizer
from megatron_rl.trainer import Optimization, PolicyTrainer, SupervisedTrainer
from megatron_rl.trainer.batches import BatchBuilder
from megatron_rl.trainer.policy_loss import LossSettings
from megatron_rl.trainer.reference import ReferencePolicy
from megatron_rl.trainer.samples import SampleBuilder
from megatron_rl.trainer.scoring import Scorer
from megatron_rl.trainer.supervised import DemonstrationSource, NoSource
from megatron_rl.types import SamplingParams

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def build_run(
    config: RLConfig,
    platform: Platform,
    groups: ParallelGroups,
    tokenizer: Tokenizer,
    stop: StopRequest,
    command: Sequence[str],
) -> Iterator[Run]:
    """Build everything, hand it out, and leave no process behind; collective."""
    directory = RunDirectory(Path(config.logging.run_dir))
    timer = PhaseTimer(sync=platform.synchronize if config.logging.timing_log_level > 0 else None)
    with contextlib.ExitStack() as stack:
        environments = stack.enter_context(open_environments(config, groups, directory))
        seed_everything(config.training.seed)
        policy = build_model(config, platform, tokenizer.vocab_size)
        checkpoints = CheckpointManager(
            Path(config.checkpoint.save), config.checkpoint.keep_last or 0, groups, config.checkpoint.ckpt_format
        )
        stack.callback(checkpoints.abandon)
        start = start_weights(config, policy, checkpoints, groups)
        optimization, reference, saved = start.optimization, start.reference, start.saved
        tokenizer = tokenizer.ending_also_at(start.end_token_ids)
        _tell_ends(tokenizer)
        quantization = build_quantization(config, policy, optimization, reference, groups, directory, timer, stack)
        factory = _request_factory(config, tokenizer)
        states = StateRegistry(saved.components if saved is not None else None)
        source = states.register("prompts", _source(config, environments, tokenizer, factory))
        progress = states.register("progress", Progress())
        states.register("quantization", quantization)
        fused = config.kernels.rl_fused_output_layer
        scorer = Scorer(policy, groups.tensor_group, _temperature(config), fused)
        evaluator = _evaluator(config, environments, tokenizer, factory, groups)
        expected_lengths = states.register("expected_lengths", ExpectedLengths(), optional=True)
        if evaluator is not None:
            states.register("expected_held_out_lengths", evaluator.expected_lengths, optional=True)
        memory = PhaseMemory(config, optimization, groups)
        engine, rollouter, generate_a_little = None, None, _no_engine
        if config.training.perform_rl_step or config.training.eval_interval is not None:
            engine = build_engine(config, policy, tokenizer, groups, memory.cache_budget_gb())
            memory.hold(engine.cache_tensors, engine.forget_graphs)
            rollouter = Rollouter(
                engine,
                tokenizer,
                groups,
                environments.client.grade,
                stop,
                config.training.exit_grace_seconds,
                environments.conversations(config.rollout.inference_max_seq_length),
            )
            stack.callback(rollouter.close)
            prompts = source if isinstance(source, PromptSource) else None
            generate_a_little = calibration(engine, prompts, factory, evaluator.tasks if evaluator else ())
        journal = _journal(config, directory, groups, progress)
        reporter = Reporter(config, groups, directory, timer, platform, progress, command)
        stack.callback(reporter.close)
        states.register("random", RandomState(), resume=not config.checkpoint.no_load_rng)
        states.tell_unclaimed()
        yield Run(
            config=config,
            groups=groups,
            policy=policy,
            tokenizer=tokenizer,
            environments=environments,
            optimization=optimization,
            quantization=quantization,
            source=source,
            factory=factory,
            rollouter=rollouter,
            generate_a_little=generate_a_little,
            samples=_sample_builder(config, groups) if config.training.perform_rl_step else None,
            batches=_batch_builder(config, platform, groups),
            trainer=_trainer(config, optimization, scorer, reference, groups, timer),
            memory_for_rollouts=memory.for_rollouts,
            parity=build_parity_gate(config, scorer, quantization, policy, groups, engine),
            evaluator=evaluator,
            journal=journal,
            checkpoints=checkpoints,
            directory=directory,
            reporter=reporter,
            timer=timer,
            stop=stop,
            progress=progress,
            origin=start.origin,
            expected_lengths=expected_lengths,
            states=states,
        )
        dist.barrier()  # nobody stops the environment server while another rank still grades


def _tell_ends(tokenizer: Tokenizer) -> None:
    ends = ", ".join(f"{tokenizer.decode_token(number)} ({number})" for number in tokenizer.end_token_ids)
    logger.info("an answer ends with %s", ends)
    if tokenizer.passed_over:
        logger.warning(
            "eos_token_id names %s too, which tokenizer %s has no special tokens for; an answer does not end there",
            tokenizer.passed_over, tokenizer.name,
        )  # fmt: skip


def _no_engine() -> None:
    """A supervised run without evaluation has nothing to generate with, and no rollouts."""


def _temperature(config: RLConfig) -> float:
    """Supervised loss is that of the plain distribution."""
    return config.rollout.rl_temperature if config.training.perform_rl_step else 1.0


def _request_factory(config: RLConfig, tokenizer: Tokenizer) -> RequestFactory:
    rollout = config.rollout
    return RequestFactory(
        SamplingParams(
            temperature=rollout.rl_temperature,
            top_k=rollout.rl_top_k,
            top_p=rollout.rl_top_p,
            max_new_tokens=rollout.rl_max_new_tokens,
            stop=stop_strings(config, tokenizer)[1],
        ),
        rollout.inference_max_seq_length,
    )


def _source(
    config: RLConfig, environments: EnvironmentAccess, tokenizer: Tokenizer, factory: RequestFactory
) -> PromptSource | DemonstrationSource | NoSource:
    if config.training.eval_only:
        return NoSource()
    if not config.training.perform_rl_step:
        return DemonstrationSource(environments.demonstrations(), tokenizer, config.training.seq_length)
    return PromptSource(
        environments.training_pools(),
        lambda task: tokenizer.encode_prompt(task.prompt),
        factory.max_prompt_tokens,
        config.training.seed,
    )


def _sample_builder(config: RLConfig, groups: ParallelGroups) -> SampleBuilder:
    algorithm = config.algorithm
    return SampleBuilder(
        ADVANTAGES.module(algorithm.rl_advantage),
        AdvantageConfig(),
        algorithm.rl_keep_zero_variance_groups,
        groups,
    )


def _journal(
    config: RLConfig, directory: RunDirectory, groups: ParallelGroups, progress: Progress
) -> RolloutJournal | None:
    if config.checkpoint.save_interval is None:
        return None
    journal = RolloutJournal(directory.journal, groups)
    if groups.is_main:
        journal.forget(progress.step)  # a kill may have come between the checkpoint and this
    return journal


def _batch_builder(config: RLConfig, platform: Platform, groups: ParallelGroups) -> BatchBuilder:
    parallel = config.parallel
    round_to = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    return BatchBuilder(config.training.rl_sequence_packing_bin_size, round_to, platform.device, groups)


def _trainer(
    config: RLConfig,
    optimization: Optimization,
    scorer: Scorer,
    reference: ReferencePolicy | None,
    groups: ParallelGroups,
    timer: PhaseTimer,
) -> PolicyTrainer | SupervisedTrainer:
    if not config.training.perform_rl_step:
        return SupervisedTrainer(optimization, scorer, groups.data_group, timer)
    algorithm = config.algorithm
    settings = LossSettings(
        loss=LOSSES.get(algorithm.rl_policy_loss),
        loss_config=loss_config(config),
        correction=get_correction(algorithm.rl_correction),
        correction_config=correction_config(config),
        aggregation=algorithm.rl_loss_aggregation,
        aggregation_constant=float(config.rollout.rl_max_new_tokens),
        kl_beta=algorithm.grpo_kl_beta,
        kl_estimator=algorithm.rl_kl_estimator,
        entropy_weight=algorithm.grpo_entropy_term_weight,
    )
    return PolicyTrainer(
        optimization, scorer, settings, algorithm.grpo_iterations, reference, groups.data_group, timer
    )


def _evaluator(
    config: RLConfig,
    environments: EnvironmentAccess,
    tokenizer: Tokenizer,
    factory: RequestFactory,
    groups: ParallelGroups,
) -> Evaluator | None:
    """The first held-out tasks of every environment whose prompts fit; None without `--eval-interval`."""
    if config.training.eval_interval is None:
        return None
    draws = environments.held_out_draws(
        config.environment.rl_prompts_per_eval, tokenizer, factory.max_prompt_tokens
    )
    return Evaluator(
        draws, config.environment.rl_samples_per_eval_prompt, factory, config.training.seed, groups
    )

