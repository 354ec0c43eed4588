"""parse -> check -> initialise -> build -> run."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl.config import RLConfig, difference_from_defaults, notes, read_config
from megatron_rl.errors import ConfigError, MegatronRLError, problem_lines
from megatron_rl.estimate import estimate, estimate_problems, report_text, size_problems, vocabulary
from megatron_rl.metrics.logging import configure_logging
from megatron_rl.metrics.rundir import RunDirectory
from megatron_rl.preflight import preflight

if TYPE_CHECKING:  # torch is imported where it is first needed, so that --check and --help stay quick
    from megatron_rl.parallel import ParallelGroups
    from megatron_rl.platform import Platform, StopRequest

logger = logging.getLogger("megatron_rl")

CONFIGURATION_ERROR = 2
RUN_ERROR = 1
INTERRUPTED = 130

PATIENCE_WITH_RANK_0_S = 120.0


def main(argv: Sequence[str]) -> int:
    """Returns the exit code.

    0: finished or stopped on request; 1: failed; 2: wrong configuration; 130: interrupted twice.
    """
    rank = int(os.environ.get("RANK", "0"))
    configure_logging(rank)
    world_size = _world_size(argv)
    config, problems = read_config(argv[1:], world_size)
    if config.training.estimate:
        return _report_estimate(config, problems, world_size) if rank == 0 else 0
    if config.training.check:
        return _report_check(config, [*problems, *preflight(config)] or size_problems(config, world_size))
    try:
        return _run(config, problems, argv, rank)
    except ConfigError as error:
        _tell(error.problems, rank)
        return CONFIGURATION_ERROR
    except MegatronRLError as error:
        logger.error("%s", error)
        return RUN_ERROR
    except KeyboardInterrupt:
        logger.error("interrupted a second time: the steps since the last checkpoint are lost")
        return INTERRUPTED


def _world_size(argv: Sequence[str]) -> int:
    """The ranks of this launch, or those `--check` and `--estimate` ask about."""
    training = read_config(argv[1:], 1)[0].training
    asked = training.check_world_size if training.check or training.estimate else None
    return asked or int(os.environ.get("WORLD_SIZE", "1"))


def _report_estimate(config: RLConfig, problems: Sequence[str], world_size: int) -> int:
    problems = estimate_problems(config, problems)
    try:
        if problems:
            raise ConfigError(problems)
        result = estimate(config, world_size, vocabulary(config))
    except ConfigError as error:
        _tell(error.problems, rank=0)
        return CONFIGURATION_ERROR
    sys.stdout.write(report_text(config, result) + "\n")
    return 0


def _report_check(config: RLConfig, problems: Sequence[str]) -> int:
    for note in notes(config):
        sys.stdout.write(f"note: {note}\n")
    _tell(problems, rank=0)
    if problems:
        return CONFIGURATION_ERROR
    sys.stdout.write("configuration is valid\n")
    return 0


def _tell(problems: Sequence[str], rank: int) -> None:
    """Every rank finds the same problems; one names them."""
    if rank == 0 and problems:
        sys.stderr.write(f"{len(problems)} problem(s) in the configuration:\n")
        sys.stderr.writelines(f"  {line}\n" for line in problem_lines(problems))
        sys.stderr.flush()


def _run(config: RLConfig, problems: list[str], argv: Sequence[str], rank: int) -> int:
    import torch

    from megatron_rl.parallel import initialize, shut_down
    from megatron_rl.parallel.collectives import broadcast_json
    from megatron_rl.platform import StopRequest, current_platform

    stop = StopRequest().install()
    platform = current_platform()
    if not platform.is_cuda and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    if problems:  # rules about sizes: without them the process groups cannot even be built
        if rank != 0:
            _wait_for_rank_0(stop)
        raise ConfigError([*problems, *(preflight(config) if rank == 0 else [])])
    groups = initialize(config.parallel, platform)
    try:
        found = broadcast_json(_found_by_rank_0(config, groups) if groups.is_main else [], source=0)
        if found:
            if rank != 0:
                _wait_for_rank_0(stop)
            raise ConfigError(found)
        return _build_and_train(_Launch(config, platform, groups, stop, argv))
    finally:
        shut_down()


def _found_by_rank_0(config: RLConfig, groups: ParallelGroups) -> list[str]:
    return preflight(config) or size_problems(config, groups.world_size)


def _wait_for_rank_0(stop: StopRequest) -> None:
    """Until rank 0 has written what is wrong and ends, upon which the launcher asks the others to stop.

    torchrun ends all ranks, rank 0 amid its checks, as soon as the first one exits.
    """
    deadline = time.monotonic() + PATIENCE_WITH_RANK_0_S
    while not stop.requested and time.monotonic() < deadline:
        time.sleep(0.05)


@dataclass(frozen=True)
class _Launch:
    config: RLConfig
    platform: Platform
    groups: ParallelGroups
    stop: StopRequest
    argv: Sequence[str]


def _build_and_train(launch: _Launch) -> int:
    from megatron_rl.build import build_run
    from megatron_rl.loop import train
    from megatron_rl.summary import summarise
    from megatron_rl.tokenizer import load_tokenizer

    config, groups = launch.config, launch.groups
    if groups.is_main:
        for note in notes(config):
            logger.info("note: %s", note)
        for name, value in difference_from_defaults(config).items():
            logger.info("  %s = %s", name, value)
    tokenizer = load_tokenizer(config.tokenizer.tokenizer_model)
    try:
        with build_run(
            config, launch.platform, groups, tokenizer, launch.stop, list(launch.argv)
        ) as run:
            status = train(run)
            run.reporter.finish(status, summarise(run, status))
    except BaseException as error:
        if groups.is_main:
            _mark_as_failed(Path(config.logging.run_dir), error)
        raise
    if groups.is_main:
        logger.info("%s: %s", status, config.logging.run_dir)
    return 0


def _mark_as_failed(run_dir: Path, error: BaseException) -> None:
    """Whatever ended the run, its record says so; where the disk is full, the message on the screen has to do."""
    with contextlib.suppress(OSError):
        run_dir.mkdir(parents=True, exist_ok=True)
        RunDirectory(run_dir).set_status("failed", error=str(error) or type(error).__name__)
