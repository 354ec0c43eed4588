"""A run of harnesses that is killed amid their calls and started again is the run that was never killed: to the bit.

Half of them have two agents, and half are judged by the policy itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import differences
from tests.support.kills import KILLED, Kill, Story, tell
from tests.support.runs import rows_of

STEPS, RANKS = 2, 2
FLAGS = {
    "train_iters": STEPS, "save_interval": 1, "eval_interval": STEPS, "rl_prompts_per_eval": 2,
    "rl_samples_per_eval_prompt": 1, "use_distributed_optimizer": True, "grpo_group_size": 2, "global_batch_size": 4,
    "rl_max_new_tokens": 6, "rl_loss_aggregation": "sequence-mean", "rl_log_rollouts": 4, "resume": True,
    "rl_max_failed_share": 0.9,
}  # fmt: skip
BRANCHING = {"environment": "tests.support.e2e_environments:Branching"}
KILLS = [Kill(0, "call_answered", 9), Kill(1, "sample_ended", 3), Kill(0, "journal_written", 3)]
"""Of the 20 calls, 4 samples and 2 groups of a rank in a step; what comes back from the journal the clock decides, but
for the last kill: of the three groups none to two are of the evaluation before the first step, which has no journal."""


@pytest.mark.long
def test_nothing_tells_it_from_the_run_that_was_never_killed(workshop: Any) -> None:
    """Weights, optimizer, counters, random states, metrics and every recorded sequence."""
    environments = workshop.environments("agents", [BRANCHING, judged_by_the_policy(workshop.folder)])
    chats = {"chat_template": workshop.folder / "chats.jinja"}
    chats["chat_template"].write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    stories = [
        Story(name, [str(word) for word in workshop.rl(name, langrl_env_config=environments, **FLAGS, **chats)], kills)
        for name, kills in (("whole", []), ("killed", KILLS))
    ]
    logs = workshop.folder / "logs"
    codes = tell(stories, logs, RANKS, timeout=900)
    said = "\n".join(path.read_text(errors="replace")[-3000:] for path in sorted(logs.glob("*.log")))
    assert [codes["whole"][-1], codes["killed"][-1]] == [[0] * RANKS] * 2, said
    for kill, ended in zip(KILLS, codes["killed"], strict=False):
        assert ended[kill.rank] == KILLED, f"{kill} was never reached\n{said}"
    assert len(codes["killed"]) == len(KILLS) + 1
    assert "groups were answered before" in said

    whole, killed = map(workshop.run_dir, ("whole", "killed"))
    has_branches(whole)
    last = Path("checkpoints") / f"step_{STEPS:07d}"
    assert differences(whole / last, killed / last) == []
    assert rows_of(killed) == rows_of(whole)
    for record in sorted((whole / "rollouts").iterdir()):
        assert (killed / "rollouts" / record.name).read_text() == record.read_text(), record.name
    assert not list((killed / "journal").glob("*"))


def judged_by_the_policy(folder: Path) -> dict[str, Any]:
    """The first digit that it says to the answer is the reward; without one there is none."""
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": f"{number}+1="}) + "\n" for number in range(8)))
    judge = {"prompt": "{answer}=", "verdict": r"(\d)", "highest": 9.0, "max_tokens": 6}
    options = {"path": str(rows), "prompt": "question", "chat": False, "judge": judge}
    return {"environment": "judge", "args": options, "run_deadline": 120}


def has_branches(run_dir: Path) -> None:
    """Else the test would show less."""
    rows = [json.loads(line) for line in (run_dir / "rollouts" / "step_000001.jsonl").read_text().splitlines()]
    assert {(row["group"], row["sample"]) for row in rows} == {(group, n) for group in range(4) for n in range(2)}
    assert {row["branch"] for row in rows} >= {0, 1, 2, 3}
    assert {row.get("agent") for row in rows} == {None, "main", "other"}
    assert any(row["environment_spans"] for row in rows)
    assert any(row["update"] is not None for row in rows if row["branch"])
    assert any(row["environment"] == "judge" and row["reward"] for row in rows)
