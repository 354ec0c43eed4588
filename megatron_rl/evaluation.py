"""The evaluation program, `--eval-only`: weights, an engine and held-out tasks; no optimizer, no gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.checkpoint.layout import step_of
from megatron_rl.config.rl_config import RLConfig
from megatron_rl.rollout.evaluation import Evaluator
from megatron_rl.run.base import Run
from megatron_rl.run.generation import build_evaluator_alone
from megatron_rl.run.preflight.starts import evaluated
from megatron_rl.run.weights import end_tokens_of, read_first_weights


@dataclass(kw_only=True)
class EvaluationRun(Run):
    """Answers held-out tasks with each of the weights that were named."""

    evaluator: Evaluator
    weights: Sequence[RLConfig]
    """One configuration for each; the model holds the first."""


def build(base: Run) -> EvaluationRun:
    """Build the program's parts; collective over the job."""
    weights = evaluated(base.config)
    origin = read_first_weights(weights[0], base.policy, base.checkpoints, base.groups)
    base.answers_end_also_at(end_tokens_of(origin))
    evaluator = build_evaluator_alone(base)
    base.reporter.open(base.progress)
    return EvaluationRun(**vars(base), evaluator=evaluator, weights=weights)


def execute(run: EvaluationRun) -> str:
    """Evaluate once, or every checkpoint under its step. Returns ``finished`` or ``stopped``."""
    for number, config in enumerate(run.weights):
        if number:
            read_first_weights(config, run.policy, run.checkpoints, run.groups)
            run.phases.quantization.weights_changed()
        if len(run.weights) > 1:
            run.progress.step = step_of(Path(config.checkpoint.load))
        with run.timer.phase("eval"):
            metrics = run.evaluate(run.evaluator, alone=True)
        if metrics is None:
            return "stopped"
        run.reporter.step(run.progress.step, metrics, run.policy)
    return "finished"
