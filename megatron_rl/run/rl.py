"""The parts of an RL run, built from flags."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from megatron_rl.algorithms.extension import advantage_of
from megatron_rl.algorithms.objective import PolicyObjective
from megatron_rl.attention.kv_numbers import rounded_attention
from megatron_rl.checkpoint.tensors import weights_fingerprint
from megatron_rl.inference.engine import Engine
from megatron_rl.inference.rollout_engine import RolloutEngine
from megatron_rl.rollout.expected_length import ExpectedLengths, deal
from megatron_rl.rollout.journal import RolloutJournal, StepJournal
from megatron_rl.rollout.prompt_source import PromptSource, RequestFactory
from megatron_rl.rollout.rollouter import Rollouter, RolloutResult
from megatron_rl.rollout.statistics import idle_metrics, lengths_and_seconds
from megatron_rl.run.base import Run
from megatron_rl.run.generation import (
    build_engine,
    build_evaluator,
    build_rollouter,
    calibration_requests,
    request_factory,
)
from megatron_rl.run.training import TrainingParts, TrainingRun, ready, start_training
from megatron_rl.trainer import PolicyTrainer
from megatron_rl.trainer.parity import ParityGate
from megatron_rl.trainer.samples import SampleBuilder
from megatron_rl.trainer.scoring import Scorer
from megatron_rl.types import Request, SourcedTask


@dataclass(kw_only=True)
class RLRun(TrainingRun):
    """Trains on what the model generates."""

    source: PromptSource
    trainer: PolicyTrainer
    factory: RequestFactory
    rollouter: Rollouter
    samples: SampleBuilder
    parity: ParityGate
    journal: RolloutJournal | None
    """None where no checkpoint is made on the way: a run that is killed then begins anew."""
    expected_lengths: ExpectedLengths
    """Of the training tasks; the evaluator has its own."""

    def requests_of_this_rank(self, drawn: Sequence[SourcedTask]) -> list[Request]:
        """This rollout replica's groups, in the order drawn; every rank has drawn the same list.

        Replicas get about the same expected tokens, so not the same number of groups. The index of a request is its
        group's number: the place in ``drawn``.
        """
        size = self.config.algorithm.grpo_group_size
        requests = [self.factory.request(source, size, number) for number, source in enumerate(drawn)]
        ranks = deal(requests, self.expected_lengths, self.groups.rollout_size)
        mine = [request for request, rank in zip(requests, ranks, strict=True) if rank == self.groups.rollout_rank]
        replay, expected = self.config.rollout.rl_router_replay, self.expected_lengths
        return [
            dataclasses.replace(
                request, expected_tokens=max(1, round(expected.completion(request))), wants_routing=replay
            )
            for request in mine
        ]

    def learn_lengths(
        self, drawn: Sequence[SourcedTask], requests: Sequence[Request], rollouts: RolloutResult
    ) -> dict[str, float]:
        """Remember how long the groups of a step became, wherever they were generated; how idle the ranks were.

        Collective over the rollout replicas.
        """
        lengths, seconds = lengths_and_seconds(requests, rollouts, len(drawn), self.groups.rollout_group)
        self.expected_lengths.learn(zip(drawn, lengths, strict=True))
        return idle_metrics(seconds)

    def committed(self, step: int) -> None:
        """What a checkpoint covers need not be in the journal."""
        if self.journal is not None:
            self.journal.forget(step)

    def open_journal(self, step: int, seed: int) -> StepJournal | None:
        """Finished groups of an earlier start of this step, and the place for new ones; collective."""
        if self.journal is None:
            return None
        self.optimization.gather_parameters()  # the journal is of the weights that rollouts will have
        header = {
            "seed": seed,
            "sampling": dataclasses.asdict(self.factory.sampling),
            "longest": self.factory.max_sequence_length,
            "engine": self.config.rollout.rl_inference_engine,
            "ends": self.tokenizer.end_token_ids,
            "recipe": self.phases.quantization.recipe,
            "kv_cache": self.config.kv_cache_dtype,
            "router_replay": self.config.rollout.rl_router_replay,
            "environments": self._environment_list,
            "weights": weights_fingerprint(self.policy, self.groups),
        }
        return self.journal.open(step, header)

    @cached_property
    def _environment_list(self) -> str:
        """Checksum of the YAML list as the run began with it: the user may edit or remove the file meanwhile."""
        return hashlib.sha256(Path(self.config.environment.langrl_env_config).read_bytes()).hexdigest()


def build(base: Run) -> RLRun:
    """The program's parts; collective over the job."""
    parts, reference = start_training(base)
    config, policy, groups, phases, states = parts.config, parts.policy, parts.groups, parts.phases, parts.states
    if config.quantization.rl_train_forward == "quantized":
        parts.closing.enter_context(phases.quantization.aligned())
    factory = request_factory(config, parts.tokenizer)
    source = PromptSource(
        parts.environments.training_pools(),
        lambda task: parts.tokenizer.encode_prompt(task.prompt),
        factory.max_prompt_tokens,
        config.training.seed,
    )
    states.register("prompts", source)
    expected_lengths = states.register("expected_lengths", ExpectedLengths(), optional=True)
    engine = build_engine(config, policy, parts.tokenizer, groups, phases.cache_budget_gb())
    phases.hold(engine, lambda: calibration_requests(factory, source))
    rollouter = build_rollouter(parts, engine)
    evaluates = config.training.eval_interval is not None
    scorer = Scorer(
        policy, groups.tensor_group, config.rollout.rl_temperature, config.kernels.rl_fused_output_layer,
        groups.pipeline_group,
    )
    advantage = advantage_of(config)
    baseline = getattr(advantage, "BASELINE", "group")
    return ready(
        RLRun(
            **vars(parts),
            source=source,
            factory=factory,
            rollouter=rollouter,
            samples=SampleBuilder(baseline, config.algorithm.rl_keep_zero_variance_groups, groups),
            trainer=PolicyTrainer(
                parts.optimization, scorer, advantage, PolicyObjective.of(config), config.algorithm.grpo_iterations,
                reference, groups, parts.timer,
            ),
            parity=_parity_gate(parts, scorer, engine),
            evaluator=build_evaluator(parts, factory, rollouter) if evaluates else None,
            journal=_journal(parts),
            expected_lengths=expected_lengths,
        )
    )


def _parity_gate(parts: TrainingParts, scorer: Scorer, engine: Engine) -> ParityGate:
    rounded = None
    if parts.config.kv_cache_is_rounded and isinstance(engine, RolloutEngine):
        rounded = partial(rounded_attention, parts.policy.gpt.decoder.layers, engine.kv_numbers)
    return ParityGate(parts.config, scorer, parts.phases.quantization, parts.groups.data_group, rounded)


def _journal(parts: TrainingParts) -> RolloutJournal | None:
    if parts.config.checkpoint.save_interval is None:
        return None
    journal = RolloutJournal(parts.directory.journal, parts.groups)
    if parts.groups.is_main:
        journal.forget(parts.progress.step)  # a kill may have come between the checkpoint and this
    return journal
