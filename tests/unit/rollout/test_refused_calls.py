"""Calls of harnesses that the engine cannot take."""

from __future__ import annotations

import openai
import pytest

from megatron_rl.errors import EngineError
from megatron_rl.types import Grade, HarnessRun, Request
from tests.support.engines import QueuedEngine
from tests.support.toy import LETTERS
from tests.unit.rollout.test_harnesses import Stage, ask
from tests.unit.rollout.test_harnesses import stage as stage


@pytest.mark.parametrize("error", [EngineError("no room"), OverflowError("no room")])
def test_a_call_that_the_engine_refuses_fails_alone(stage: Stage, monkeypatch: pytest.MonkeyPatch, error) -> None:
    """Of a judge and of a session: the clients are told, and another sample goes on."""
    submit = QueuedEngine.submit

    def refuse(self: QueuedEngine, request: Request) -> None:
        if LETTERS[request.prompt_ids[-1]] == "x":
            raise error
        submit(self, request)

    async def play(run: HarnessRun, client: openai.AsyncOpenAI) -> Grade:
        judge = client.with_options(base_url=stage.endpoint.base_url())
        for asked in (judge, client):
            with pytest.raises(openai.APIStatusError, match="no room"):
                await ask(asked, "abx")
        if run.sample:
            await ask(client, "abx")
        return Grade(float(await ask(client, "ab") == "c"))

    async def masked(run: HarnessRun, client: openai.AsyncOpenAI) -> Grade:
        try:
            return await play(run, client)
        except openai.APIStatusError:
            return Grade(None, code="environment_exception")

    monkeypatch.setattr(QueuedEngine, "submit", refuse)
    (group,) = stage.run(masked, samples=2).groups
    assert [rollout.grade.reward for rollout in group.rollouts] == [1.0, None]
