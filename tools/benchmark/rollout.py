"""Rollout tokens per CPU second: our engine, Hugging Face ``generate``, megatron-core's own engine.

    python -m tools.benchmark.rollout --shape 64x3 --batch 64 --new-tokens 64 --against hf,stock
    python -m tools.benchmark.rollout --experts 32          grouped products against megatron's loop over experts

One process, one thread, the same weights, the contenders in turns. Without ``--ragged`` there is no end token, so
every sequence runs to its limit; with it so many random tokens end a sequence that the mean length is about half the
limit, for all contenders alike. They draw different numbers, so each one's useful tokens are counted by itself. Ours
and the stock engine also return the log-prob of every token; ``generate`` does not.
"""

from __future__ import annotations

import operator
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from megatron_rl.errors import MegatronRLError
from megatron_rl.inference.engine import Engine, EngineOptions
from megatron_rl.inference.rollout_engine import RolloutEngine
from megatron_rl.models.gpt import PolicyModel, build_model, rollout_mode
from megatron_rl.platform import current_platform
from megatron_rl.platform.groups import seed_everything
from megatron_rl.types import SamplingParams
from tools.benchmark.common import (
    LOOP,
    SPEED,
    benchmark_config,
    command_line,
    compete,
    expert_flags,
    random_prompts,
    ranks_of,
    report_rounds,
    requests_of,
    rollout_flags,
    tokens_per_cpu_second,
)
from tools.benchmark.twin import hugging_face_twin
from tools.megatron_engine import McoreEngine

Tokens = list[tuple[int, ...]]
"""The answers of all sequences, in the workload's order."""


@dataclass(frozen=True)
class Workload:
    """What everybody has to generate."""

    prompts: list[tuple[int, ...]]  # one a group
    group: int
    longest: int  # new tokens a sequence at most
    greedy: bool
    end_ids: frozenset[int] = frozenset()  # tokens that end a sequence; none unless ragged

    @property
    def rows(self) -> list[tuple[int, ...]]:
        """The prompt of every sequence."""
        return [prompt for prompt in self.prompts for _ in range(self.group)]

    def cut(self, answer: Sequence[int]) -> tuple[int, ...]:
        """``answer`` up to its first end token."""
        return tuple(answer[: _length(answer, self.end_ids)])

    def count(self, name: str, answers: Tokens) -> int:
        """Useful tokens.

        Raises:
            MegatronRLError: an answer goes on behind its end or stops before it.
        """
        for answer in answers:
            ended = answer[-1] in self.end_ids or len(answer) == self.longest
            if not ended or self.cut(answer) != tuple(answer) or len(answers) != len(self.rows):
                raise MegatronRLError(f"{name} did not generate what was asked for: its speed means nothing")
        return sum(map(len, answers))


def _length(answer: Sequence[int], end_ids: frozenset[int]) -> int:
    return next((place + 1 for place, token in enumerate(answer) if token in end_ids), len(answer))


def with_end_ids(workload: Workload, policy: PolicyModel, options: EngineOptions, vocab: int, seed: int) -> Workload:
    """So many random end tokens that our answers are about half as long as they may be, on average."""
    free = engine_contender(RolloutEngine(policy, options, [], str), policy, workload)
    answers = [answer for draw in range(2) for answer in free(1000 + draw, workload.greedy)]
    order = random.Random(seed).sample(range(vocab), vocab)
    candidates = [frozenset(order[:count]) for count in range(1, vocab // 2)]

    def distance(end_ids: frozenset[int]) -> float:
        return abs(statistics.mean(_length(answer, end_ids) for answer in answers) - workload.longest / 2)

    return replace(workload, end_ids=min(candidates, key=distance))


Generate = Callable[[int, bool], Tokens]
"""(seed, greedy) -> all answers."""


def engine_contender(engine: Engine, policy: PolicyModel, workload: Workload) -> Generate:
    """Submit everything, step until it is done: what the rollouter does, without the grading."""

    def generate(seed: int, greedy: bool) -> Tokens:
        with rollout_mode(policy):
            engine.begin(seed, policy_version=0)
            sampling = SamplingParams(greedy=greedy, max_new_tokens=workload.longest)
            for request in requests_of(workload.prompts, workload.group, sampling):
                engine.submit(request)
            groups = []
            while engine.has_unfinished:
                groups += engine.step()
        groups.sort(key=lambda done: done[0].index)
        return [completion.token_ids for _, group in groups for completion in group]

    return generate


def hugging_face_contender(policy: PolicyModel, workload: Workload, max_length: int) -> Generate:
    """``generate`` with a KV cache; the batch runs until its longest sequence is done."""
    twin = hugging_face_twin(policy, max_length).eval()
    rows = torch.tensor(workload.rows)
    ends = sorted(workload.end_ids) or None

    @torch.inference_mode()
    def generate(seed: int, greedy: bool) -> Tokens:
        torch.manual_seed(seed)
        sampling = {} if greedy else {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
        ids = twin.generate(
            rows, attention_mask=torch.ones_like(rows), do_sample=not greedy, max_new_tokens=workload.longest,
            use_cache=True, eos_token_id=ends, pad_token_id=0, **sampling,
        )  # fmt: skip
        answers = ids[:, rows.shape[1] :].tolist()
        return [workload.cut(row) for row in answers]  # behind an end token it pads

    return generate


def main(argv: Sequence[str] | None = None) -> None:
    """Check that all compute the same, measure and report."""
    parser = command_line("rollout", shape="64x3", vocab=512, rounds=5)
    rollout_flags(parser, group=8)
    parser.add_argument("--ragged", action="store_true", help="end tokens: sequences half as long, on average")
    parser.add_argument("--greedy", action="store_true", help="likeliest token instead of temperature 1")
    parser.add_argument("--against", default="hf,stock", help="comma-separated: hf, stock")
    parser.add_argument("--experts", type=int, default=0, help="in each layer: against megatron's loop over them")
    arguments = parser.parse_args(argv)
    if arguments.batch % arguments.group:
        parser.error(f"--batch {arguments.batch} is not a multiple of --group {arguments.group}")
    length = arguments.prompt_tokens + arguments.new_tokens
    config = benchmark_config(arguments.shape, length, *expert_flags(arguments))
    with ranks_of(config, arguments.seed):
        policy = build_model(config, current_platform(), arguments.vocab)
        groups = arguments.batch // arguments.group
        prompts = random_prompts(groups, arguments.prompt_tokens, arguments.vocab, arguments.seed)
        workload = Workload(prompts, arguments.group, arguments.new_tokens, arguments.greedy)
        options = EngineOptions(arguments.batch, length)
        if arguments.ragged:
            workload = with_end_ids(workload, policy, options, arguments.vocab, arguments.seed)
        ends, names = sorted(workload.end_ids), ["loop"] if arguments.experts else arguments.against.split(",")
        contenders = {"ours": engine_contender(RolloutEngine(policy, options, ends, str), policy, workload)}
        if "hf" in names:
            contenders["hf"] = hugging_face_contender(policy, workload, length)
        if "stock" in names:
            contenders["stock"] = engine_contender(McoreEngine(policy, options, ends), policy, workload)
        if "loop" in names:
            looped = benchmark_config(arguments.shape, length, *expert_flags(arguments, LOOP))
            seed_everything(arguments.seed)
            other = build_model(looped, current_platform(), arguments.vocab)
            contenders["loop"] = engine_contender(RolloutEngine(other, options, ends, str), other, workload)
        greedy = {name: generate(0, True) for name, generate in contenders.items()}
        same = {
            name: sum(map(operator.eq, greedy["ours"], answers)) / arguments.batch
            for name, answers in greedy.items()
            if name != "ours"
        }
        made: dict[str, list[int]] = {name: [] for name in contenders}

        def work(name: str, seed: int) -> int:
            made[name].append(workload.count(name, contenders[name](seed, workload.greedy)))
            return made[name][-1]

        turns = {name: partial(tokens_per_cpu_second, partial(work, name)) for name in contenders}
        rounds = compete(turns, arguments.rounds)
    lengths = {name: statistics.mean(counts) / arguments.batch for name, counts in made.items()}
    found = {"mean_length": lengths, "end_tokens": len(ends), "greedy_agreement": same}
    report_rounds("rollout", SPEED, arguments, rounds, **found)


if __name__ == "__main__":
    main()
