"""Rollouts and held-out evaluations from flags: how answers are drawn, the engine that generates, and what asks it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_rl.config.rl_config import RLConfig
from megatron_rl.config.rules import why_uncaptured
from megatron_rl.inference.engine import Engine, EngineOptions, GraphOptions
from megatron_rl.inference.guides import Grammars
from megatron_rl.inference.rollout_engine import RolloutEngine
from megatron_rl.inference.staged import StagedEngine
from megatron_rl.models.attention.selection import requirements_of
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.rollout.evaluation import Evaluator
from megatron_rl.rollout.prompt_source import PromptSource, RequestFactory
from megatron_rl.rollout.rollouter import Rollouter
from megatron_rl.run.base import Run
from megatron_rl.tokenizer import Tokenizer
from megatron_rl.types import Request, SamplingParams, SourcedTask

if TYPE_CHECKING:
    from megatron_rl.rollout.harnesses import HarnessSettings

logger = logging.getLogger(__name__)

CALIBRATION_PROMPTS = 16
CALIBRATION_TOKENS = 64


def stop_strings(config: RLConfig, tokenizer: Tokenizer) -> tuple[list[int], tuple[str, ...]]:
    """Split `--rl-stop-strings` into ids of special tokens, which text does not have, and the others."""
    strings = config.rollout.rl_stop_strings
    special = tokenizer.special_tokens if strings else {}
    return [special[text] for text in strings if text in special], tuple(t for t in strings if t not in special)


def request_factory(config: RLConfig, tokenizer: Tokenizer) -> RequestFactory:
    """Build the factory of requests: how answers are sampled, and how long a sequence may become."""
    flags, (_, stop) = config.rollout, stop_strings(config, tokenizer)
    sampling = SamplingParams(
        flags.rl_temperature, flags.rl_top_k, flags.rl_top_p, max_new_tokens=flags.rl_max_new_tokens, stop=stop
    )
    return RequestFactory(sampling, flags.inference_max_seq_length)


def evaluation_factory(config: RLConfig, tokenizer: Tokenizer) -> RequestFactory:
    """Make the same for held-out tasks."""
    flags = config.rollout
    asked = config.with_values(
        rl_temperature=flags.rl_eval_temperature, rl_top_k=flags.rl_eval_top_k, rl_top_p=flags.rl_eval_top_p,
        rl_max_new_tokens=flags.rl_eval_max_new_tokens,
    )  # fmt: skip
    return request_factory(asked, tokenizer)


def build_engine(
    config: RLConfig, policy: PolicyModel, tokenizer: Tokenizer, groups: ParallelGroups,
    cache_budget_gb: float | None = None,
) -> Engine:  # fmt: skip
    """Build the rollout engine; with pipeline stages, the one that takes its steps over all of them.

    ``cache_budget_gb`` is what there is room for, in GiB; without it the user's flag counts.
    """
    rollout, after = config.rollout, None if why_uncaptured(config) else config.kernels.graphs_after
    if rollout.inference_dynamic_batching_block_size is not None and policy.attention.cache.layout == "rows":
        logger.warning(
            "--inference-dynamic-batching-block-size %d has no effect: %s keeps each sequence in one piece",
            rollout.inference_dynamic_batching_block_size, policy.attention.cache_name,
        )  # fmt: skip
    options = EngineOptions(
        max_batch_size=rollout.inference_max_batch_size, max_sequence_length=rollout.inference_max_seq_length,
        decode_steps_per_sync=rollout.rl_decode_steps_per_sync,
        prefill_token_budget=rollout.inference_dynamic_batching_max_tokens, prefix_reuse=rollout.rl_prefix_reuse,
        kv_overcommit=rollout.rl_kv_overcommit,
        cache_budget_gb=cache_budget_gb or rollout.inference_dynamic_batching_buffer_size_gb,
        graphs=None if after is None else GraphOptions(rollout.inference_dynamic_batching_num_cuda_graphs, after),
        block_size=rollout.inference_dynamic_batching_block_size, kv_cache_dtype=requirements_of(config).cache_dtype,
        records_routing=rollout.rl_router_replay,
    )  # fmt: skip
    by_id, _ = stop_strings(config, tokenizer)

    def decode(token_ids: Sequence[int], stop: Sequence[str]) -> str:
        return tokenizer.decode(token_ids, marks=tokenizer.special_in(stop))

    ends = [*tokenizer.end_token_ids, *by_id]
    if config.stages.count > 1:
        return StagedEngine(policy, options, ends, decode, groups, Grammars(tokenizer))
    return RolloutEngine(policy, options, ends, decode, groups, grammars=Grammars(tokenizer))


def why_fixed(config: RLConfig) -> str:
    """Say why the engine cannot draw by a grammar or with penalties; empty if it can."""
    if (config.parallel.expert_model_parallel_size or 1) > 1:
        return "ranks that share experts take their steps together, and none may wait for a grammar"
    return ""


def why_unscored(config: RLConfig) -> str:
    """Say why the endpoint has the log-probs of sampled tokens alone; empty if it has others."""
    return "the last pipeline stage computes them, and the first one answers" if config.stages.count > 1 else ""


def build_rollouter(run: Run, engine: Engine) -> Rollouter:
    """Drives the engine and has its samples graded; closed when the run ends."""
    rollouter = Rollouter(
        engine, run.tokenizer, run.groups, run.environments.client.grade, run.stop,
        run.config.training.exit_grace_seconds,
        run.environments.conversations(run.config.rollout.inference_max_seq_length), serve_harnesses(run),
    )  # fmt: skip
    run.closing.callback(rollouter.close)
    return rollouter


def serve_harnesses(run: Run) -> HarnessSettings | None:
    """Build this rank's part in the samples of harnesses; None if the run has none.

    The leader of each copy of the model gets an endpoint, which is closed at the end of the run.

    Raises:
        ConfigError: its port cannot be had.
    """
    environments, config = run.environments.harnesses, run.config
    if not environments:
        return None
    from megatron_rl.endpoint.calls import Endpoint
    from megatron_rl.rollout.harnesses import HarnessSettings

    endpoint = None
    if run.groups.leads_model:
        rollout, port = config.rollout, config.environment.rl_endpoint_port
        endpoint = Endpoint(
            run.tokenizer, max_sequence_length=rollout.inference_max_seq_length,
            max_new_tokens=max(rollout.rl_max_new_tokens, rollout.rl_eval_max_new_tokens),
            port=port and port + run.groups.rollout_rank, fixed=why_fixed(config), unscored=why_unscored(config),
            reasoning=config.tokenizer.rl_reasoning_parser,
        )  # fmt: skip
        endpoint.start()
        run.closing.callback(endpoint.close)
        logger.info("harnesses (%s) call the model at %s", ", ".join(sorted(environments)), endpoint.base_url())
    masks = config.environment.rl_edited_history == "mask"
    return HarnessSettings(environments, run.environments.client.run, endpoint, masks, run.environments.by_group)


def calibration_requests(factory: RequestFactory, tasks: PromptSource | Sequence[SourcedTask]) -> list[Request]:
    """Return one short sample each of a few tasks; those of a source are the next prompts and stay undrawn."""
    if isinstance(tasks, PromptSource):
        source, cursor = tasks, tasks.state_dict()
        tasks = source.draw(CALIBRATION_PROMPTS)
        source.load_state_dict(cursor)
    tasks = tasks[:CALIBRATION_PROMPTS]
    return [factory.request(task, 1, index, at_most=CALIBRATION_TOKENS) for index, task in enumerate(tasks)]


def build_evaluator(run: Run, rollouter: Rollouter) -> Evaluator:
    """Build the evaluation of the first held-out tasks of every environment whose prompts fit."""
    settings, factory = run.config.environment, evaluation_factory(run.config, run.tokenizer)
    tasks = run.environments.held_out_tasks(settings.rl_prompts_per_eval, run.tokenizer, factory.max_prompt_tokens)
    asked = {served.name: served.eval_samples for served in run.environments.served}
    samples = {name: count or settings.rl_samples_per_eval_prompt for name, count in asked.items()}
    return Evaluator(rollouter, tasks, samples, factory, run.config.training.seed, run.groups)


def build_evaluator_alone(run: Run) -> Evaluator:
    """Build the same with an engine of its own: nothing else generates in this program."""
    engine = build_engine(run.config, run.policy, run.tokenizer, run.groups, run.phases.cache_budget_gb())
    evaluator = build_evaluator(run, build_rollouter(run, engine))
    factory = evaluation_factory(run.config, run.tokenizer)
    run.phases.hold(engine, lambda: calibration_requests(factory, evaluator.tasks))
    return evaluator
