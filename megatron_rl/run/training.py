"""Training, RL or supervised: what such a run has, the loop over its steps, and what it saves."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from megatron_rl.checkpoint.run_state import StartingWeights, run_state_of
from megatron_rl.checkpoint.state import RandomState, StateRegistry
from megatron_rl.errors import MemoryExhausted, SaveError
from megatron_rl.platform.collectives import any_rank, broadcast_json
from megatron_rl.platform.device import is_out_of_memory
from megatron_rl.rollout.evaluation import Evaluator
from megatron_rl.rollout.prompt_source import PromptSource
from megatron_rl.run.base import Run
from megatron_rl.run.progress import note_signal
from megatron_rl.run.resume import Settings
from megatron_rl.run.weights import Start, start_weights
from megatron_rl.trainer.batches import BatchBuilder
from megatron_rl.trainer.optimizer import Optimization
from megatron_rl.trainer.policy import PolicyTrainer
from megatron_rl.trainer.supervised import DemonstrationSource, SupervisedTrainer
from megatron_rl.trainer.update import TrainOutcome

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class TrainingRun(Run):
    """The common parts of both training programs."""

    optimization: Optimization
    critic: Optimization | None
    """None without one."""
    origin: StartingWeights | None
    """What the run started from; None of a run that an earlier version began."""
    states: StateRegistry
    """What a checkpoint holds besides weights and optimizer."""
    batches: BatchBuilder
    source: PromptSource | DemonstrationSource
    trainer: PolicyTrainer | SupervisedTrainer
    evaluator: Evaluator | None
    """None without `--eval-interval`."""

    @property
    def updates_begun(self) -> int:
        """Times that this process has begun to write an update into any weights."""
        return self.optimization.updates_begun + (0 if self.critic is None else self.critic.updates_begun)

    def committed(self, step: int) -> None:
        """Called on the main rank once a checkpoint of ``step`` counts."""

    def is_due(self, interval: int | None) -> bool:
        """Return whether what happens after every ``interval`` steps, and after the last one, happens now."""
        step = self.progress.step
        return step == self.config.total_steps or (interval is not None and step % interval == 0)

    def is_best(self, metrics: dict[str, float]) -> bool:
        """Return whether an evaluation is the best so far by `--keep-best`; collective.

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
        """Return whether `--exit-interval` or `--exit-duration-in-mins` is reached."""
        training = self.config.training
        on_step = training.exit_interval is not None and self.progress.step % training.exit_interval == 0
        late = training.exit_duration_in_mins is not None and seconds > 60 * training.exit_duration_in_mins
        return on_step or late

    def save(self, final: bool, is_best: bool = False) -> None:
        """Save the finished steps, with `--async-save` in the background unless it is ``final``; collective.

        Raises:
            SaveError: it failed and is the ``final`` one. Another that fails is tried again when the next is due.
        """
        progress, config = self.progress, self.config
        with_optimizer = not config.checkpoint.no_save_optim
        state = run_state_of(
            config,
            self.policy,
            self.tokenizer.end_token_ids,
            step=progress.step,
            has_optimizer=progress.updates > 0 and with_optimizer,
            critic_has_optimizer=None if self.critic is None else progress.critic_updates > 0 and with_optimizer,
            origin=self.origin,
            components=self.states.collect(),
        )
        try:
            with self.phases.save():
                self.checkpoints.save(
                    state,
                    self.policy,
                    self.optimization,
                    critic=self.critic,
                    in_background=config.checkpoint.async_save and not final,
                    is_best=is_best,
                    committed=partial(self.committed, progress.step),
                )
        except SaveError as error:
            if final:
                raise
            logger.warning("NOT SAVED: %s; the run goes on", error)


def start_training(base: Run) -> tuple[Start, StateRegistry]:
    """Load weights, optimizer, and the states that the run goes on from; collective."""
    config, quantization = base.config, base.phases.quantization
    copies = quantization if quantization.is_quantized else None
    start = start_weights(config, base.policy, base.checkpoints, base.groups, copies)
    base.answers_end_also_at(start.end_token_ids)
    states = StateRegistry(None if start.saved is None else start.saved.components)
    states.register("settings", Settings(config), optional=True)
    states.register("progress", base.progress)
    states.register("quantization", quantization)
    base.phases.hold_training(start.optimization, start.critic)
    return start, states


AnyRun = TypeVar("AnyRun", bound=TrainingRun)


def assemble(program: type[AnyRun], base: Run, start: Start, states: StateRegistry, **own: Any) -> AnyRun:
    """Assemble the run of ``program`` with its ``own`` parts: the next thing is a step."""
    config, bin_size = base.config, base.config.training.rl_sequence_packing_bin_size
    run = program(
        **vars(base),
        optimization=start.optimization,
        critic=start.critic,
        origin=start.origin,
        states=states,
        batches=BatchBuilder(
            bin_size, config.sequence_shares, base.policy.device, base.groups, config.stages,
            shares_prompts=config.training.rl_share_prompts,
        ),
        **own,
    )
    if run.evaluator is not None:
        states.register("expected_held_out_lengths", run.evaluator.expected_lengths, optional=True)
    states.register("random", RandomState(), resume=not run.config.checkpoint.no_load_rng)
    states.tell_unclaimed()
    run.reporter.open(run.progress)
    return run


def train(run: AnyRun, take_step: Callable[[AnyRun, int], TrainOutcome | None]) -> str:
    """Run to the last step, or until asked to stop. Returns ``finished`` or ``stopped``.

    ``take_step`` returns None when the run was asked to stop and the step left no trace.
    """
    progress, started = run.progress, time.monotonic()
    if progress.step == 0 and run.evaluator is not None and not progress.evaluated_first:
        with run.timer.phase("eval"):
            before = run.evaluate(run.evaluator)
        if before is None:
            return _stop(run)
        run.reporter.step(0, before, run.policy)
        progress.evaluated_first = True  # done again, it would be dealt by the lengths that it has taught
    while progress.step < run.config.total_steps:
        if any_rank(run.stop.requested):
            return _stop(run)
        with run.timer.phase("step"), finished_steps_kept(run):
            result = take_step(run, progress.step + 1)
        if result is None:
            return _stop(run)
        record_updates(run, result)
        best = False
        if run.evaluator is not None and run.is_due(run.config.training.eval_interval):
            with run.timer.phase("eval"), finished_steps_kept(run):
                held_out = run.evaluate(run.evaluator)
            result.metrics.update(held_out or {})
            best = held_out is not None and run.is_best(held_out)
        result.metrics["checkpoint/failed_saves"] = float(run.checkpoints.failed_saves)
        run.reporter.step(progress.step, result.metrics, run.policy)
        leaves_early = progress.step < run.config.total_steps and any_rank(run.must_leave(time.monotonic() - started))
        run.checkpoints.poll()
        if run.is_due(run.config.checkpoint.save_interval) or leaves_early or best:
            with run.timer.phase("save"):
                run.save(final=leaves_early or progress.step == run.config.total_steps, is_best=best)
        if leaves_early:
            return "stopped"
    return "finished"


def record_updates(run: TrainingRun, result: TrainOutcome) -> None:
    """Count a finished step."""
    progress = run.progress
    progress.step += 1
    for optimization in filter(None, (run.optimization, run.critic)):
        optimization.schedule.set_step(progress.step)
    progress.tokens += result.tokens
    gap = result.metrics.get("training/rollout_logprob_gap_max", 0.0)
    progress.logprob_gap_max = max(progress.logprob_gap_max, gap)
    progress.critic_updates += result.critic_updates
    progress.count_updates(result.applied_updates, result.skipped_updates)
    if run.groups.is_main:
        note_signal(progress, result.metrics, run.config)


def _stop(run: TrainingRun) -> str:
    """Save what is finished; the interrupted step will be done again."""
    logger.warning("asked to stop (%s): saving step %d", run.stop.reason or "another rank", run.progress.step)
    run.save(final=True)
    return "stopped"


@contextlib.contextmanager
def finished_steps_kept(run: TrainingRun) -> Iterator[None]:
    """Let the step inside run out of memory: then it has not been, and the steps before it are saved if possible.

    An allocation fails on one rank, and the others wait for it in a collective that it will never reach, until the
    launcher ends them. So only a run of one rank can still save, and ranks that fail together: in a rollout without
    tensor parallelism.
    """
    cursor, begun = run.source.state_dict(), run.updates_begun
    try:
        yield
    except MemoryExhausted as error:
        run.source.load_state_dict(cursor)
        all_here = error.on_all_ranks or run.groups.world_size == 1
        kept = _save_if_possible(run, run.updates_begun == begun, all_here)
        raise MemoryExhausted(f"{error}; {kept}") from None


def _save_if_possible(run: TrainingRun, weights_are_the_steps: bool, all_here: bool) -> str:
    """Save the last finished step where that is possible; what a resume finds, in words. Collective if ``all_here``."""
    step = run.progress.step
    if all_here:
        run.checkpoints.finish()
    saved = run.checkpoints.saved_step
    newest = "the newest checkpoint, if there is one" if saved is None else f"step {saved}"
    if step == 0:
        return "no step was finished"
    if saved == step:
        return f"--resume goes on from step {step}"
    if not all_here:
        return f"step {step} is not saved, the other ranks cannot join in: --resume goes on from {newest}"
    if not weights_are_the_steps:
        return f"step {step} is not saved, the weights have changed since: --resume goes on from {newest}"
    try:
        run.save(final=True)
    except SaveError as failed:
        return f"step {step} could not be saved ({failed}): --resume goes on from {newest}"
    except (RuntimeError, MemoryError) as failed:
        if not is_out_of_memory(failed):
            raise
        return f"step {step} could not be saved for want of memory: --resume goes on from {newest}"
    return f"step {step} is saved, and --resume goes on from there"
