"""Rollout tokens per CPU second: our engine, Hugging Face ``generate``, megatron-core's own engine.

    python -m tools.benchmark.rollout --shape 64x3 --batch 64 --new-tokens 64 --against hf,stock

One process, one thread, the same weights, the contenders in turns. The end token is disabled, so
every sequence runs to its limit. Ours and the stock engine also return the log-prob of every
token; ``generate`` does not.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from megatron_rl.errors import MegatronRLError
from megatron_rl.inference import Engine, RolloutEngine
from megatron_rl.inference.options import EngineOptions
from megatron_rl.metrics.table import format_table
from megatron_rl.models import PolicyModel, build_model, rollout_mode
from megatron_rl.parallel import initialize, seed_everything, shut_down
from megatron_rl.platform import current_platform
from megatron_rl.types import GenerationRequest, SamplingParams, SourcedTask, Task
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

Tokens = list[tuple[int, ...]]
"""The answers of all sequences, in the workload's order."""


@dataclass(frozen=True)
class Workload:
    """What everybody has to generate."""

    prompts: list[tuple[int, ...]]
    """One a group."""
    group: int
    limits: list[int]
    """One a sequence; all equal unless ragged."""
    greedy: bool
    ragged: bool

    @property
    def rows(self) -> list[tuple[int, ...]]:
        """The prompt of every sequence."""
        return [prompt for prompt in self.prompts for _ in range(self.group)]

    def requests(self, greedy: bool) -> list[GenerationRequest]:
        """A request a group; ragged, one a sequence, because a limit belongs to a request."""
        prompts = self.rows if self.ragged else self.prompts
        size = 1 if self.ragged else self.group
        return [
            GenerationRequest(
                SourcedTask("benchmark", Task(str(index), "")),
                prompt,
                size,
                SamplingParams(greedy=greedy, max_new_tokens=self.limits[index * size]),
                index,
            )
            for index, prompt in enumerate(prompts)
        ]


def make_workload(arguments: argparse.Namespace) -> Workload:
    """Ragged limits are uniform on 1 .. new-tokens: their mean is half of it."""
    draw = random.Random(arguments.seed)
    longest = arguments.new_tokens
    limits = [draw.randint(1, longest) if arguments.ragged else longest for _ in range(arguments.batch)]
    prompts = random_prompts(
        arguments.batch // arguments.group, arguments.prompt_tokens, arguments.vocab, arguments.seed
    )
    return Workload(prompts, arguments.group, limits, arguments.greedy, arguments.ragged)


Generate = Callable[[int, bool], Tokens]
"""(seed, greedy) -> all answers."""


def engine_contender(engine: Engine, policy: PolicyModel, workload: Workload) -> Generate:
    """Submit everything, step until it is done: what the rollouter does, without the grading."""

    def generate(seed: int, greedy: bool) -> Tokens:
        with rollout_mode(policy):
            engine.begin(seed, policy_version=0)
            for request in workload.requests(greedy):
                engine.submit(request)
            groups = []
            while engine.has_unfinished:
                groups += engine.step()
        groups.sort(key=lambda group: group.request.index)
        return [completion.token_ids for group in groups for completion in group.completions]

    return generate


def hugging_face_contender(policy: PolicyModel, workload: Workload, max_length: int) -> Generate:
    """``generate`` with a KV cache; the batch runs until its longest sequence is done."""
    from tools.benchmark.twin import hugging_face_twin

    twin = hugging_face_twin(policy, max_length).eval()
    rows = torch.tensor(workload.rows)
    longest = max(workload.limits)

    @torch.inference_mode()
    def generate(seed: int, greedy: bool) -> Tokens:
        torch.manual_seed(seed)
        sampling = {} if greedy else {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
        ids = twin.generate(
            rows,
            attention_mask=torch.ones_like(rows),
            do_sample=not greedy,
            max_new_tokens=longest,
            use_cache=True,
            eos_token_id=None,
            pad_token_id=0,
            **sampling,
        )
        answers = ids[:, rows.shape[1] :].tolist()
        return [tuple(row[:limit]) for row, limit in zip(answers, workload.limits, strict=True)]

    return generate


def make_contenders(
    names: Sequence[str], policy: PolicyModel, workload: Workload, options: EngineOptions
) -> dict[str, Generate]:
    """``ours`` and whoever else is asked for and present."""
    ours = RolloutEngine(policy, options, stop_token_ids=[], decode_text=str)
    contenders = {"ours": engine_contender(ours, policy, workload)}
    if "hf" in names:
        contenders["hf"] = hugging_face_contender(policy, workload, options.max_sequence_length)
    if "stock" in names:
        try:
            from megatron_rl.inference.mcore import McoreEngine
        except ImportError as missing:
            print(f"stock: not available ({missing})")
        else:
            stock = McoreEngine(policy, options, [])
            contenders["stock"] = engine_contender(stock, policy, workload)
    return contenders


def agreement(contenders: dict[str, Generate]) -> dict[str, float]:
    """Share of sequences on which the greedy answers equal ours: it is the same model."""
    answers = {name: generate(0, True) for name, generate in contenders.items()}
    ours = answers.pop("ours")
    return {
        name: sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours) for name, theirs in answers.items()
    }


def run(arguments: argparse.Namespace) -> dict[str, object]:
    """Build, check that all compute the same, measure."""
    prepare()
    length = arguments.prompt_tokens + arguments.new_tokens
    config = benchmark_config(arguments.shape, length)
    platform = current_platform()
    initialize(config.parallel, platform)
    try:
        seed_everything(arguments.seed)
        policy = build_model(config, platform, arguments.vocab)
        workload = make_workload(arguments)
        options = EngineOptions(arguments.batch, length)
        contenders = make_contenders(arguments.against.split(","), policy, workload, options)
        same = agreement(contenders)

        def timed(name: str) -> Callable[[int], int]:
            return lambda seed: _count(name, contenders[name](seed, workload.greedy), workload)

        rounds = compete({name: timed(name) for name in contenders}, arguments.rounds)
    finally:
        shut_down()
    settings = {name: value for name, value in vars(arguments).items() if name not in ("json", "shape")}
    return {
        **summarise(rounds, "ours"),
        "greedy_agreement": same,
        "settings": {"shape": asdict(arguments.shape), **settings},
        **provenance("rollout"),
    }


def _count(name: str, answers: Tokens, workload: Workload) -> int:
    if [len(answer) for answer in answers] != workload.limits:
        raise MegatronRLError(f"{name} did not generate what was asked for: its speed means nothing")
    return sum(workload.limits)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.benchmark.rollout")
    parser.add_argument("--shape", type=Shape.parse, required=True, help="hidden size x layers: 64x3")
    parser.add_argument("--batch", type=int, default=64, help="sequences decoded at once")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--group", type=int, default=8, help="sequences that share a prompt")
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--ragged", action="store_true", help="a random limit a sequence, mean half the longest")
    parser.add_argument("--greedy", action="store_true", help="likeliest token instead of temperature 1")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against", default="hf,stock", help="comma-separated: hf, stock")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the record here")
    arguments = parser.parse_args(argv)
    if arguments.batch % arguments.group:
        parser.error(f"--batch {arguments.batch} is not a multiple of --group {arguments.group}")
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table, write the record."""
    arguments = parse(argv)
    record = run(arguments)
    speeds, spread = record["tokens_per_cpu_second"], record["spread"]
    rows = [
        [name, round(speed), f"{low:.0f} .. {high:.0f}", record["ratio"].get(f"ours/{name}")]
        for (name, speed), (low, high) in zip(speeds.items(), spread.values(), strict=True)
    ]
    print(format_table(["engine", "tokens / CPU s", "spread", "ours / it"], rows))
    write_record(arguments.json, record)


if __name__ == "__main__":
    main()
