"""parse -> check -> initialise -> build -> run."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl.callbacks import Callback
from megatron_rl.config.arguments import read_config
from megatron_rl.config.rl_config import RLConfig, typed_settings
from megatron_rl.config.rules import notes, teacher_layout_problems
from megatron_rl.environments.child import die_with_parent
from megatron_rl.errors import ConfigError, MegatronRLError, Problem, problem_lines
from megatron_rl.families import model_directory
from megatron_rl.metrics.logging import configure_logging
from megatron_rl.metrics.rundir import RunDirectory, typed_command
from megatron_rl.run.gpu_defaults import bin_size, gpu_lines
from megatron_rl.run.memory.estimate import estimate, report_text, size_problems
from megatron_rl.run.preflight import preflight
from megatron_rl.run.preflight.inputs import open_tokenizer, vocabulary
from megatron_rl.run.preflight.machine import (
    backend_problems,
    determinism_lines,
    is_for_other_machines,
    lock,
    recipe_problems,
    transformer_engine_problems,
)
from megatron_rl.signals import TORCHRUN_AND_SIGNALS, StopRequest, by_torchrun
from megatron_rl.watchdog import Watchdog, describe

if TYPE_CHECKING:  # torch is imported where it is first needed, so that --check and --help stay quick
    from megatron_rl.platform import Platform
    from megatron_rl.platform.groups import ParallelGroups

logger = logging.getLogger("megatron_rl")

CONFIGURATION_ERROR = 2
RUN_ERROR = 1
NO_UPDATE = 3
INTERRUPTED = 130

SIGNS_OF_A_LOST_RANK = ("closed by peer", "reset by peer", "Broken pipe", "remote process exited")
"""In the words of gloo and NCCL."""
DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SETTINGS_WIDTH, SETTINGS_LINES = 110, 5
PATIENCE_WITH_RANK_0_S = 120.0
PATIENCE_WITH_RUN_DIRECTORY_S = 5.0


def main(
    argv: Sequence[str], command: Sequence[str] | None = None, check_world_size: int | None = None,
    is_checked: bool = False, callbacks: Sequence[Callback] = (), stop: StopRequest | None = None,
) -> int:  # fmt: skip
    """Returns the exit code.

    ``command``: the words that start this again, where they are not what Python and the launcher know;
    ``check_world_size``: ranks that --check and --estimate look at, if not those of this launch;
    ``is_checked``: a moment ago `every_problem` found none on this machine;
    ``callbacks``: of a job of one process, besides those of `--callbacks`;
    ``stop``: what the caller asks to stop with, who also catches signals.

    0: finished or stopped on request; 1: failed; 2: wrong configuration; 3: finished without a single update;
    130: interrupted twice. torchrun ends with 1 whatever a rank's own code is, and names that in its report.
    """
    if by_torchrun():
        die_with_parent(os.getppid())
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    configure_logging(rank)
    config, problems = read_config(argv[1:], world_size)
    if config.training.check or config.training.estimate:
        world_size = config.training.check_world_size or check_world_size or world_size
        config, problems = read_config(argv[1:], world_size)
        return _print_answer(config, problems, world_size) if rank == 0 else 0
    stop = stop or StopRequest().install()  # before torch is imported, which takes seconds
    code = RUN_ERROR
    gc.disable()  # imports make half a million objects and no garbage; looking for it takes half a second
    try:
        code = _run(config, problems, command or typed_command(argv), stop, is_checked, callbacks)
    except ConfigError as error:
        code = refuse(error.problems, rank)
    except MegatronRLError as error:
        logger.error("%s", error)
    except RuntimeError as error:
        if not any(sign in str(error) for sign in SIGNS_OF_A_LOST_RANK):
            raise
        where = describe(traceback.extract_tb(error.__traceback__))
        logger.error("another rank has ended, see what it or the launcher says; noticed in %s", where)
    except OSError as error:
        if error.errno not in DISK_IS_FULL:
            raise
        logger.error("%s; free space there, then --resume goes on from the newest checkpoint", error)
    except KeyboardInterrupt:
        logger.error("interrupted a second time: the steps since the last checkpoint are lost")
        code = INTERRUPTED
    finally:
        _collect_garbage_again()
        stop.started()
        _announce_launcher(code, stop)
    return code


def _collect_garbage_again() -> None:
    """After a refusal: process groups in its garbage go now, not in another thread at the exit, which would abort."""
    if not gc.isenabled():
        gc.collect()
        gc.enable()


def _announce_launcher(code: int, stop: StopRequest) -> None:
    """torchrun writes some thirty lines about each exit code but 0, and about its own end by a signal."""
    if not by_torchrun() or os.environ["LOCAL_RANK"] != "0":
        return
    if code != 0:
        logger.info("what torchrun writes below is its own report of exit code %d; the reason is above", code)
    elif stop.reason:
        logger.info("torchrun, if it got %s as well, %s", stop.reason, TORCHRUN_AND_SIGNALS)


def _print_answer(config: RLConfig, problems: Sequence[Problem], world_size: int) -> int:
    """Print what `--estimate` or `--check` asks for; returns the exit code."""
    try:
        if config.training.estimate:
            if found := problems or [*recipe_problems(config), *teacher_layout_problems(config)]:
                raise ConfigError(found)
            text = report_text(config, estimate(config, world_size, vocabulary(config)))
        else:
            elsewhere = transformer_engine_problems(config) if is_for_other_machines(config) else ()
            lines = *notes(config), *determinism_lines(config, kept=True), *elsewhere
            sys.stdout.writelines(f"note: {note}\n" for note in lines)
            if found := every_problem(config, problems, world_size):
                raise ConfigError(found)
            text = "\n".join([*_on_gpu(config, world_size), "configuration is valid"])
    except ConfigError as error:
        return refuse(error.problems)
    sys.stdout.write(text + "\n")
    return 0


def _on_gpu(config: RLConfig, world_size: int) -> Iterator[str]:
    import torch  # and not our platform with megatron-core, which a check on a CPU need not wait for

    if torch.cuda.is_available() and not is_for_other_machines(config):
        memory = torch.cuda.get_device_properties(0).total_memory
        yield from gpu_lines(config, bin_size(config, world_size, vocabulary(config), memory))


def every_problem(config: RLConfig, problems: Sequence[Problem], world_size: int) -> list[Problem]:
    """Report ``problems`` of the flags, and what else can be found before a model is built.

    A misspelt flag is reported alone: without its value the checks of files would take seconds and find false problems.
    """
    if any(each.is_unknown for each in problems):
        return [*problems]
    return [*problems, *preflight(config)] or size_problems(config, world_size)


def refuse(problems: Sequence[Problem], rank: int = 0, alone: bool = False) -> int:
    """Refuse a run with problems: all ranks find them and rank 0 names them; one that is ``alone`` does so itself."""
    if rank == 0 or alone:
        where = f", on rank {rank} ({socket.gethostname()}) alone" if alone else ""
        if any(each.is_unknown for each in problems):
            where += " (files and names are looked at once every flag is known)"
        sys.stderr.write(f"{len(problems)} problem(s) in the configuration{where}:\n")
        sys.stderr.writelines(f"  {line}\n" for line in problem_lines(problems))
        sys.stderr.flush()
    return CONFIGURATION_ERROR


def _run(
    config: RLConfig, problems: Sequence[Problem], command: Sequence[str], stop: StopRequest, is_checked: bool,
    callbacks: Sequence[Callback],
) -> int:  # fmt: skip
    rank = int(os.environ.get("RANK", "0"))
    if found := problems or backend_problems(config):  # the process groups cannot even be built
        if rank != 0:
            _wait_for_rank_0(stop)
            return refuse(found, rank, alone=not stop.requested)  # nobody stops the others: rank 0 finds nothing wrong
        raise ConfigError(every_problem(config, problems, int(os.environ.get("WORLD_SIZE", "1"))))
    import torch

    from megatron_rl.checkpoint.layout import convert_ahead
    from megatron_rl.platform import current_platform
    from megatron_rl.platform.collectives import broadcast_json
    from megatron_rl.platform.groups import initialize, shut_down

    platform = current_platform()
    if not platform.is_cuda and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        for name in (config.checkpoint.load_hf, config.teacher.rl_teacher_load_hf, config.critic.rl_critic_load_hf):
            if name is not None:  # before the process groups: their timeout may be shorter than a download
                model_directory(name, weights=True)
        convert_ahead(config.checkpoint.load, config.checkpoint.pretrained_checkpoint)
    except ConfigError as error:  # a full disk or a lost connection is of one machine
        return refuse(error.problems, rank, alone=rank != 0)
    groups = initialize(config.parallel, platform, config.kernels)
    try:
        with contextlib.ExitStack() as held:
            looks = groups.is_main and not is_checked
            found = every_problem(config, (), groups.world_size) if looks else []
            if groups.is_main and not found:
                found = lock(config, held)
            if found:  # written before the other ranks hear of it: torchrun ends them all as soon as one has ended
                refuse(found)
            if broadcast_json(bool(found), source=0):
                return CONFIGURATION_ERROR
            return _build_and_execute(config, platform, groups, command, stop, callbacks)
    finally:
        shut_down()


def _wait_for_rank_0(stop: StopRequest) -> None:
    """Until rank 0 has written what is wrong and ends, upon which the launcher asks the others to stop.

    torchrun ends all ranks, rank 0 amid its checks, as soon as the first one exits.
    """
    deadline = time.monotonic() + PATIENCE_WITH_RANK_0_S
    while not stop.requested and time.monotonic() < deadline:
        time.sleep(0.05)


def _build_and_execute(
    config: RLConfig, platform: Platform, groups: ParallelGroups, command: Sequence[str], stop: StopRequest,
    callbacks: Sequence[Callback],
) -> int:  # fmt: skip
    from megatron_rl import evaluation, loop, supervised
    from megatron_rl.platform.collectives import broadcast_json
    from megatron_rl.run.base import open_run

    program = loop if config.training.perform_rl_step else supervised
    if config.training.eval_only:
        program = evaluation
    for note in (*notes(config), *determinism_lines(config, kept=True)):
        logger.info("note: %s", note)
    _log_settings(config)
    tokenizer = open_tokenizer(config)
    if platform.is_cuda:
        size = groups.is_main and bin_size(config, groups.world_size, tokenizer.vocab_size, platform.memory)
        config = config.with_values(rl_sequence_packing_bin_size=broadcast_json(size, source=0))
        for line in gpu_lines(config, config.training.rl_sequence_packing_bin_size):
            logger.info("%s", line)
    gc.enable()
    try:
        with open_run(config, platform, groups, tokenizer, stop, command, callbacks) as base:
            run = program.build(base)
            stop.started()
            with _watchdog(config, groups, stop).watching():
                status = program.execute(run)
            if groups.is_main:
                run.reporter.finish(run.summary(status))
    except BaseException as error:
        _mark_as_failed(config, groups, str(error) or type(error).__name__)
        raise
    logger.info("%s: %s", status, config.logging.run_dir)
    if status == "finished" and not config.training.eval_only and run.progress.updates == 0:
        if groups.is_main:
            logger.error("finished without a single update: usually no reward variance; read answers in report.html")
        return NO_UPDATE
    return 0


def _log_settings(config: RLConfig) -> None:
    """What the user set, in a few lines; the run directory has all of it, and what follows from it."""
    lines = [""]
    for setting in typed_settings(config):
        if len(lines[-1]) + len(setting) > SETTINGS_WIDTH:
            lines.append("")
        lines[-1] += f" {setting}"
    if len(lines) > SETTINGS_LINES:
        lines[SETTINGS_LINES:] = [" ..."]
    where = Path(config.logging.run_dir) / "config.diff.yaml"
    logger.info("settings (all that differ from the defaults: %s)\n%s", where, "\n".join(f" {line}" for line in lines))


def _watchdog(config: RLConfig, groups: ParallelGroups, stop: StopRequest) -> Watchdog:
    """Ends this rank when its main thread does not go on; the launcher then ends the others."""

    def end(what: str) -> None:
        # The run directory may be what the main thread waits for.
        threading.Timer(PATIENCE_WITH_RUN_DIRECTORY_S, os._exit, (RUN_ERROR,)).start()
        _mark_as_failed(config, groups, what)
        _announce_launcher(RUN_ERROR, stop)
        os._exit(RUN_ERROR)

    return Watchdog(60.0 * config.parallel.distributed_timeout_minutes, lambda: stop.looks, end)


def _mark_as_failed(config: RLConfig, groups: ParallelGroups, error: str) -> None:
    """Whatever ended the run, its record says so; where the disk is full, the message on the screen has to do."""
    from megatron_rl.run.reporting import start_report

    if groups.is_main:
        directory = RunDirectory(Path(config.logging.run_dir))
        with contextlib.suppress(OSError):
            directory.path.mkdir(parents=True, exist_ok=True)
            directory.set_status("failed", error=error)
            start_report(directory.path)
