"""A run: what every program stands on. Training and evaluation add their own parts."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.callbacks import Callback
from megatron_rl.checkpoint.manager import CheckpointManager
from megatron_rl.config.rl_config import RLConfig
from megatron_rl.environments.wire import ServedEnvironment
from megatron_rl.metrics.console import format_table
from megatron_rl.metrics.evaluation import by_environment
from megatron_rl.metrics.jsonl import read_rows
from megatron_rl.metrics.rundir import RunDirectory
from megatron_rl.metrics.timers import PhaseTimer
from megatron_rl.models.gpt import PolicyModel, build_model
from megatron_rl.platform import Platform
from megatron_rl.platform.device import OffloadableFactory, OffloadableTensors
from megatron_rl.platform.groups import ParallelGroups, seed_everything
from megatron_rl.quantization.audit import LayerAudit, table_rows
from megatron_rl.quantization.rollout import RolloutQuantization
from megatron_rl.rollout.evaluation import Evaluator
from megatron_rl.rollout.statistics import failures_of, no_results
from megatron_rl.run.callbacks import CallbackReporter
from megatron_rl.run.environments import EnvironmentAccess, open_environments
from megatron_rl.run.memory.phases import Phases
from megatron_rl.run.preflight.starts import reads_every_weight
from megatron_rl.run.progress import Progress
from megatron_rl.run.reporting import Reporter
from megatron_rl.signals import StopRequest
from megatron_rl.tokenizer import Tokenizer

AUDIT_LINES = 24

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Run:
    """Everything that does not depend on the program: `build` of each program takes one and adds its own parts."""

    config: RLConfig
    groups: ParallelGroups
    policy: PolicyModel
    phases: Phases
    tokenizer: Tokenizer
    environments: EnvironmentAccess
    checkpoints: CheckpointManager
    directory: RunDirectory
    reporter: Reporter
    """Writes nothing before `Reporter.open`."""
    timer: PhaseTimer
    stop: StopRequest
    progress: Progress = field(default_factory=Progress)
    closing: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """What has to be closed when the run ends, however it ends."""

    def answers_end_also_at(self, token_ids: Sequence[int]) -> None:
        """Take up the end tokens of the run that the weights come from."""
        self.tokenizer = tokenizer = self.tokenizer.ending_also_at(token_ids)
        ends = ", ".join(f"{tokenizer.decode_raw([number])} ({number})" for number in tokenizer.end_token_ids)
        logger.info("an answer ends with %s", ends)
        if tokenizer.passed_over:
            logger.warning(
                "eos_token_id names %s too, which tokenizer %s has no special tokens for; an answer does not end there",
                tokenizer.passed_over, tokenizer.name,
            )  # fmt: skip

    def evaluate(self, evaluator: Evaluator, alone: bool = False) -> dict[str, float] | None:
        """Evaluate the current weights; None when asked to stop meanwhile. Collective.

        Raises:
            EnvironmentFault: an environment has graded nothing, and the run is ``alone`` for the evaluation.
        """
        with self.phases.rollouts(quantized=not self.config.quantization.rl_evaluate_unquantized):
            outcome = evaluator.evaluate(self.progress.policy_version)
        if outcome is None:
            return None
        self.reporter.evaluation_records(self.progress.step, outcome.groups, self.tokenizer.decode_raw)
        if outcome.ungraded:
            fault = no_results(outcome.ungraded, failures_of(outcome.groups, self.groups.rollout_group))
            if alone:
                raise fault
            if self.groups.is_main:
                logger.error("%s; the run goes on", fault)
        for served in self.environments.served if self.groups.is_main else ():
            warn_of_range(served, outcome.metrics)
        return outcome.metrics

    def summary(self, status: str) -> dict[str, Any]:
        """Return ``summary.json``, the numbers one asks for first.

        ``eval`` is the mean over environments; ``eval_by_environment`` has each of them.
        """
        rows = read_rows(self.directory.metrics)
        seconds: Counter[str] = Counter()
        for row in rows:
            for name, value in row.items():
                if name.startswith("timing_s/") and value is not None:
                    seconds[name.removeprefix("timing_s/")] += value
        progress, copies, attention = self.progress, self.phases.quantization, self.policy.attention
        summary: dict[str, Any] = {
            "status": status,
            "steps": progress.step,
            "updates": progress.updates,
            "tokens": progress.tokens,
            "logprob_gap_max": progress.logprob_gap_max,
            "seconds": {"run": self.reporter.seconds, "by_phase": dict(seconds)},
            "world_size": self.groups.world_size,
            "rollout_quantization": {"recipe": copies.recipe, "bytes": copies.linears.stored_bytes},
            "attention": {
                "packed": attention.packed_name,
                "cache": attention.cache_name,
                "kv_cache_dtype": self.config.kv_cache_dtype,
            },
        }
        evaluated = [found for row in rows if (found := by_environment(row))]
        if evaluated:
            ends = {"before": evaluated[0], "after": evaluated[-1]}
            summary["eval"] = {when: _mean(results) for when, results in ends.items()}
            summary["eval_by_environment"] = ends
        return summary


@contextlib.contextmanager
def open_run(
    config: RLConfig, platform: Platform, groups: ParallelGroups, tokenizer: Tokenizer, stop: StopRequest,
    command: Sequence[str], callbacks: Sequence[Callback] = (),
) -> Iterator[Run]:  # fmt: skip
    """Open environments, then a model of random weights; leave no process behind. Collective over the job."""
    directory = RunDirectory(Path(config.logging.run_dir))
    timer = PhaseTimer(sync=platform.synchronize if config.logging.timing_log_level > 0 else None)
    has_callbacks = bool(config.logging.callbacks or callbacks)
    reporter_of = partial(CallbackReporter, stop=stop, callbacks=callbacks) if has_callbacks else Reporter
    reporter = reporter_of(config, groups, directory, timer, platform, command)
    with contextlib.ExitStack() as closing:
        environments = closing.enter_context(open_environments(config, groups, directory))
        tokenizer = tokenizer.formatting(by_environment={each.name: each.chat for each in environments.served})
        seed_everything(config.training.seed)
        policy = build_model(config, platform, tokenizer.vocab_size, is_filled_later=reads_every_weight(config))
        quantization = build_quantization(config, policy, groups, directory, timer)
        checkpoints = CheckpointManager(Path(config.checkpoint.save), config.checkpoint.keep_last or 0, groups)
        closing.callback(checkpoints.abandon)
        closing.callback(reporter.close)
        yield Run(
            config=config, groups=groups, policy=policy, phases=Phases(config, policy, groups, quantization),
            tokenizer=tokenizer, environments=environments, checkpoints=checkpoints, directory=directory,
            reporter=reporter, timer=timer, stop=stop, closing=closing,
        )  # fmt: skip
        dist.barrier()  # nobody stops the environment server while another rank still grades


def build_quantization(
    config: RLConfig, policy: PolicyModel, groups: ParallelGroups, directory: RunDirectory, timer: PhaseTimer
) -> RolloutQuantization:
    """Allocate quantised copies of the weights; none with `--rl-rollout-quantization none`."""
    settings = config.quantization

    def report(rows: Sequence[LayerAudit]) -> None:
        if not groups.is_main:
            return
        directory.write_quantization([vars(row) | {"agrees": row.agrees} for row in rows])
        shown = table_rows(rows, AUDIT_LINES)
        title = "the linear layers of the first rollout"
        if len(shown) < len(rows):
            title += f", {len(shown)} of {len(rows)} with the largest errors"
        table = format_table(("layer", "ran as", "error"), shown)
        logger.info("%s (all in %s):\n%s", title, directory.quantization.name, table)

    quantization = RolloutQuantization(
        torch.nn.ModuleList(policy.chunks), settings.rl_rollout_quantization, settings.rl_quantization_skip, report,
        timer.phase, groups.lockstep_group, quantizes_gradients=settings.rl_train_backward == "quantized",
        offloadable=leaving_of(config, policy.device),
    )  # fmt: skip
    linears = quantization.linears
    where = "" if groups.experts.whole.size() == groups.experts.tensor.size() else " of the first rank"
    if linears.layers and groups.is_main:
        logger.info(
            "rollouts run %d linear layers%s as %s, %d as they are: %.2f MiB beside %.2f MiB of their weights",
            len(linears.layers), where, linears.recipe.format, len(linears.plain), linears.stored_bytes / 2**20,
            linears.num_weights * policy.dtype.itemsize / 2**20,
        )
    return quantization


def leaving_of(config: RLConfig, device: torch.device) -> OffloadableFactory:
    """Return how the memory leaves that graphs read: from addresses that stay, if that is asked for."""
    if not config.kernels.keeps_graphs or device.type != "cuda":
        return OffloadableTensors
    from megatron_rl.platform.reserved import CudaDriver, reserved_memory

    return reserved_memory(CudaDriver(device))


def warn_of_range(served: ServedEnvironment, metrics: Mapping[str, float]) -> None:
    """Warn if the environment declares a highest reward and an evaluation could not use it."""
    lowest, highest = served.reward_range
    graded, has_pass = (f"val/{served.name}/{measure}" in metrics for measure in ("reward", "pass@1"))
    if highest is not None and graded and not has_pass:
        logger.warning(
            "%s has no pass@k: it gave rewards outside %g to %g, so nobody can say what a right answer gets; write "
            "REWARDS = (lowest, highest) beside the reward function, or reward_range = (lowest, highest) into the "
            "environment; (lowest, None) says that no reward is the highest",
            served.name, lowest, highest,
        )  # fmt: skip


def _mean(results: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Of every measure over the environments that report it."""
    names = dict.fromkeys(name for measures in results.values() for name in measures)
    columns = {name: [row[name] for row in results.values() if name in row] for name in names}
    return {name: sum(values) / len(values) for name, values in columns.items()}
