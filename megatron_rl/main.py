"""parse -> check -> initialise -> build -> run."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.config import RLConfig, difference_from_defaults, notes, read_config
from megatron_rl.errors import ConfigError, MegatronRLError
from megatron_rl.metrics.logging import configure_logging
from megatron_rl.metrics.rundir import RunDirectory
from megatron_rl.preflight import preflight

logger = logging.getLogger("megatron_rl")

CONFIGURATION_ERROR = 2
RUN_ERROR = 1


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 finished or stopped on request, 1 failed, 2 wrong configuration."""
    rank = int(os.environ.get("RANK", "0"))
    configure_logging(rank)
    config, problems = read_config(argv[1:], _world_size(argv))
    if config.training.check:
        return _report_check(config, [*problems, *preflight(config)])
    try:
        return _run(config, problems, argv, rank)
    except ConfigError as error:
        _tell(error.problems, rank)
        return CONFIGURATION_ERROR
    except MegatronRLError as error:
        logger.error("%s", error)
        return RUN_ERROR


def _world_size(argv: Sequence[str]) -> int:
    """The ranks of this launch, or those `--check` asks about."""
    config, _ = read_config(argv[1:], 1)
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    return config.training.check_world_size or launched if config.training.check else launched


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
        sys.stderr.writelines(f"  {problem}\n" for problem in problems)
        sys.stderr.flush()


def _run(config: RLConfig, problems: list[str], argv: Sequence[str], rank: int) -> int:
    # torch and megatron are imported here, so that --check and --help stay quick
    import torch

    from megatron_rl.parallel import initialize, shut_down
    from megatron_rl.parallel.collectives import broadcast_json
    from megatron_rl.platform import StopRequest, current_platform

    stop = StopRequest().install()
    platform = current_platform()
    if not platform.is_cuda and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    if problems:  # rules about sizes: without them the process groups cannot even be built
        raise ConfigError([*problems, *(preflight(config) if rank == 0 else [])])
    groups = initialize(config.parallel, platform)
    try:
        found = preflight(config) if groups.is_main else []
        found = broadcast_json(found, source=0)
        if found:
            raise ConfigError(found)
        return _build_and_train(_Launch(config, platform, groups, stop, argv))
    finally:
        shut_down()


@dataclass(frozen=True)
class _Launch:
    config: RLConfig
    platform: object
    groups: object
    stop: object
    argv: Sequence[str]


def _build_and_train(launch: _Launch) -> int:
    from pathlib import Path

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
    except (MegatronRLError, KeyboardInterrupt) as error:
        if groups.is_main:
            RunDirectory(Path(config.logging.run_dir)).set_status("failed", error=str(error))
        raise
    if groups.is_main:
        logger.info("%s: %s", status, config.logging.run_dir)
    return 0
