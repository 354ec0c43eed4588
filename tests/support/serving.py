"""A tiny model of random weights behind an endpoint, served in a thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from megatron_rl.endpoint.calls import Endpoint
from megatron_rl.generation import Generator, serve
from megatron_rl.inference.rollout_engine import RolloutEngine
from megatron_rl.models.gpt import build_model, rollout_mode
from megatron_rl.platform import current_platform
from megatron_rl.platform.groups import current_groups
from megatron_rl.run.generation import build_engine, evaluation_factory
from megatron_rl.tokenizer import Tokenizer
from tests.support.endpoint import listening
from tests.support.tiny import tiny_config


@contextlib.contextmanager
def served(tokenizer: Tokenizer) -> Iterator[tuple[Endpoint, RolloutEngine]]:
    """The process groups must be initialised."""
    config = tiny_config(seq_length=200)
    groups, policy = current_groups(), build_model(config, current_platform(), tokenizer.vocab_size)
    engine = build_engine(config, policy, tokenizer, groups)
    generator = Generator(engine, tokenizer, evaluation_factory(config, tokenizer), groups)
    ends = threading.Event()

    def work(endpoint: Endpoint) -> None:
        with rollout_mode(policy):
            engine.begin(1, 0)
            serve(generator, endpoint, ends.is_set)

    with listening(tokenizer) as endpoint, ThreadPoolExecutor(1) as pool:
        working = pool.submit(work, endpoint)
        working.add_done_callback(lambda _: endpoint.close())  # who waits is told
        try:
            yield endpoint, engine
        finally:
            ends.set()
            working.result()
