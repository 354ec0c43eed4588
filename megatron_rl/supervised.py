"""The supervised program: a warm start on the demonstrations of environments.

    draw demonstrations ─► pack and balance ─► update ─► metrics, checkpoint, evaluation
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.phases import Phases
from megatron_rl.run.base import Run
from megatron_rl.run.generation import build_quantization
from megatron_rl.run.held_out import build_held_out
from megatron_rl.run.rescue import naming_memory
from megatron_rl.run.training import (
    StepResult,
    TrainingRun,
    batch_builder,
    finish_start,
    start_training,
    train,
)
from megatron_rl.trainer import SupervisedTrainer
from megatron_rl.trainer.scoring import Scorer
from megatron_rl.trainer.supervised import DemonstrationSource


@dataclass(kw_only=True)
class SupervisedRun(TrainingRun):
    """Trains on demonstrations."""

    source: DemonstrationSource
    trainer: SupervisedTrainer


def build(base: Run) -> SupervisedRun:
    """The program's parts; collective over the job."""
    config, policy, groups = base.config, base.policy, base.groups
    quantization = build_quantization(base)
    start, states = start_training(base, quantization)
    demonstrations = base.environments.demonstrations()
    source = states.register(
        "prompts", DemonstrationSource(demonstrations, base.tokenizer, config.training.seq_length)
    )
    phases = Phases(config, policy, groups, quantization, start.optimization)
    held_out = None
    if config.training.eval_interval is not None:
        held_out = build_held_out(base, phases)
        held_out.register(states)
    # The loss is that of the plain distribution, so the temperature is 1.
    scorer = Scorer(policy, groups.tensor_group, 1.0, config.kernels.rl_fused_output_layer)
    finish_start(base, states)
    return SupervisedRun(
        **vars(base),
        states=states,
        optimization=start.optimization,
        origin=start.origin,
        phases=phases,
        source=source,
        batches=batch_builder(base),
        trainer=SupervisedTrainer(start.optimization, scorer, groups.data_group, base.timer),
        held_out=held_out,
    )


def supervised_step(run: SupervisedRun, step: int) -> StepResult:
    """One update on demonstrations; the denominator of the loss is the batch's answer tokens."""
    skipped = run.source.skipped_too_long
    with run.timer.phase("data"):
        batch = run.source.draw(run.config.training.global_batch_size)
        mine = batch[run.groups.data_rank :: run.groups.data_size]
        micro_batches = run.batches.pack(mine, seed=step)
    with naming_memory(run.config, "update"), run.phases.update():
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


def execute(run: SupervisedRun) -> str:
    """Train to the last step, or until asked to stop. Returns ``finished`` or ``stopped``."""
    return train(run, supervised_step)
