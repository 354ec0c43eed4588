"""The RL step and the loop around it.

    draw prompts ─► rollout mode: generate ─► grade (while the rest generates) ─► advantages
         ▲                                                                             │
         └──── metrics, checkpoint, evaluation ◄── policy update ◄── pack and balance ◄┘

One line a stage. Supervised training takes the same way from packing on.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from megatron_rl.inference.sampler import sample_seed
from megatron_rl.no_signal import note_signal
from megatron_rl.parallel.collectives import any_rank
from megatron_rl.rescue import finished_steps_kept, naming_memory
from megatron_rl.rollout.statistics import engine_metrics, environment_metrics, failures_of, no_results, rollout_metrics
from megatron_rl.run import Run
from megatron_rl.trainer.samples import refuse_failures, reward_metrics

logger = logging.getLogger(__name__)


@dataclass
class StepResult:
    """What a step leaves for the log."""

    metrics: dict[str, float] = field(default_factory=dict)
    applied_updates: int = 0
    skipped_updates: int = 0
    tokens: int = 0


def rl_step(run: Run, step: int) -> StepResult | None:
    """One RL step; None when the run was asked to stop and the step left no trace."""
    cursor, skipped = run.source.state_dict(), run.source.skipped_too_long
    with run.timer.phase("gen"), naming_memory(run, "rollout"), run.rollout_phase():
        draws = run.source.draw(run.config.algorithm.grpo_prompts_per_step)
        requests = run.requests_of_this_rank(draws)
        seed = sample_seed(run.config.training.seed, "rollout", step)
        rollouts = run.rollouter.run(requests, seed, run.progress.policy_version, run.open_journal(step, seed))
    if rollouts.cancelled:
        run.source.load_state_dict(cursor)
        return None

    with run.timer.phase("advantages"):
        numbers = [request.index for request in requests]
        samples = run.samples.build(rollouts.groups, numbers)
        failures = failures_of(rollouts.groups, run.groups.data_group)
        refuse_failures(samples, failures.counts, run.config.environment.rl_max_failed_share, failures.example)
        updates = run.batches.updates(samples.samples, run.config.training.global_batch_size, seed)
    parity: dict[str, float] = {}
    with naming_memory(run, "update"):
        if run.parity.is_due(step):
            with run.timer.phase("parity"):
                report = run.parity.check(updates)
                if run.parity.act_on(report):  # the rollouts' format has changed: do the step again
                    run.source.load_state_dict(cursor)
                    return rl_step(run, step)
            parity = run.parity.logged(step, report)
        outcome = run.trainer.step(updates)
    run.parity.judge_correction(outcome.metrics)

    if outcome.skipped_updates:
        run.reporter.dump_batches(step, updates)
    run.reporter.records(step, rollouts.groups, run.tokenizer.decode_token, numbers, samples.samples, updates)
    metrics = rollout_metrics(rollouts.groups, run.groups.data_group)
    metrics |= engine_metrics(rollouts.statistics, run.groups.data_group)
    metrics |= reward_metrics(samples) | outcome.metrics | parity
    metrics |= environment_metrics(run.environments.counters.since_last_call(), failures)
    metrics |= run.learn_lengths(draws, requests, rollouts)
    metrics["timing_s/reward"] = rollouts.grade_wait_seconds
    metrics["training/skipped_prompts"] = float(run.source.skipped_too_long - skipped)
    total = len(updates) * run.config.algorithm.grpo_iterations
    metrics["training/updates"] = float(total)
    metrics["training/samples_per_update"] = samples.advantages.numel() / max(1, len(updates))
    return StepResult(
        metrics,
        applied_updates=total - outcome.skipped_updates,
        skipped_updates=outcome.skipped_updates,
        tokens=int(metrics["perf/generated_tokens"]),
    )


def supervised_step(run: Run, step: int) -> StepResult | None:
    """One update on demonstrations; the denominator of the loss is the batch's answer tokens."""
    skipped = run.source.skipped_too_long
    with run.timer.phase("data"):
        batch = run.source.draw(run.config.training.global_batch_size)
        mine = batch[run.groups.data_rank :: run.groups.data_size]
        micro_batches = run.batches.pack(mine, seed=step)
    with naming_memory(run, "update"):
        outcome = run.trainer.step(micro_batches)
    if outcome.skipped_updates:
        run.reporter.dump_batches(step, [micro_batches])
    outcome.metrics["training/skipped_demonstrations"] = float(run.source.skipped_too_long - skipped)
    return StepResult(
        outcome.metrics,
        applied_updates=1 - outcome.skipped_updates,
        skipped_updates=outcome.skipped_updates,
        tokens=int(outcome.metrics["perf/total_num_tokens"]),
    )


def train(run: Run) -> str:
    """Run to the last step, or until asked to stop. Returns ``finished`` or ``stopped``."""
    take_step = rl_step if run.config.training.perform_rl_step else supervised_step
    progress, started = run.progress, time.monotonic()
    if progress.step == 0 and run.evaluator is not None:
        with run.timer.phase("eval"):
            before = evaluate(run)
        if before is None:
            return "stopped" if run.config.training.eval_only else _stop(run)
        run.reporter.step(0, before, run.policy.gpt)
        if run.config.training.eval_only:
            return "finished"
    while progress.step < run.config.total_steps:
        if any_rank(run.stop.requested):
            return _stop(run)
        with run.timer.phase("step"), finished_steps_kept(run):
            result = take_step(run, progress.step + 1)
        if result is None:
            return _stop(run)
        _book(run, result)
        best = False
        if run.evaluation_is_due():
            with run.timer.phase("eval"), finished_steps_kept(run):
                held_out = evaluate(run)
            result.metrics.update(held_out or {})
            best = held_out is not None and run.is_best(held_out)
        result.metrics["checkpoint/failed_saves"] = float(run.checkpoints.failed_saves)
        run.reporter.step(progress.step, result.metrics, run.policy.gpt)
        leaves_early = progress.step < run.config.total_steps and any_rank(
            run.must_leave(time.monotonic() - started)
        )
        run.checkpoints.poll()
        if run.save_is_due() or leaves_early or best:
            with run.timer.phase("save"):
                run.save(final=leaves_early or progress.step == run.config.total_steps, is_best=best)
        if leaves_early:
            return "stopped"
    return "finished"


def _book(run: Run, result: StepResult) -> None:
    """Count a finished step."""
    progress = run.progress
    progress.step += 1
    run.optimization.schedule.go_to(progress.step)
    progress.tokens += result.tokens
    gap = result.metrics.get("training/rollout_logprob_gap_max", 0.0)
    progress.logprob_gap_max = max(progress.logprob_gap_max, gap)
    progress.count_updates(result.applied_updates, result.skipped_updates)
    if run.groups.is_main:
        note_signal(progress, result.metrics, run.config)


def evaluate(run: Run) -> dict[str, float] | None:
    """Held-out evaluation with the current weights; None when asked to stop meanwhile.

    Raises:
        EnvironmentFault: an environment has graded nothing, and the evaluation is all there is to this run.
    """
    plain = run.config.quantization.rl_evaluate_unquantized
    with naming_memory(run, "rollout"), run.rollout_phase(quantized=not plain):
        outcome = run.evaluator.evaluate(run.rollouter, run.progress.policy_version)
    if outcome is None:
        return None
    run.reporter.evaluation_records(run.progress.step, outcome.groups, run.tokenizer.decode_token)
    if outcome.ungraded:
        failures = failures_of(outcome.groups, run.groups.data_group)
        fault = no_results(outcome.ungraded, failures)
        if run.config.training.eval_only:
            raise fault
        if run.groups.is_main:
            logger.error("%s; the run goes on", fault)
    return outcome.metrics


def _stop(run: Run) -> str:
    """Save what is finished; the interrupted step will be done again."""
    logger.warning("asked to stop (%s): saving step %d", run.stop.reason or "another rank", run.progress.step)
    run.save(final=True)
    return "stopped"
