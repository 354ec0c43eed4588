"""`examples/agents`: each agent that is installed takes two steps of RL, beside the loop around OpenAI's client.

Passes with openai-agents 0.24.0, langchain 1.5.2 (langchain-openai 1.7.4), pydantic-ai-slim 2.68.0, smolagents 1.26.0
and openai 3.57.0.
"""

from __future__ import annotations

import importlib.util
import runpy
from typing import Any

import pytest

from tests.e2e.test_agent_tools import EASY, EXAMPLE, SAME, samples_of
from tests.support.ranks import REPOSITORY
from tests.support.runs import rows_of, run_many

pytest.importorskip("openai", reason="the extra agents is not installed")
pytestmark = pytest.mark.long

PACKAGES = {
    "openai_agents": "agents", "langchain_agent": "langchain", "pydantic_ai_agent": "pydantic_ai",
    "smolagents_agent": "smolagents",
}  # fmt: skip
"""What each example needs."""
WITHOUT_UPDATE = 3
"""The exit code: a model that was shown calls of tools writes no Python, so all its samples have the reward 0."""
HARNESS = "megatron_rl_environments.shop.harness:ShopHarness"


@pytest.fixture(scope="module")
def installed() -> list[str]:
    found = [example for example, package in PACKAGES.items() if importlib.util.find_spec(package)]
    if not found:
        pytest.skip("no framework of examples/agents is installed")
    return found


@pytest.fixture(scope="module")
def runs(workshop, installed) -> dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """Samples and rows of two steps of a model that has learnt to call tools."""
    tokenizer = workshop.folder / "tokenizer"
    runpy.run_path(str(EXAMPLE / "make_tokenizer.py"))["main"](tokenizer)
    flags: dict[str, Any] = {"tokenizer_model": tokenizer, "seq_length": 96}
    warm = {"train_iters": 80, "global_batch_size": 16, "micro_batch_size": 16}
    warm["langrl_env_config"] = workshop.environments("warm", [{"environment": "shop", "args": EASY}])
    run_many([workshop.supervised("warm", **flags, **warm)])[0].check()
    flags |= {"pretrained_checkpoint": workshop.run_dir("warm") / "checkpoints", "rl_max_new_tokens": 12}
    flags |= {"train_iters": 2, "rl_log_rollouts": 64, "rl_keep_zero_variance_groups": True}
    folder = REPOSITORY / "examples" / "agents"
    ways = {"client": HARNESS} | {name: f"{folder / name}.py:ShopAgent" for name in installed}
    commands = []
    for name, way in ways.items():
        listed = workshop.environments(name, [{"environment": way, "name": "shop", "args": EASY}])
        # A code agent tells the model of Python first.
        longer = {"seq_length": 640} if name == "smolagents_agent" else {}
        commands.append(workshop.rl(name, langrl_env_config=listed, **flags | longer))
    for name, outcome in zip(ways, run_many(commands), strict=True):
        outcome.check(WITHOUT_UPDATE if name == "smolagents_agent" else 0)
    return {name: (samples_of(workshop.run_dir(name)), rows_of(workshop.run_dir(name))) for name in ways}


@pytest.mark.parametrize("example", PACKAGES)
def test_two_steps(runs, example: str) -> None:
    """Agents that show the model the same tools have the tokens of the loop around OpenAI's client."""
    if example not in runs:
        pytest.skip(f"{PACKAGES[example]} is not installed")
    (samples, rows), (by_client, _) = runs[example], runs["client"]
    assert len(samples) == len(by_client) == 32
    assert {sample["code"] for sample in samples} == {""}
    for row in rows:
        assert row["rollout/sequences_mean"] == 1.0, "every call went on from the tokens of the one before"
        assert row["grade/shop/edited_histories"] == 0
        assert row["training/rollout_logprob_gap_max"] < 5e-5
    num_spans = sum(len(sample["environment_spans"]) for sample in samples)
    assert num_spans > (0 if example == "smolagents_agent" else 16), "the model is asked again"
    if example != "smolagents_agent":
        for ours, theirs in zip(samples, by_client, strict=True):
            assert {name: ours[name] for name in SAME} == {name: theirs[name] for name in SAME}
