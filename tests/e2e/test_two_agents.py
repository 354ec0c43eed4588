"""`examples/agents/two_agents.py`: a whole run whose samples have two agents."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from typing import Any

import pytest

from tests.support.ranks import REPOSITORY
from tests.support.runs import records_of, rows_of, run_many

pytest.importorskip("openai", reason="the extra agents is not installed")


@pytest.fixture(scope="module")
def run_dir(workshop) -> Any:
    """One step, an evaluation, and a replay of the step."""
    template = workshop.folder / "chat.jinja"
    template.write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    example = REPOSITORY / "examples" / "agents" / "two_agents.py"
    listed = workshop.environments("agents", [{"environment": f"{example}:PlannerAndWorker"}])
    flags = {"rl_max_new_tokens": 6, "train_iters": 1, "rl_log_rollouts": 8, "chat_template": template}
    flags |= {"eval_interval": 1, "rl_prompts_per_eval": 2, "rl_samples_per_eval_prompt": 2}
    flags |= {"rl_keep_zero_variance_groups": True, "rl_loss_aggregation": "sequence-mean"}
    replayed = workshop.folder / "replayed.json"
    replay = ["replay", str(workshop.run_dir("agents")), "--step", "1", "--json", str(replayed)]
    commands = [workshop.rl("agents", langrl_env_config=listed, **flags), ["tests/support/command.py", *replay]]
    outcomes = run_many(commands)
    for outcome in outcomes:
        outcome.check()
    assert "differs" not in outcomes[1].output
    found = json.loads(replayed.read_text())
    assert found["denominator"] == 32, "16 samples of two agents"
    return workshop.run_dir("agents")


def test_advantages_are_of_each_agent(run_dir) -> None:
    """Computed once more from the records alone."""
    groups: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for row in records_of(run_dir / "rollouts" / "step_000001.jsonl"):
        groups[row["group"], row["agent"]].append((row["agent_reward"], row["advantage"]))
    assert {agent for _, agent in groups} == {"planner", "worker"} and len(groups) == 8
    for pairs in groups.values():
        rewards = [reward for reward, _ in pairs]
        mean, deviation = statistics.mean(rewards), statistics.stdev(rewards)
        expected = [(reward - mean) / (deviation + 1e-6) for reward in rewards]
        assert [advantage for _, advantage in pairs] == pytest.approx(expected, abs=1e-4)
    assert max(abs(advantage) for pairs in groups.values() for _, advantage in pairs) > 0.5


def test_metrics_and_pages_have_the_agents(run_dir) -> None:
    rows, recorded = rows_of(run_dir), records_of(run_dir / "rollouts" / "step_000001.jsonl")
    (step,) = [row for row in rows if row.get("training/updates")]
    for name in ("planner", "worker"):
        mean = statistics.mean(row["agent_reward"] for row in recorded if row["agent"] == name)
        assert step[f"grade/planner_and_worker/reward_{name}"] == pytest.approx(mean)
    assert step["training/updates"] == 1, "the agents of a sample are in one update"
    assert any("val/planner_and_worker/pass@1" in row for row in rows), "of samples"
    assert '"agent":"worker"' in (run_dir / "report.html").read_text().replace('": "', '":"')
