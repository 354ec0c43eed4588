"""Conversations per CPU second: every turn prefilled from the beginning, or going on from the KV cache.

    python -m tools.benchmark.conversations --shape 128x4 --turns 6

One process, one thread, the same weights and replies, the contenders in turns. The end token is disabled, so every
turn runs to its limit; replies are random tokens.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from megatron_rl.errors import MegatronRLError
from megatron_rl.inference import Engine, RolloutEngine
from megatron_rl.inference.options import EngineOptions
from megatron_rl.metrics.table import format_table
from megatron_rl.models import PolicyModel, build_model, rollout_mode
from megatron_rl.parallel import initialize, seed_everything, shut_down
from megatron_rl.platform import current_platform
from megatron_rl.types import GeneratedGroup, GenerationRequest, SamplingParams, SourcedTask, Task
from tools.benchmark.common import (
    Shape,
    benchmark_config,
    compete,
    prepare,
    provenance,
    random_prompts,
    summarise,
    write_record,
)

CONTENDERS = {"reuse": True, "anew": False}


def first_turns(arguments: argparse.Namespace) -> list[GenerationRequest]:
    """A request a group; each of its samples is a conversation."""
    prompts = random_prompts(arguments.batch // arguments.group, arguments.prompt_tokens, arguments.vocab, 1)
    sampling = SamplingParams(max_new_tokens=arguments.new_tokens)
    sources = [SourcedTask("benchmark", Task(str(index), "")) for index in range(len(prompts))]
    return [
        GenerationRequest(source, prompt, arguments.group, sampling, index, goes_on=True)
        for index, (source, prompt) in enumerate(zip(sources, prompts, strict=True))
    ]


def next_turns(group: GeneratedGroup, arguments: argparse.Namespace) -> list[GenerationRequest]:
    """What the samples of a group are asked next, as `Conversations` asks it."""
    request = group.request
    turn = request.turn + 1
    if turn == arguments.turns:
        return []
    found = []
    for sample, said in enumerate(group.completions, start=request.first_sample):
        draw = random.Random(f"{request.index} {sample} {turn}")
        reply = tuple(draw.randrange(arguments.vocab) for _ in range(arguments.reply_tokens))
        prompt = request.prompt_ids + said.token_ids + reply
        found.append(replace(request, prompt_ids=prompt, num_samples=1, first_sample=sample, turn=turn))
    return found


def converse(engine: Engine, policy: PolicyModel, arguments: argparse.Namespace, seed: int) -> int:
    """Lead all conversations to their end; the tokens that were written."""
    with rollout_mode(policy):
        engine.begin(seed, policy_version=0)
        for request in first_turns(arguments):
            engine.submit(request)
        while engine.has_unfinished:
            for group in engine.step():
                for turn in next_turns(group, arguments):
                    engine.submit(turn)
    written = arguments.batch * arguments.turns * arguments.new_tokens
    if engine.statistics.generated_tokens != written:
        raise MegatronRLError("the engine did not generate what was asked for: its speed means nothing")
    return written


def run(arguments: argparse.Namespace) -> dict[str, object]:
    """Build, measure, count."""
    prepare()
    turn = arguments.new_tokens + arguments.reply_tokens
    length = arguments.prompt_tokens + arguments.turns * turn
    config = benchmark_config(arguments.shape, length, f"--attention-backend={arguments.attention_backend}")
    platform = current_platform()
    initialize(config.parallel, platform)
    try:
        seed_everything(1)
        policy = build_model(config, platform, arguments.vocab)
        sizes = {name: _options(arguments, length, reuse) for name, reuse in CONTENDERS.items()}
        engines = {name: RolloutEngine(policy, options, [], str) for name, options in sizes.items()}

        def timed(name: str) -> Callable[[int], int]:
            return lambda seed: converse(engines[name], policy, arguments, seed)

        rounds = compete({name: timed(name) for name in CONTENDERS}, arguments.rounds)
        counts = {name: asdict(engine.statistics) for name, engine in engines.items()}
    finally:
        shut_down()
    settings = {name: value for name, value in vars(arguments).items() if name not in ("json", "shape")}
    return {
        **summarise(rounds, "reuse"),
        "statistics": counts,
        "settings": {"shape": asdict(arguments.shape), **settings},
        **provenance("conversations"),
    }


def _options(arguments: argparse.Namespace, length: int, reuse: bool) -> EngineOptions:
    return EngineOptions(arguments.batch, length, page_length=arguments.page_length, reuse_prefixes=reuse)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.benchmark.conversations")
    parser.add_argument("--shape", type=Shape.parse, required=True, help="hidden size x layers: 64x3")
    parser.add_argument("--batch", type=int, default=16, help="conversations at once")
    parser.add_argument("--group", type=int, default=8, help="conversations that share a prompt")
    parser.add_argument("--turns", type=int, default=6, help="of the model")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=16, help="tokens the model writes in a turn")
    parser.add_argument("--reply-tokens", type=int, default=16, help="tokens it reads between two turns")
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--attention-backend", default="auto", help="paged: a cache of pages")
    parser.add_argument("--page-length", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the record here")
    arguments = parser.parse_args(argv)
    if arguments.batch % arguments.group:
        parser.error(f"--batch {arguments.batch} is not a multiple of --group {arguments.group}")
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table, write the record."""
    record = run(parse(argv))
    rows = [
        [name, round(speed), *(round(edge) for edge in record["spread"][name]),
         record["statistics"][name]["prefill_tokens"], record["statistics"][name]["reused_tokens"]]
        for name, speed in record["tokens_per_cpu_second"].items()
    ]  # fmt: skip
    print(format_table(["prompts", "tokens / CPU s", "lowest", "highest", "prefilled", "reused"], rows))
    low, high = record["ratio_spread"]["reuse/anew"]
    print(f"reuse/anew {record['ratio']['reuse/anew']:.2f} ({low:.2f} .. {high:.2f})")
    write_record(parse(argv).json, record)


if __name__ == "__main__":
    main()
