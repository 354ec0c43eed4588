"""The supervised program: a warm start on the demonstrations of environments.

    draw demonstrations ─► pack and balance ─► update ─► metrics, checkpoint, evaluation
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_rl.models.routing import BalanceLosses
from megatron_rl.run.base import Run
from megatron_rl.run.generation import build_evaluator_alone
from megatron_rl.run.resume import PromptFormats
from megatron_rl.run.training import TrainingRun, assemble, start_training, train
from megatron_rl.trainer.scoring import Scorer
from megatron_rl.trainer.supervised import DemonstrationSource, SupervisedTrainer
from megatron_rl.trainer.update import TrainOutcome


@dataclass(kw_only=True)
class SupervisedRun(TrainingRun):
    """Trains on demonstrations."""

    source: DemonstrationSource
    trainer: SupervisedTrainer


def build(base: Run) -> SupervisedRun:
    """Build the program's parts; collective over the job."""
    start, states = start_training(base)
    config, groups = base.config, base.groups
    taught = base.environments.demonstrations()
    prompts = ((environment, demonstration.task.prompt) for environment, demonstration in taught)
    states.register("chats", PromptFormats(base.tokenizer, prompts), optional=True)
    source = DemonstrationSource(taught, base.tokenizer, config.training.seq_length)
    states.register("prompts", source)
    # The loss is that of the plain distribution, so the temperature is 1.
    balance = BalanceLosses.of(config, base.policy.device)
    scorer = Scorer(base.policy, groups, 1.0, config.kernels.rl_fused_output_layer, balance)
    return assemble(
        SupervisedRun, base, start, states,
        source=source,
        trainer=SupervisedTrainer(start.optimization, scorer, base.timer),
        evaluator=None if config.training.eval_interval is None else build_evaluator_alone(base),
    )  # fmt: skip


def supervised_step(run: SupervisedRun, step: int) -> TrainOutcome:
    """Take one update on demonstrations; the denominator of the loss is the batch's answer tokens."""
    skipped = run.source.skipped
    with run.timer.phase("data"):
        batch = run.source.draw(run.config.training.global_batch_size)
        mine = batch[run.groups.data_group.rank() :: run.groups.data_group.size()]
        micro_batches = run.batches.pack(mine, seed=step)
    with run.phases.update():
        outcome = run.trainer.step(micro_batches)
    if outcome.skipped_updates:
        run.reporter.dump_batches(step, [micro_batches])
    outcome.metrics["training/skipped_demonstrations"] = float(run.source.skipped - skipped)
    return replace(outcome, updates=(), tokens=int(outcome.metrics["perf/total_num_tokens"]))


def execute(run: SupervisedRun) -> str:
    """Train to the last step, or until asked to stop. Returns ``finished`` or ``stopped``."""
    return train(run, supervised_step)
