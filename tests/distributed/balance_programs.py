"""A step whose long groups all fall to one rank when they are dealt in turn; run on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_rl.loop import rl_step
from megatron_rl.models.gpt import rollout_mode
from megatron_rl.platform.groups import shut_down
from megatron_rl.rollout.collector import StepRollouts
from megatron_rl.rollout.prompt_source import RequestFactory
from megatron_rl.rollout.rollouter import RolloutResult
from megatron_rl.run.rl import RLRun
from megatron_rl.types import Request, SourcedTask
from tests.distributed.programs import join, toy_config
from tests.support.toy import toy_run

LONG, SHORT = 40, 3
GROUPS = 8


class EverySecondIsLong(RequestFactory):
    """Groups 0, 2, 4, 6 may have ``LONG`` tokens, the others ``SHORT``."""

    def request(self, source: SourcedTask, num_samples: int, index: int, **how: Any) -> Request:
        return super().request(source, num_samples, index, at_most=SHORT if index % 2 else LONG)


def in_turn_and_by_length() -> dict[str, Any]:
    """The same draws dealt in turn, then by what was learned of it; and two steps of a run."""
    groups = join(tensor_size=1)
    run = toy_run(toy_config(groups, {"grpo_prompts_per_step": GROUPS, "rl_max_new_tokens": LONG}), groups)
    run.collector.factory = EverySecondIsLong(run.collector.factory.sampling, run.collector.factory.max_sequence_length)
    draws = run.source.draw(GROUPS)
    run.source.load_state_dict({})
    size = run.config.algorithm.grpo_group_size
    requests = [run.collector.factory.request(draw, size, number) for number, draw in enumerate(draws)]
    in_turn = requests[groups.data_group.rank() :: groups.data_group.size()]
    first = generate(run, in_turn)
    done = StepRollouts(0, draws, first.finished, generate_seconds=first.generate_seconds)
    idle = run.collector.commit(done)
    by_length = run.collector.requests_of_this_rank(draws)
    second = generate(run, by_length)
    samples = [run.samples.build(result.groups, [r.index for r in dealt], 0) for dealt, result in
               ((in_turn, first), (by_length, second))]  # fmt: skip
    steps = [rl_step(run, step).metrics for step in (1, 2)]
    report = {
        "in_turn": described(in_turn, first),
        "by_length": described(by_length, second),
        "ids": [[(s.sample_id, s.reward) for s in own] for own, _ in samples],
        "idle": idle,
        "steps": [{name: value for name, value in row.items() if "idle_share" in name} for row in steps],
        "state": run.collector.expected_lengths.state_dict(),
    }
    run.closing.close()
    shut_down()
    return report


def generate(run: RLRun, requests: Sequence[Request]) -> RolloutResult:
    """The rollout phase of a step."""
    with rollout_mode(run.policy, run.optimization.wrapped):
        return run.collector.rollouter.run(requests, seed=1, policy_version=0)


def described(requests: Sequence[Request], result: RolloutResult) -> dict[str, Any]:
    """Answers by the number of their group, and the tokens this rank generated."""
    answers = {
        str(request.index): [rollout.completion.token_ids for rollout in group.rollouts]
        for request, group in zip(requests, result.groups, strict=True)
    }
    return {"answers": answers, "tokens": sum(len(ids) for group in answers.values() for ids in group)}
