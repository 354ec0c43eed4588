"""A run: what every program stands on. Training and evaluation add their own parts."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from megatron_rl.checkpoint.manager import CheckpointManager
from megatron_rl.config import RLConfig
from megatron_rl.metrics.rundir import RunDirectory
from megatron_rl.metrics.timers import PhaseTimer
from megatron_rl.models import PolicyModel, build_model
from megatron_rl.parallel import ParallelGroups, seed_everything
from megatron_rl.platform import Platform
from megatron_rl.run.environments import EnvironmentAccess, open_environments
from megatron_rl.run.progress import Progress
from megatron_rl.run.reporting import Reporter
from megatron_rl.signals import StopRequest
from megatron_rl.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Run:
    """Everything that does not depend on the program: `build` of each program takes one and adds its own parts."""

    config: RLConfig
    groups: ParallelGroups
    policy: PolicyModel
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
        ends = ", ".join(f"{tokenizer.decode_token(number)} ({number})" for number in tokenizer.end_token_ids)
        logger.info("an answer ends with %s", ends)
        if tokenizer.passed_over:
            logger.warning(
                "eos_token_id names %s too, which tokenizer %s has no special tokens for; an answer does not end there",
                tokenizer.passed_over, tokenizer.name,
            )  # fmt: skip


@contextlib.contextmanager
def open_run(
    config: RLConfig,
    platform: Platform,
    groups: ParallelGroups,
    tokenizer: Tokenizer,
    stop: StopRequest,
    command: Sequence[str],
) -> Iterator[Run]:
    """Environments, then a model of random weights; leaves no process behind. Collective over the job."""
    directory = RunDirectory(Path(config.logging.run_dir))
    timer = PhaseTimer(sync=platform.synchronize if config.logging.timing_log_level > 0 else None)
    with contextlib.ExitStack() as closing:
        environments = closing.enter_context(open_environments(config, groups, directory))
        seed_everything(config.training.seed)
        policy = build_model(config, platform, tokenizer.vocab_size)
        checkpoints = CheckpointManager(
            Path(config.checkpoint.save), config.checkpoint.keep_last or 0, groups, config.checkpoint.ckpt_format
        )
        closing.callback(checkpoints.abandon)
        reporter = Reporter(config, groups, directory, timer, platform, command)
        closing.callback(reporter.close)
        yield Run(
            config=config,
            groups=groups,
            policy=policy,
            tokenizer=tokenizer,
            environments=environments,
            checkpoints=checkpoints,
            directory=directory,
            reporter=reporter,
            timer=timer,
            stop=stop,
            closing=closing,
        )
        dist.barrier()  # nobody stops the environment server while another rank still grades
