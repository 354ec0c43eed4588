"""The RL program: its step, and the parts that a step needs.

    draw prompts ─► rollout mode: generate ─► grade (while the rest generates) ─► advantages
         ▲                                                                             │
         └──── metrics, checkpoint, evaluation ◄── policy update ◄── pack and balance ◄┘

One line a stage. `run/training.py` has the loop around it.
"""

from __future__ import annotations

from contextlib import closing

from megatron_rl.inference.sampler import sample_seed
from megatron_rl.rollout.statistics import engine_metrics, environment_metrics, reward_by_environment, rollout_metrics
from megatron_rl.run.rescue import naming_memory
from megatron_rl.run.rl import RLRun, build
from megatron_rl.run.training import StepResult, train
from megatron_rl.trainer.samples import reward_metrics

__all__ = ["RLRun", "build", "execute", "rl_step"]


def rl_step(run: RLRun, step: int) -> StepResult | None:
    """One RL step; None when the run was asked to stop and the step left no trace."""
    start, skipped = run.source.position(), run.source.skipped_too_long
    seed = sample_seed(run.config.training.seed, "rollout", step)
    with run.timer.phase("gen"), naming_memory(run.config, "rollout"), closing(run.open_journal(step, seed)) as journal:
        with run.phases.rollouts():
            rollouts = run.collector.collect(seed, run.progress.policy_version, journal)
    if rollouts is None:
        return None

    with run.timer.phase("advantages"):
        samples, rewards = run.samples.build(rollouts.groups, rollouts.numbers, run.progress.policy_version)
        updates = run.batches.updates(samples, run.config.training.global_batch_size, seed)
    parity: dict[str, float] = {}
    with naming_memory(run.config, "update"):
        if run.parity.is_due(step):
            with run.timer.phase("parity"):
                report = run.parity.check(updates, rewards)
                if run.parity.act_on(report):  # the rollouts' format has changed: do the step again
                    run.source.return_to(start)
                    return rl_step(run, step)
            parity = run.parity.logged(step, report)
        with run.phases.update():
            critic_alone = step <= run.config.critic.rl_critic_warmup_steps
            outcome = run.trainer.step(updates, rewards, critic_alone)
    run.parity.judge_correction(outcome.metrics)

    if outcome.skipped_updates:
        run.reporter.dump_batches(step, outcome.updates)
    run.reporter.records(step, rollouts.groups, run.tokenizer.decode_raw, rollouts.numbers, outcome.updates)
    metrics = rollout_metrics(list(rollouts.answered.values()), run.groups.rollout_group)
    metrics |= engine_metrics(rollouts.statistics, run.groups.rollout_group)
    metrics |= reward_metrics(rewards) | outcome.metrics | parity
    signal = rewards.signal[list(rollouts.numbers)].tolist()
    metrics |= reward_by_environment(rollouts.groups, signal, run.groups.rollout_group)
    metrics |= environment_metrics(run.environments.counters.since_last_call(), rollouts.failures)
    metrics |= run.collector.commit(rollouts)
    metrics["timing_s/reward"] = rollouts.grade_wait_seconds
    metrics["training/skipped_prompts"] = float(run.source.skipped_too_long - skipped)
    total = 0 if critic_alone else len(updates) * run.config.algorithm.grpo_iterations
    metrics["training/updates"] = float(total)
    metrics["training/samples_per_update"] = float(rewards.in_loss.sum()) / max(1, len(updates))
    return StepResult(
        metrics,
        applied_updates=outcome.applied_updates,
        skipped_updates=outcome.skipped_updates,
        critic_updates=outcome.critic_updates,
        tokens=int(metrics["perf/generated_tokens"]),
    )


def execute(run: RLRun) -> str:
    """Train to the last step, or until asked to stop. Returns ``finished`` or ``stopped``."""
    return train(run, rl_step)
