"""parse -> check -> initialise -> build -> run."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl.config import RLConfig, difference_from_defaults, notes, read_config
from megatron_rl.errors import ConfigError, MegatronRLError, Problem, problem_lines
from megatron_rl.estimate import estimate, quantization_problems, report_text, size_problems, vocabulary
from megatron_rl.metrics.logging import configure_logging
from megatron_rl.metrics.rundir import RunDirectory, typed_command
from megatron_rl.preflight import backend_problems, open_tokenizer, preflight
from megatron_rl.signals import TORCHRUN_AND_SIGNALS, StopRequest, by_torchrun
from megatron_rl.watchdog import Watchdog, describe

if TYPE_CHECKING:  # torch is imported where it is first needed, so that --check and --help stay quick
    from megatron_rl.parallel import ParallelGroups
    from megatron_rl.platform import Platform

logger = logging.getLogger("megatron_rl")

CONFIGURATION_ERROR = 2
RUN_ERROR = 1
NO_UPDATE = 3
INTERRUPTED = 130

SIGNS_OF_A_LOST_RANK = ("closed by peer", "reset by peer", "Broken pipe", "remote process exited")
"""In the words of gloo and NCCL."""
PATIENCE_WITH_RANK_0_S = 120.0
PATIENCE_WITH_RUN_DIRECTORY_S = 5.0


def main(argv: Sequence[str]) -> int:
    """Returns the exit code.

    0: finished or stopped on request; 1: failed; 2: wrong configuration; 3: finished without a single update;
    130: interrupted twice. torchrun ends with 1 whatever a rank's own code is, and names that in its report.
    """
    rank = int(os.environ.get("RANK", "0"))
    configure_logging(rank)
    world_size = _world_size(argv)
    config, problems = read_config(argv[1:], world_size)
    if config.training.estimate:
        return _report_estimate(config, problems, world_size) if rank == 0 else 0
    if config.training.check:
        return _report_check(config, [*problems, *preflight(config)] or size_problems(config, world_size))
    stop = StopRequest().install()  # before torch is imported, which takes seconds
    code = RUN_ERROR
    try:
        code = _run_or_tell(_Start(config, problems, argv, rank, stop))
    finally:
        stop.started()
        _announce_launcher(code, stop)
    return code


def _announce_launcher(code: int, stop: StopRequest) -> None:
    """torchrun writes some thirty lines about each exit code but 0, and about its own end by a signal."""
    if not by_torchrun() or os.environ["LOCAL_RANK"] != "0":
        return
    if code != 0:
        logger.info("what torchrun writes below is its own report of exit code %d; the reason is above", code)
    elif stop.reason:
        logger.info("torchrun, if it got %s as well, %s", stop.reason, TORCHRUN_AND_SIGNALS)


@dataclass(frozen=True)
class _Start:
    """What a rank begins with."""

    config: RLConfig
    problems: list[str]
    argv: Sequence[str]
    rank: int
    stop: StopRequest


def _run_or_tell(start: _Start) -> int:
    """The exit code; an error that was foreseen is told."""
    rank = start.rank
    try:
        return _run(start)
    except ConfigError as error:
        _tell(error.lines, rank)
        return CONFIGURATION_ERROR
    except MegatronRLError as error:
        logger.error("%s", error)
        return RUN_ERROR
    except RuntimeError as error:
        if not any(sign in str(error) for sign in SIGNS_OF_A_LOST_RANK):
            raise
        where = describe(traceback.extract_tb(error.__traceback__))
        logger.error("another rank has ended, see what it or the launcher says; noticed in %s", where)
        return RUN_ERROR
    except KeyboardInterrupt:
        logger.error("interrupted a second time: the steps since the last checkpoint are lost")
        return INTERRUPTED


def _world_size(argv: Sequence[str]) -> int:
    """The ranks of this launch, or those `--check` and `--estimate` ask about."""
    training = read_config(argv[1:], 1)[0].training
    asked = training.check_world_size if training.check or training.estimate else None
    return asked or int(os.environ.get("WORLD_SIZE", "1"))


def _report_estimate(config: RLConfig, problems: Sequence[Problem], world_size: int) -> int:
    try:
        if found := problems or quantization_problems(config):
            raise ConfigError(found)
        result = estimate(config, world_size, vocabulary(config))
    except ConfigError as error:
        _tell(error.lines, rank=0)
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


def _run(start: _Start) -> int:
    import torch

    from megatron_rl.parallel import initialize, shut_down
    from megatron_rl.parallel.collectives import broadcast_json
    from megatron_rl.platform import current_platform

    config, rank = start.config, start.rank
    platform = current_platform()
    if not platform.is_cuda and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    if start.problems or backend_problems(config):  # the process groups cannot even be built
        if rank != 0:
            _wait_for_rank_0(start.stop)
        raise ConfigError([*start.problems, *(preflight(config) if rank == 0 else [])])
    groups = initialize(config.parallel, platform)
    try:
        problems = (preflight(config) or size_problems(config, groups.world_size)) if groups.is_main else []
        found = broadcast_json([str(problem) for problem in problems], source=0)
        if found:
            if rank != 0:
                _wait_for_rank_0(start.stop)
            raise ConfigError(found)
        return _build_and_execute(start, platform, groups)
    finally:
        shut_down()


def _wait_for_rank_0(stop: StopRequest) -> None:
    """Until rank 0 has written what is wrong and ends, upon which the launcher asks the others to stop.

    torchrun ends all ranks, rank 0 amid its checks, as soon as the first one exits.
    """
    deadline = time.monotonic() + PATIENCE_WITH_RANK_0_S
    while not stop.requested and time.monotonic() < deadline:
        time.sleep(0.05)


def _build_and_execute(start: _Start, platform: Platform, groups: ParallelGroups) -> int:
    from megatron_rl import evaluate, loop, supervised
    from megatron_rl.run.base import open_run
    from megatron_rl.run.summary import summarise

    config = start.config
    program = loop if config.training.perform_rl_step else supervised
    if config.training.eval_only:
        program = evaluate
    if groups.is_main:
        for note in notes(config):
            logger.info("note: %s", note)
        for name, value in difference_from_defaults(config).items():
            logger.info("  %s = %s", name, value)
    tokenizer = open_tokenizer(config)
    try:
        with open_run(config, platform, groups, tokenizer, start.stop, typed_command(start.argv)) as base:
            run = program.build(base)
            start.stop.started()
            with _watchdog(start, groups).watching():
                status = program.execute(run)
            run.reporter.finish(status, summarise(run, run.phases.quantization, status))
    except BaseException as error:
        if groups.is_main:
            _mark_as_failed(Path(config.logging.run_dir), str(error) or type(error).__name__)
        raise
    if groups.is_main:
        logger.info("%s: %s", status, config.logging.run_dir)
    if status == "finished" and not config.training.eval_only and run.progress.updates == 0:
        if groups.is_main:
            logger.error("finished without a single update: the weights are those the run started from")
        return NO_UPDATE
    return 0


def _watchdog(start: _Start, groups: ParallelGroups) -> Watchdog:
    """Ends this rank when its main thread does not go on; the launcher then ends the others."""

    def end(what: str) -> None:
        # The run directory may be what the main thread waits for.
        threading.Timer(PATIENCE_WITH_RUN_DIRECTORY_S, os._exit, (RUN_ERROR,)).start()
        if groups.is_main:
            _mark_as_failed(Path(start.config.logging.run_dir), what)
        _announce_launcher(RUN_ERROR, start.stop)
        os._exit(RUN_ERROR)

    limit_s = 60.0 * start.config.parallel.distributed_timeout_minutes
    return Watchdog(limit_s, lambda: start.stop.looks, end)


def _mark_as_failed(run_dir: Path, error: str) -> None:
    """Whatever ended the run, its record says so; where the disk is full, the message on the screen has to do."""
    with contextlib.suppress(OSError):
        run_dir.mkdir(parents=True, exist_ok=True)
        RunDirectory(run_dir).set_status("failed", error=error)
