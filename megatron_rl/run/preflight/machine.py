"""What a run needs of the machine: places that it alone writes to, ports, accounts and devices."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import logging
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from megatron_rl.config.rl_config import RLConfig
from megatron_rl.errors import Problem, collecting, one_line
from megatron_rl.metrics.rundir import check_usable, unwritable
from megatron_rl.metrics.writers import Mode, knows_wandb, wandb_mode
from megatron_rl.quantization.shapes import layer_problems, storage_of
from megatron_rl.registry import RECIPES
from megatron_rl.run.preflight.starts import resumes

LOCK = ".lock"
"""In a run directory and in a directory of checkpoints."""
_ASKED = ("attention_backend", "rl_kv_cache_dtype", "inference_dynamic_batching_block_size", "rl_kv_overcommit")

logger = logging.getLogger(__name__)


FILES = 256
"""Sockets, pipes and files that a rank opens at once: 110 in a small run, more with harnesses."""


def output_problems(config: RLConfig) -> Iterator[Problem]:
    """Report a run directory that cannot be made or is taken, and other directories that cannot be written."""
    if config.logging.run_dir is None:
        return  # already reported as a missing flag
    run_dir, save = Path(config.logging.run_dir), Path(config.checkpoint.save)
    unusable = check_usable(run_dir, resume=resumes(config))
    yield from (Problem("--run-dir", line) for line in unusable)
    if not unusable and not resumes(config) and save != run_dir / "checkpoints":
        from megatron_rl.checkpoint.layout import list_checkpoints

        if list_checkpoints(save):
            yield config.problem(
                "save",
                "already holds checkpoints, which this run would overwrite; continue them with --resume or choose "
                "another directory",
            )
    others = [("save", str(save)), ("tensorboard_dir", config.logging.tensorboard_dir)]
    if config.logging.wandb_project is not None:
        others.append(("wandb_save_dir", config.logging.wandb_save_dir))
    for name, directory in others:
        fault = None if Path(directory).is_relative_to(run_dir) else unwritable(Path(directory))
        if fault is not None:
            yield config.problem(name, f": {fault}")


def lock(config: RLConfig, held: contextlib.ExitStack) -> list[Problem]:
    """Keep other starts out of what this one writes to until ``held`` is closed; a line where another has it.

    One rank calls it. The lock is the kernel's and is gone with the process, however that ends. It is of the process
    (`lockf`) and not of the open file (`flock`), which a fork that still writes a checkpoint would keep. So nothing
    else in this process may open the file: to close it anywhere gives the lock up.
    """
    places = {"run_dir": config.logging.run_dir, "save": config.checkpoint.save}
    if config.training.eval_only:
        del places["save"]  # a training command's, which is only read
    for name, directory in places.items():
        path = Path(directory) / LOCK
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = held.enter_context(path.open("ab+", buffering=0))
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        except BlockingIOError:
            file.seek(0)
            holder = one_line(file.read(500).decode(errors="replace")) or "another process"
            text = f"is in use by {holder}; wait until that run has ended, stop it, or choose another directory"
            return [config.problem(name, text)]
        except OSError as error:  # a network file system without locks, a full disk
            logger.warning("%s is not locked (%s): see to it that no other run writes there", directory, error.strerror)
    return []


def service_problems(config: RLConfig) -> Iterator[Problem]:
    """Report faults of communication, ports and accounts; those of other machines cannot be asked."""
    yield from backend_problems(config)
    if is_for_other_machines(config):
        return
    for name in ("rl_environment_port", "rl_endpoint_port"):
        fault = port_fault("127.0.0.1", getattr(config.environment, name))
        if fault is not None:
            yield config.problem(name, fault)
    mode = wandb_mode(config.logging.wandb_mode)
    if config.logging.wandb_project is None:
        return
    if mode not in get_args(Mode):
        text = f"WANDB_MODE={mode} is not {', '.join(get_args(Mode))}; set one of them, or give --wandb-mode"
        yield Problem("--wandb-mode", text)
    elif mode == "online" and not knows_wandb():
        yield Problem(
            "--wandb-mode",
            "--wandb-mode or WANDB_MODE online needs an API key and there is none; set WANDB_API_KEY, run 'wandb "
            "login', or use --wandb-mode offline",
        )


def port_fault(host: str, port: int) -> str | None:
    """Return why nobody can listen there now; None if one can."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return f"cannot be used ({error.strerror}); choose another one, or 0 for any free port"
    return None


def backend_problems(config: RLConfig) -> list[Problem]:
    """Report a communication library that this machine cannot use, and too few files that it may open."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < FILES and not is_for_other_machines(config):
        return [Problem(None, f"this process may open {files} files, and a run needs {FILES}; run ulimit -n {FILES}")]
    if config.parallel.distributed_backend != "nccl" or is_for_other_machines(config):
        return []
    from megatron_rl.platform import current_platform  # brings torch, which most checks need not wait for

    text = ", and there is no CUDA device here; use auto, which is gloo on the CPU"
    return [] if current_platform().is_cuda else [config.problem("distributed_backend", text)]


def is_for_other_machines(config: RLConfig) -> bool:
    """Return whether --check-world-size is set: the run's devices cannot be asked then."""
    return config.training.check and config.training.check_world_size is not None


def quantization_problems(config: RLConfig) -> list[Problem]:
    """Report recipes, a device and layers' shapes that would fail once the model is built."""
    elsewhere, name = is_for_other_machines(config), config.quantization.rl_rollout_quantization
    problems = [] if elsewhere else transformer_engine_problems(config)
    if name == "none":
        return problems
    with collecting(problems, "--rl-rollout-quantization"):
        storage_of(name)  # says what is wrong with one that is given by its path
        recipe = RECIPES.get(name)
        from megatron_rl.platform import current_platform  # brings torch, which wrong names need not wait for

        unsupported = None if elsewhere else recipe.device_problem(current_platform().compute_capability)
        if unsupported is not None:
            problems.append(config.problem("rl_rollout_quantization", f": {unsupported}"))
        if config.has_shape:
            problems += layer_problems(config, recipe.shape_problem)
    return problems


def graph_problems(config: RLConfig) -> list[Problem]:
    """Report a driver that cannot give memory back at the addresses that graphs read."""
    if not config.kernels.keeps_graphs or is_for_other_machines(config):
        return []
    from megatron_rl.platform import current_platform
    from megatron_rl.platform.reserved import CudaDriver

    platform = current_platform()
    if not platform.is_cuda or CudaDriver(platform.device).can_reserve:
        return []
    text = "cannot be had: this GPU has no virtual memory management; leave it out (graphs are captured in every step)"
    return [config.problem("rl_persist_cuda_graphs", text)]


def determinism_lines(config: RLConfig, kept: bool) -> Iterator[str]:
    """Report environment variables that contradict a deterministic mode.

    NCCL's are ``kept``, with a note; cuBLAS's and Transformer Engine's would make the run fail.
    """
    if not config.kernels.is_deterministic or is_for_other_machines(config):
        return
    from megatron_rl.platform import cuda, current_platform

    mode = "--batch-invariant-mode" if config.kernels.batch_invariant_mode else "--deterministic-mode"
    if not current_platform().is_cuda:
        yield from [f"{mode} changes nothing on a CPU, where runs repeat their bits anyway"] if kept else []
        return
    for name, wanted in cuda.environment_for(config.kernels.batch_invariant_mode).items():
        own = os.environ.get(name, wanted)
        if own not in (wanted, ":16:8") and name.startswith("NCCL_") is kept:  # cuBLAS is deterministic with that too
            then = "and is kept: sums over GPUs may not repeat their bits" if kept else "with which it fails; unset it"
            yield f"{mode} sets {name}={wanted}, where it is {own or 'empty'}, {then}"


def transformer_engine_problems(config: RLConfig) -> list[Problem]:
    """Report that it is asked for and not installed; in a check for other machines as a note."""
    asked = config.typed.get("transformer_impl") == "transformer_engine"
    if not asked or importlib.util.find_spec("transformer_engine") is not None:
        return []
    text = (
        ", but Transformer Engine is not installed here; install it with pip install 'megatron-rl[te]' (GPU machines "
        "only), or use --transformer-impl local"
    )
    return [config.problem("transformer_impl", text)]


def recipe_problems(config: RLConfig) -> list[Problem]:
    """Check names and shapes, which an estimate needs."""
    name = config.quantization.rl_rollout_quantization
    if ":" not in name and name.replace("-", "_") not in RECIPES.names():
        text = f": there is no such recipe; use one of {', '.join(RECIPES.names())}"
        return [config.problem("rl_rollout_quantization", text)]
    storage = storage_of(name)
    return [] if storage is None or not config.has_shape else layer_problems(config, storage.shape_problem)


def attention_problems(config: RLConfig) -> list[Problem]:
    """Report a backend that the device lacks or that does not take the model's numbers, or for its pages.

    What is chosen automatically always runs.
    """
    problems: list[Problem] = []
    asked = any(name in config.typed for name in _ASKED)
    if not asked or not config.has_shape or is_for_other_machines(config):
        return problems
    from megatron_rl.models.attention.selection import attention_of
    from megatron_rl.platform import current_platform

    rollout = config.rollout
    with collecting(problems):
        attention = attention_of(config, current_platform())
        problems += attention.block_problems(rollout.inference_dynamic_batching_block_size, rollout.rl_kv_overcommit)
    return problems
