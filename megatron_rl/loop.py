"""The RL program: its step, and the parts that a step needs.

    draw prompts ─► rollout mode: generate ─► grade (while the rest generates) ─► advantages
         ▲                                                                             │
         └──── metrics, checkpoint, evaluation ◄── policy update ◄── pack and balance ◄┘

One line a stage. `run/training.py` has the loop around it.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

from megatron_rl.inference.sampler import sample_seed
from megatron_rl.run.rl import RLRun, build
from megatron_rl.run.training import train
from megatron_rl.trainer.update import TrainOutcome

__all__ = ["RLRun", "build", "execute", "rl_step"]


def rl_step(run: RLRun, step: int) -> TrainOutcome | None:
    """Take one RL step; None when the run was asked to stop and the step left no trace."""
    seed = sample_seed(run.config.training.seed, "rollout", step)
    parity: dict[str, float] | None = None
    while parity is None:  # once more where the gate has changed the rollouts' format
        start, skipped = run.source.position(), run.source.skipped
        with run.timer.phase("gen"):
            with closing(run.open_journal(step, seed)) as journal, run.phases.rollouts():
                rollouts = run.collector.collect(seed, run.progress.policy_version, journal)
        if rollouts is None:
            return None
        with run.timer.phase("advantages"):
            samples, rewards = run.samples.build(rollouts.groups, rollouts.numbers, run.progress.policy_version)
            updates = run.batches.updates(samples, run.config.training.global_batch_size, seed)
        parity = run.checked_parity(step, updates, rewards)
        if parity is None:
            run.source.return_to(start)

    critic_alone = step <= run.config.critic.rl_critic_warmup_steps
    with run.phases.update():
        outcome = run.trainer.step(updates, rewards, critic_alone)
    run.parity.judge_correction(outcome.metrics, step)

    if outcome.skipped_updates:
        run.reporter.dump_batches(step, outcome.updates)
    run.reporter.records(step, rollouts.groups, run.tokenizer.decode_raw, rollouts.numbers, outcome.updates)
    metrics = run.step_metrics(rollouts, rewards, outcome) | parity
    metrics["training/skipped_prompts"] = float(run.source.skipped - skipped)
    return replace(outcome, metrics=metrics, updates=(), tokens=int(metrics["perf/generated_tokens"]))


def execute(run: RLRun) -> str:
    """Train to the last step, or until asked to stop. Returns ``finished`` or ``stopped``."""
    return train(run, rl_step)
