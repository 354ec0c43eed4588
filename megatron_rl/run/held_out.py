"""Held-out evaluation: on its own, and on the way of a run that trains."""

from __future__ import annotations

import logging

from megatron_rl.rollout import Evaluator, RequestFactory, Rollouter
from megatron_rl.rollout.statistics import failures_of, no_results
from megatron_rl.run.base import Run
from megatron_rl.run.generation import build_engine, build_rollouter, calibration_requests, request_factory
from megatron_rl.run.rescue import naming_memory

logger = logging.getLogger(__name__)


def build_evaluator(run: Run, factory: RequestFactory, rollouter: Rollouter) -> Evaluator:
    """Of the first held-out tasks of every environment whose prompts fit."""
    settings = run.config.environment
    tasks = run.environments.held_out_tasks(settings.rl_prompts_per_eval, run.tokenizer, factory.max_prompt_tokens)
    samples = settings.rl_samples_per_eval_prompt
    return Evaluator(rollouter, tasks, samples, factory, run.config.training.seed, run.groups)


def build_evaluator_alone(run: Run) -> Evaluator:
    """The same with an engine of its own: nothing else generates in this program."""
    factory = request_factory(run.config, run.tokenizer)
    engine = build_engine(run.config, run.policy, run.tokenizer, run.groups, run.phases.cache_budget_gb())
    evaluator = build_evaluator(run, factory, build_rollouter(run, engine))
    run.phases.hold(engine, lambda: calibration_requests(factory, evaluator.tasks))
    return evaluator


def evaluate(run: Run, evaluator: Evaluator, alone: bool = False) -> dict[str, float] | None:
    """Metrics with the current weights; None when asked to stop meanwhile.

    Raises:
        EnvironmentFault: an environment has graded nothing, and the run is ``alone`` for the evaluation.
    """
    plain = run.config.quantization.rl_evaluate_unquantized
    with naming_memory(run.config, "rollout"), run.phases.rollouts(quantized=not plain):
        outcome = evaluator.evaluate(run.progress.policy_version)
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
