"""The evaluation program, `--eval-only`: weights, an engine and held-out tasks; no optimizer, no gradients."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.rollout.evaluation import Evaluator
from megatron_rl.run.base import Run
from megatron_rl.run.generation import build_evaluator_alone, evaluate
from megatron_rl.run.weights import end_tokens_of, read_first_weights


@dataclass(kw_only=True)
class EvaluationRun(Run):
    """Answers held-out tasks once."""

    evaluator: Evaluator


def build(base: Run) -> EvaluationRun:
    """The program's parts; collective over the job."""
    origin = read_first_weights(base.config, base.policy, base.checkpoints, base.groups)
    base.answers_end_also_at(end_tokens_of(origin))
    evaluator = build_evaluator_alone(base)
    base.reporter.open(base.progress)
    return EvaluationRun(**vars(base), evaluator=evaluator)


def execute(run: EvaluationRun) -> str:
    """Evaluate once. Returns ``finished`` or ``stopped``."""
    with run.timer.phase("eval"):
        metrics = evaluate(run, run.evaluator, alone=True)
    if metrics is None:
        return "stopped"
    run.reporter.step(0, metrics, run.policy)
    return "finished"
