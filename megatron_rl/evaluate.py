"""The evaluation program, `--eval-only`: weights, an engine and held-out tasks; no optimizer, no gradients."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.phases import Phases
from megatron_rl.run.base import Run
from megatron_rl.run.generation import build_quantization
from megatron_rl.run.held_out import HeldOut, build_held_out, evaluate
from megatron_rl.run.weights import end_tokens_of, read_first_weights


@dataclass(kw_only=True)
class EvaluationRun(Run):
    """Answers held-out tasks once."""

    phases: Phases
    held_out: HeldOut


def build(base: Run) -> EvaluationRun:
    """The program's parts; collective over the job."""
    origin = read_first_weights(base.config, base.policy, base.checkpoints, base.groups)
    base.answers_end_also_at(end_tokens_of(origin))
    phases = Phases(base.config, base.policy, base.groups, build_quantization(base))
    held_out = build_held_out(base, phases)
    base.reporter.open(base.progress)
    return EvaluationRun(**vars(base), phases=phases, held_out=held_out)


def execute(run: EvaluationRun) -> str:
    """Evaluate once. Returns ``finished`` or ``stopped``."""
    with run.timer.phase("eval"):
        metrics = evaluate(run, run.held_out, alone=True)
    if metrics is None:
        return "stopped"
    run.reporter.step(0, metrics, run.policy.gpt)
    return "finished"
