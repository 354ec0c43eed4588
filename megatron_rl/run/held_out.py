"""Held-out evaluation: on its own, and on the way of a run that trains."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from megatron_rl.checkpoint.state import StateRegistry
from megatron_rl.phases import Phases
from megatron_rl.rollout import Evaluator, RequestFactory, Rollouter
from megatron_rl.rollout.statistics import failures_of, no_results
from megatron_rl.run.base import Run
from megatron_rl.run.generation import build_engine, build_rollouter, calibration_requests, request_factory
from megatron_rl.run.rescue import naming_memory

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeldOut:
    """The held-out tasks, and who answers them."""

    evaluator: Evaluator
    rollouter: Rollouter
    phases: Phases

    def register(self, states: StateRegistry) -> None:
        """Keep what was learned of the lengths of answers."""
        states.register("expected_held_out_lengths", self.evaluator.expected_lengths, optional=True)


def build_evaluator(run: Run, factory: RequestFactory) -> Evaluator:
    """The first held-out tasks of every environment whose prompts fit."""
    settings = run.config.environment
    tasks = run.environments.held_out_tasks(settings.rl_prompts_per_eval, run.tokenizer, factory.max_prompt_tokens)
    return Evaluator(tasks, settings.rl_samples_per_eval_prompt, factory, run.config.training.seed, run.groups)


def build_held_out(run: Run, phases: Phases) -> HeldOut:
    """The held-out tasks, and an engine of their own for them: nothing else generates in this program."""
    factory = request_factory(run.config, run.tokenizer)
    evaluator = build_evaluator(run, factory)
    engine = build_engine(run.config, run.policy, run.tokenizer, run.groups, phases.cache_budget_gb())
    phases.hold(engine, lambda: calibration_requests(factory, evaluator.tasks))
    return HeldOut(evaluator, build_rollouter(run, engine), phases)


def evaluate(run: Run, held_out: HeldOut, alone: bool = False) -> dict[str, float] | None:
    """Metrics with the current weights; None when asked to stop meanwhile.

    Raises:
        EnvironmentFault: an environment has graded nothing, and the run is ``alone`` for the evaluation.
    """
    plain = run.config.quantization.rl_evaluate_unquantized
    with naming_memory(run.config, "rollout"), held_out.phases.rollouts(quantized=not plain):
        outcome = held_out.evaluator.evaluate(held_out.rollouter, run.progress.policy_version)
    if outcome is None:
        return None
    run.reporter.evaluation_records(run.progress.step, outcome.groups, run.tokenizer.decode_token)
    if outcome.ungraded:
        fault = no_results(outcome.ungraded, failures_of(outcome.groups, run.groups.data_group))
        if alone:
            raise fault
        if run.groups.is_main:
            logger.error("%s; the run goes on", fault)
    return outcome.metrics
