"""Text from a model without a run: what `megatron-rl chat`, `generate`, `serve` and `megatron_rl.generate` stand on.

The engine is that of the rollouts, on one rank or on those of a job. All ranks make the same calls.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatron_rl.checkpoint.manager import CheckpointManager
from megatron_rl.config.rl_config import RLConfig
from megatron_rl.endpoint.calls import Call, Endpoint, failing_alone, outside_sessions, request_of
from megatron_rl.errors import ConfigError, shorten
from megatron_rl.inference.engine import Engine
from megatron_rl.models.gpt import build_model
from megatron_rl.platform import current_platform
from megatron_rl.platform.collectives import any_rank, broadcast_json, collect_json
from megatron_rl.platform.groups import ParallelGroups, initialize, seed_everything, shut_down
from megatron_rl.quantization.rollout import RolloutQuantization
from megatron_rl.rollout.prompt_source import RequestFactory
from megatron_rl.run.generation import build_engine, calibration_requests, evaluation_factory
from megatron_rl.run.memory.phases import Phases
from megatron_rl.run.preflight.inputs import open_tokenizer
from megatron_rl.run.preflight.starts import reads_every_weight
from megatron_rl.run.weights import end_tokens_of, read_first_weights
from megatron_rl.tokenizer import Tokenizer
from megatron_rl.types import Hints, Message, Place, Prompt, Request, SourcedTask, Task

SOURCE = "generate"
"""Stands for the name of an environment where draws are seeded."""
_LOOK_FOR_STOP_S = 0.5


@dataclass(frozen=True)
class Answer:
    """The model's answer to a prompt."""

    text: str
    finish_reason: str
    """See `megatron_rl.types.FinishReason`."""
    num_tokens: int


@dataclass(frozen=True)
class Generator:
    """A model that is ready to answer, see `open_generator`."""

    engine: Engine
    tokenizer: Tokenizer
    factory: RequestFactory
    groups: ParallelGroups

    def answers(self, prompts: Sequence[Prompt]) -> list[Answer]:
        """Answer each prompt, in order; the copies of the model share the work. Empty on all ranks but the main one.

        Raises:
            ConfigError: a prompt is empty or too long.
        """
        requests = [self.request(prompt, self.tokenizer.encode_prompt(prompt), n) for n, prompt in enumerate(prompts)]
        for request in requests[self.groups.rollout_rank :: self.groups.rollout_size]:
            self.engine.submit(request)
        found: list[tuple[int, str, str | None, int]] = []
        while any_rank(self.engine.has_unfinished, self.groups.lockstep_group):
            for request, (completion,) in self.engine.step():
                ids = completion.token_ids
                found.append((request.index, self.tokenizer.decode(ids), completion.finish_reason, len(ids)))
        everything = collect_json(found, self.groups.rollout_group)
        rows = sorted(tuple(row) for part in everything or () for row in part)
        return [Answer(*row) for _, *row in rows] if self.groups.is_main else []

    def request(self, prompt: Prompt, ids: Sequence[int], number: int) -> Request:
        """Make a request of one answer to ``ids``, which are ``prompt`` or go on from it.

        Raises:
            ConfigError: there is nothing to answer, or no room for it.
        """
        if not 0 < len(ids) < self.factory.max_sequence_length:
            what = "; shorten it, or raise --seq-length" if ids else "; give it a word to go on from"
            raise ConfigError([
                f"prompt {number + 1}, {shorten(prompt)}, has {len(ids)} tokens, and --seq-length "
                f"{self.factory.max_sequence_length} is for prompt and answer{what}"
            ])
        return self.factory.request(SourcedTask(SOURCE, Task(str(number), prompt), prompt_ids=tuple(ids)), 1, number)


class Chat:
    """A conversation: token ids that only grow, so that each turn goes on from the KV cache of the one before."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._prompt: Prompt = ""
        self._ids: list[int] = []
        self._ended = True
        self._turns = 0

    def say(self, text: str, stop: Callable[[], bool]) -> Iterator[str]:
        """Add a message of the user; yields the answer as far as it is known, longer each time.

        ``stop`` is asked on every rank between steps of the engine: once a rank says yes, the answer ends there. What
        was said stays part of the conversation.

        Raises:
            ConfigError: the conversation has no room left.
        """
        tokenizer, engine = self._generator.tokenizer, self._generator.engine
        if self._turns == 0:
            self._prompt = as_prompt(tokenizer, text)
            ids = tokenizer.encode_prompt(self._prompt)
        else:
            message: Message = {"role": "user", "content": text}
            ids = self._ids + tokenizer.encode_reply(self._prompt, [message], self._ended)
        request = self._generator.request(self._prompt, ids, self._turns)
        engine.submit(replace(request, place=Place(turn=self._turns), hints=Hints(goes_on=True, streams=True)))
        said: tuple[int, ...] = ()
        while any_rank(engine.has_unfinished):
            if any_rank(stop()):
                said = next((each.so_far[0].token_ids for each in engine.interrupt() if each.so_far), said)
                self._ended = False
                break
            for _, (completion,) in engine.step():
                said, self._ended = completion.token_ids, completion.finish_reason == "stop"
            for _, ids_so_far in engine.unfinished_tokens(lambda _: True):
                said = ids_so_far
            yield tokenizer.decode(said)
        self._ids, self._turns = [*ids, *said], self._turns + 1
        yield tokenizer.decode(said)


def serve(generator: Generator, endpoint: Endpoint | None, stop: Callable[[], bool]) -> None:
    """Answer calls until ``stop`` says yes on the main rank. Collective over the job, one copy of the model::

        main rank   wait for calls ── take ──┐                                  ┌── deliver, show
        all ranks                            └─► broadcast ─► submit, cancel ─► step ─► ...

    ``endpoint``, on the main rank alone, was started.
    """
    engine, alone = generator.engine, generator.groups.model_group.size() == 1
    if endpoint is not None:
        endpoint.show(engine)
    while True:
        calls = None if endpoint is None else _news(endpoint, engine, stop)
        # Without a seed of the caller no two calls have the same.
        rows = [outside_sessions(call, secrets.token_hex(8)) for call in calls or ()]
        news = None if calls is None else (rows, endpoint.take_cancelled())
        news = news if alone else broadcast_json(news, source=0)
        if news is None:
            return
        rows, cancelled = news
        for row in rows:
            with failing_alone(endpoint, row["number"]):
                engine.submit(request_of(**row))
        engine.cancel(cancelled)
        answers = engine.step() if engine.has_unfinished else []
        if endpoint is not None:
            for answered, (completion,) in answers:
                endpoint.deliver(answered.place.call, completion)
            endpoint.show(engine)


def _news(endpoint: Endpoint, engine: Engine, stop: Callable[[], bool]) -> list[Call] | None:
    """The calls that have come, waited for where there is nothing else to do; None: it is time to stop."""
    while not stop():
        calls = endpoint.take()
        if calls or engine.has_unfinished:
            return calls
        endpoint.wait_blocking(_LOOK_FOR_STOP_S)
    return None


def as_prompt(tokenizer: Tokenizer, text: str) -> Prompt:
    """Return a user's message where the tokenizer knows how to write one, else the text itself."""
    return ({"role": "user", "content": text},) if tokenizer.has_chat_template() else text


@contextlib.contextmanager
def open_generator(config: RLConfig) -> Iterator[Generator]:
    """Load the weights that ``config`` names into an engine. Collective over the job.

    Raises:
        MegatronRLError: they cannot be read, or there is no room for them.
    """
    platform = current_platform()
    groups = initialize(config.parallel, platform, config.kernels)
    try:
        seed_everything(config.training.seed)
        tokenizer = open_tokenizer(config)
        policy = build_model(config, platform, tokenizer.vocab_size, is_filled_later=reads_every_weight(config))
        checkpoints = CheckpointManager(Path(config.checkpoint.save), 0, groups)
        origin = read_first_weights(config, policy, checkpoints, groups)
        tokenizer = tokenizer.ending_also_at(end_tokens_of(origin))
        settings = config.quantization
        quantization = RolloutQuantization(
            torch.nn.ModuleList(policy.chunks), settings.rl_rollout_quantization, settings.rl_quantization_skip,
            on_audit=lambda rows: None, lockstep_group=groups.lockstep_group,
        )  # fmt: skip
        phases = Phases(config, policy, groups, quantization)
        engine = build_engine(config, policy, tokenizer, groups, phases.cache_budget_gb())
        generator = Generator(engine, tokenizer, evaluation_factory(config, tokenizer), groups)
        phases.hold(engine, lambda: _for_calibration(generator))
        with phases.rollouts():
            engine.begin(config.training.seed, policy_version=0)
            yield generator
    finally:
        shut_down()


def _for_calibration(generator: Generator) -> list[Request]:
    prompt = as_prompt(generator.tokenizer, "What is 2 + 3?")
    ids = tuple(generator.tokenizer.encode_prompt(prompt))
    return calibration_requests(generator.factory, [SourcedTask(SOURCE, Task("calibration", prompt), prompt_ids=ids)])
