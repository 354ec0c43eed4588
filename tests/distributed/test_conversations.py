"""Conversations of several ranks are those of one: the leader of a model copy asks, all of them read the same."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from typing import Any

import pytest

from megatron_rl.loop import RLRun, rl_step
from megatron_rl.platform.collectives import gather_json
from megatron_rl.platform.groups import ParallelGroups, shut_down
from megatron_rl.rollout.conversations import ConversationSettings
from megatron_rl.types import Continuation, Grade, Task, Turn
from tests.distributed.programs import join, toy_config
from tests.support.ranks import run_ranks
from tests.support.tiny import SHAPES
from tests.support.toy import toy_run

STEPS = 2
TURNS = 4
REPLY = "yes"


async def answer(environment: str, items: Sequence[tuple[Task, Any, Turn]]) -> list[Grade]:
    """Ends about one conversation in three; the others wait for a moment that depends on the text."""
    await asyncio.sleep(0.001 * (zlib.crc32(items[0][2].text.encode()) % 20))
    return [answer_to(task, state, turn) for task, state, turn in items]


def answer_to(task: Task, state: Any, turn: Turn) -> Grade:
    assert (state or 0) == turn.number, "the state of another turn"
    checksum = zlib.crc32(f"{task.id}/{turn.number}/{turn.text}".encode())
    reward = sum(letter <= "m" for letter in turn.text) / max(len(turn.text), 1)
    if checksum % 3 == 0:
        return Grade(reward, turn_reward=checksum % 5 / 4)
    reply = {"role": "user", "content": REPLY[: 1 + checksum % 2]}
    going_on = Continuation((reply,), turn.number + 1)
    return Grade(reward, continuation=going_on, turn_reward=checksum % 5 / 4)


def talk(tensor_size: int, **changes: Any) -> dict[str, Any]:
    """Two steps of training on conversations: what was said in them, and the metrics."""
    groups = join(tensor_size, **changes)
    flags = {"rl_max_new_tokens": 6, "rl_decode_steps_per_sync": 2, "rl_turn_discount": 0.5}
    config = toy_config(groups, flags | changes)
    settings = ConversationSettings({"toy": TURNS}, config.rollout.inference_max_seq_length)
    run = toy_run(config, groups, answer, settings)
    return steps_of(run, groups)


def steps_of(run: RLRun, groups: ParallelGroups) -> dict[str, Any]:
    """What was said in each of two steps, by task, and the metrics; ends the run."""
    steps = []
    for step in range(STEPS):
        recorded: list[Any] = []
        run.reporter.records = lambda _, rollouts, *__, kept=recorded: kept.extend(
            [group.source.task.id, [[r.completion.token_ids, r.completion.environment_spans] for r in group.rollouts]]
            for group in rollouts
        )
        metrics = rl_step(run, step + 1).metrics
        said = dict(pair for part in gather_json(recorded, groups.data_group) for pair in part)
        steps.append({"said": said, "metrics": metrics})
    run.closing.close()
    shut_down()
    return {"steps": steps}


@pytest.fixture(scope="module")
def one_rank_alone() -> dict[str, Any]:
    return run_ranks("tests.distributed.test_conversations:talk", 1, tensor_size=1)[0]


def test_the_trainer_sees_what_the_engine_sampled(one_rank_alone: dict[str, Any]) -> None:
    """Log-probs of the model's turns, recomputed over the whole conversation; and the loss counts those alone."""
    for step in one_rank_alone["steps"]:
        assert step["metrics"]["training/rollout_logprob_gap_max"] < 1e-5
        assert step["metrics"]["rollout/turns_mean"] > 1.3
        samples = [sample for group in step["said"].values() for sample in group]
        spans = [span for _, found in samples for span in found]
        assert len(spans) > 5
        written = sum(len(ids) for ids, _ in samples) - sum(end - start for start, end in spans)
        assert step["metrics"]["perf/generated_tokens"] == written


@pytest.mark.parametrize(("ranks", "tensor_size"), [(2, 1), (2, 2)], ids=["data", "tensor"])
def test_two_ranks_lead_the_conversations_of_one(one_rank_alone, ranks: int, tensor_size: int) -> None:
    reports = run_ranks("tests.distributed.test_conversations:talk", ranks, tensor_size=tensor_size)
    _assert_the_same(reports, one_rank_alone)


def test_ranks_that_share_experts_wait_for_each_others_conversations() -> None:
    experts = SHAPES["experts"]
    alone = run_ranks("tests.distributed.test_conversations:talk", 1, tensor_size=1, **experts)[0]
    sizes = experts | {"expert_model_parallel_size": 2}
    _assert_the_same(run_ranks("tests.distributed.test_conversations:talk", 2, tensor_size=1, **sizes), alone)


def _assert_the_same(reports: Sequence[dict[str, Any]], expected: dict[str, Any]) -> None:
    for report in reports:
        for own, alone in zip(report["steps"], expected["steps"], strict=True):
            assert own["said"] == alone["said"]
            for name in ("actor/pg_loss", "critic/rewards/mean", "rollout/turns_mean", "perf/generated_tokens"):
                assert own["metrics"][name] == pytest.approx(alone["metrics"][name], rel=0, abs=1e-5), name
