"""megatron-rl serve MODEL: answer OpenAI's clients.

    MODEL is a Hugging Face directory or name, a run directory, or a checkpoint. Ctrl-C ends it.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl.cli.model import USAGE_OF_FLAGS, ModelCommand, model_config
from megatron_rl.cli.options import described, take
from megatron_rl.config.flags import flag
from megatron_rl.config.rl_config import RLConfig
from megatron_rl.errors import ConfigError
from megatron_rl.run.memory.estimate import slot_bytes
from megatron_rl.user_files import read_text

if TYPE_CHECKING:
    from megatron_rl.endpoint.calls import Endpoint
    from megatron_rl.generation import Generator

AT_ONCE = 64
TOKEN = re.compile("[!-~]{16,}")
_OWN = ("--distributed-timeout-minutes", "100000", "--rl-decode-steps-per-sync", "4")
"""Nobody may ask for hours, and streams are shown as they are drawn."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """The address that the server listens on."""

    host: str = flag("127.0.0.1")
    """Address to listen on."""
    port: int = flag(8000, ge=0, le=65535)
    """Port to listen on; 0: any that is free."""
    allow_remote: bool = flag(False)
    """Permit a host that is not loopback: requests and the token cross the network as plain HTTP."""
    served_model_name: str | None = flag(None)
    """What clients call the model; without it MODEL's last part."""
    token_file: str | None = flag(None, path=True)
    """Has the token that clients send; written if it is not there. Without it a private file that is named at start."""


USAGE = f"""usage: megatron-rl serve MODEL [--port N] [--nproc RANKS] [FLAGS]

{__doc__}
{described(Place)}{USAGE_OF_FLAGS}"""


@dataclass(frozen=True)
class Job:
    """The options of `megatron-rl serve`."""

    config: RLConfig
    place: Place
    model_name: str


def _parse(words: Sequence[str], world_size: int) -> Job:
    place, rest = take(Place, words[1:])
    _check(place)
    config = model_config(words[0], [*_OWN, *rest], world_size, at_once=AT_ONCE)
    copies = config.rollout_replicas(world_size)
    if copies > 1:
        raise ConfigError([
            f"{world_size} ranks hold {copies} copies of the model, and serve has one; make them "
            "--tensor-model-parallel-size or --pipeline-model-parallel-size, or start one server for each copy"
        ])
    return Job(_with_cache(config), place, place.served_model_name or os.path.basename(os.path.realpath(words[0])))


def _with_cache(config: RLConfig) -> RLConfig:
    """With a bound of the KV cache unless the user gave one, or how many answers are decoded at once.

    `AT_ONCE` sequences of full length would be ten times a small model, and few are that long. As much as the weights
    is enough: at least 1 GiB, and two sequences of full length.
    """
    rollout = config.rollout
    flags = {"inference_dynamic_batching_buffer_size_gb", "rl_rollout_memory_fraction"}
    if flags & config.typed.keys() or rollout.inference_max_batch_size != AT_ONCE:
        return config
    numbers = sum(parameter.size for parameter in config.layout().parameters)
    size = max(2**30, numbers * (2 if config.precision.bf16 else 4), 2 * slot_bytes(config))
    return replace(config, rollout=replace(rollout, inference_dynamic_batching_buffer_size_gb=size / 2**30))


def _check(place: Place) -> None:
    """What would fail once the model is loaded.

    Raises:
        ConfigError: nobody may or can listen there, or the file has no token.
    """
    from megatron_rl.environments.server import refuse_remote
    from megatron_rl.run.preflight.machine import port_fault

    refuse_remote(place.host, place.allow_remote, "requests and the token would cross the network as plain HTTP")
    fault = port_fault(place.host, place.port)
    if fault is not None:
        raise ConfigError([f"--port {place.port} on {place.host} {fault}"])
    if place.token_file is not None:
        _known_token(Path(place.token_file))


def _known_token(file: Path) -> str | None:
    """The token in a file; None where there is no file.

    Raises:
        ConfigError: it cannot be one.
    """
    if not os.path.lexists(file):
        return None
    try:
        token = read_text(file).strip()
    except ValueError as error:
        raise ConfigError([f"--token-file {file} {error}; give a text file"]) from error
    if not TOKEN.fullmatch(token):
        raise ConfigError([f"--token-file {file} has no token: 16 letters, digits or signs at least, in one line"])
    return token


def _serve(job: Job) -> int:
    from megatron_rl.generation import open_generator, serve
    from megatron_rl.signals import StopRequest

    stop = StopRequest().install()
    with contextlib.suppress(KeyboardInterrupt):  # pressed again
        with open_generator(job.config) as generator, contextlib.ExitStack() as closing:
            stop.started()
            endpoint = closing.enter_context(_listening(job, generator)) if generator.groups.is_main else None
            serve(generator, endpoint, lambda: stop.requested)
    return 0


@contextlib.contextmanager
def _listening(job: Job, generator: Generator) -> Iterator[Endpoint]:
    from megatron_rl.endpoint.calls import Endpoint
    from megatron_rl.run.generation import why_fixed, why_unscored

    factory, place = generator.factory, job.place
    with _token(place.token_file) as (token, file):
        endpoint = Endpoint(
            generator.tokenizer, max_sequence_length=factory.max_sequence_length,
            max_new_tokens=factory.sampling.max_new_tokens, sampling=factory.sampling, model=job.model_name,
            host=place.host, port=place.port, token=token, fixed=why_fixed(job.config),
            unscored=why_unscored(job.config), reasoning=job.config.tokenizer.rl_reasoning_parser,
        )  # fmt: skip
        try:
            endpoint.start()
            sys.stdout.write(f"{job.model_name} at {endpoint.base_url()}\nthe API key is in {file}\n")
            sys.stdout.flush()
            yield endpoint
        finally:
            endpoint.close()


@contextlib.contextmanager
def _token(path: str | None) -> Iterator[tuple[str, Path]]:
    """The token and the file that has it."""
    from megatron_rl.environments.wire import write_private

    with tempfile.TemporaryDirectory(prefix="megatron_rl_serve_") as folder:
        file = Path(path or f"{folder}/token")
        token = _known_token(file)
        if token is None:
            token = secrets.token_urlsafe(32)
            try:
                write_private(file, token)
            except OSError as error:
                raise ConfigError([f"--token-file {file} cannot be written: {error.strerror}"]) from error
        yield token, file


COMMAND = ModelCommand("serve", USAGE, _parse, _serve)
main, rank = COMMAND.main, COMMAND.rank
