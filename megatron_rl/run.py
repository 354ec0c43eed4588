"""A run: everything a step needs, and the few things that concern all of it."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

from megatron_rl.build_environments import EnvironmentAccess
from megatron_rl.checkpoint import CheckpointManager, StateRegistry, run_state_of
from megatron_rl.checkpoint.origin import Origin, weights_fingerprint
from megatron_rl.config import RLConfig
from megatron_rl.errors import SaveError
from megatron_rl.metrics.rundir import RunDirectory
from megatron_rl.metrics.timers import PhaseTimer
from megatron_rl.models import PolicyModel, rollout_mode
from megatron_rl.parallel import ParallelGroups
from megatron_rl.parallel.collectives import broadcast_json
from megatron_rl.progress import Progress
from megatron_rl.quantization.rollout import RolloutQuantization
from megatron_rl.reporting import Reporter
from megatron_rl.rollout import Draw, Evaluator, PromptSource, RequestFactory, Rollouter, RolloutResult
from megatron_rl.rollout.expected_length import ExpectedLengths, deal
from megatron_rl.rollout.journal import RolloutJournal, StepJournal
from megatron_rl.rollout.statistics import idle_metrics, lengths_and_seconds
from megatron_rl.signals import StopRequest
from megatron_rl.tokenizer import Tokenizer
from megatron_rl.trainer import Optimization, PolicyTrainer, SupervisedTrainer
from megatron_rl.trainer.batches import BatchBuilder
from megatron_rl.trainer.parity import ParityGate
from megatron_rl.trainer.samples import SampleBuilder
from megatron_rl.trainer.supervised import DemonstrationSource, NoSource
from megatron_rl.types import GenerationRequest

logger = logging.getLogger(__name__)


@dataclass
class Run:
    """Everything a step needs, built once."""

    config: RLConfig
    groups: ParallelGroups
    policy: PolicyModel
    tokenizer: Tokenizer
    environments: EnvironmentAccess
    optimization: Optimization
    quantization: RolloutQuantization
    source: PromptSource | DemonstrationSource | NoSource
    factory: RequestFactory
    rollouter: Rollouter | None
    """None in a supervised run that never evaluates: no KV cache is taken."""
    generate_a_little: Callable[[], None]
    """Calibrates a recipe that wants it; needs rollout mode."""
    samples: SampleBuilder | None
    batches: BatchBuilder
    trainer: PolicyTrainer | SupervisedTrainer
    memory_for_rollouts: Callable[[], AbstractContextManager[None]]
    """Inside, the KV cache is there, and with `--rl-offload-optimizer-during-inference` no optimizer state."""
    parity: ParityGate
    evaluator: Evaluator | None
    journal: RolloutJournal | None
    """None where no checkpoint is made on the way: a run that is killed then begins anew."""
    checkpoints: CheckpointManager
    directory: RunDirectory
    reporter: Reporter
    timer: PhaseTimer
    stop: StopRequest
    progress: Progress
    origin: Origin | None
    """What the run started from; None of a run that an earlier version began."""
    expected_lengths: ExpectedLengths = field(default_factory=ExpectedLengths)
    """Of the training tasks; the evaluator has its own."""
    states: StateRegistry = field(default_factory=StateRegistry)
    """What a checkpoint holds besides weights and optimizer."""

    @contextlib.contextmanager
    def rollout_phase(self, quantized: bool = True) -> Iterator[None]:
        """The model generates in here, on quantised weights if there are any and they are wanted."""
        with rollout_mode(self.policy, self.optimization.wrapped), self.memory_for_rollouts():
            phase = self.quantization.rollout(self.generate_a_little) if quantized else self.quantization.plain()
            with phase:
                yield

    def requests_of_this_rank(self, draws: Sequence[Draw]) -> list[GenerationRequest]:
        """This data-parallel rank's groups, in the order drawn; every rank has drawn the same list.

        Ranks get about the same expected tokens, so not the same number of groups. The index of a request is its
        group's number: the place in ``draws``.
        """
        size = self.config.algorithm.grpo_group_size
        requests = [self.factory.request(draw, size, number) for number, draw in enumerate(draws)]
        ranks = deal(requests, self.expected_lengths, self.groups.data_size)
        mine = [request for request, rank in zip(requests, ranks, strict=True) if rank == self.groups.data_rank]
        return [
            dataclasses.replace(request, expected_tokens=max(1, round(self.expected_lengths.completion(request))))
            for request in mine
        ]

    def learn_lengths(
        self, draws: Sequence[Draw], requests: Sequence[GenerationRequest], rollouts: RolloutResult
    ) -> dict[str, float]:
        """Remember how long the groups of a step became, wherever they were generated; how idle the ranks were.

        Collective over the data-parallel group.
        """
        lengths, seconds = lengths_and_seconds(requests, rollouts, len(draws), self.groups.data_group)
        self.expected_lengths.learn(zip((draw.source for draw in draws), lengths, strict=True))
        return idle_metrics(seconds)

    def open_journal(self, step: int, seed: int) -> StepJournal | None:
        """Finished groups of an earlier start of this step, and the place for new ones; collective."""
        if self.journal is None:
            return None
        header = {
            "seed": seed,
            "sampling": dataclasses.asdict(self.factory.sampling),
            "longest": self.factory.max_sequence_length,
            "engine": self.config.rollout.rl_inference_engine,
            "ends": self.tokenizer.end_token_ids,
            "recipe": self.quantization.recipe,
            "kv_cache": self.config.kv_cache_dtype,
            "environments": self._environment_list,
            "weights": weights_fingerprint(self.policy, self.groups),
        }
        return self.journal.open(step, header)

    @cached_property
    def _environment_list(self) -> str:
        """Checksum of the YAML list as the run began with it: the user may edit or remove the file meanwhile."""
        return hashlib.sha256(Path(self.config.environment.langrl_env_config).read_bytes()).hexdigest()

    def evaluation_is_due(self) -> bool:
        """After every `--eval-interval` steps and after the last one."""
        if self.evaluator is None:
            return False
        step = self.progress.step
        return step % self.config.training.eval_interval == 0 or step == self.config.total_steps

    def save_is_due(self) -> bool:
        """After every `--save-interval` steps and after the last one."""
        interval = self.config.checkpoint.save_interval
        step = self.progress.step
        return step == self.config.total_steps or (interval is not None and step % interval == 0)

    def is_best(self, metrics: dict[str, float]) -> bool:
        """Whether an evaluation is the best so far by `--keep-best`; collective.

        Rank 0 decides: the other ranks of a model copy have no verdicts, and a save wants all of them.
        """
        wanted = self.config.checkpoint.keep_best
        if wanted is None:
            return False
        if wanted not in metrics:
            known = ", ".join(name for name in metrics if name.startswith("val/"))
            logger.warning("--keep-best %s is no metric of this evaluation; there are: %s", wanted, known)
        return self.progress.is_best(broadcast_json(metrics.get(wanted), source=0))

    def must_leave(self, seconds: float) -> bool:
        """`--exit-interval` and `--exit-duration-in-mins`."""
        training = self.config.training
        on_step = training.exit_interval is not None and self.progress.step % training.exit_interval == 0
        late = training.exit_duration_in_mins is not None and seconds > 60 * training.exit_duration_in_mins
        return on_step or late

    def save(self, final: bool, is_best: bool = False) -> None:
        """Checkpoint the finished steps, with `--async-save` in the background unless it is ``final``; collective.

        Raises:
            SaveError: it failed and is the ``final`` one. Another that fails is tried again when the next is due.
        """
        progress, config = self.progress, self.config
        state = run_state_of(
            config,
            self.policy,
            progress.step,
            progress.updates > 0 and not config.checkpoint.no_save_optim,
            self.tokenizer.end_token_ids,
            self.origin,
            self.states.collect(),
        )
        try:
            self.checkpoints.save(
                state,
                self.policy,
                self.optimization,
                in_background=config.checkpoint.async_save and not final,
                is_best=is_best,
                committed=partial(self.journal.forget, progress.step) if self.journal is not None else lambda: None,
            )
        except SaveError as error:
            if final:
                raise
            logger.warning("NOT SAVED: %s; the run goes on", error)
