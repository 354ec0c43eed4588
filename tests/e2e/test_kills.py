"""A run that is killed anywhere and started again is the run that was never killed: to the bit.

The named moments come here or in a test of experts, routing or stages, but for three after which nothing is written
before the next one. ``bash tests/run.sh --long tests/e2e/test_kills.py`` kills here at all of them, three times each,
at different steps and ranks, and 50 times at random.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from pathlib import Path

import psutil
import pytest

from tests.support.checkpoints import differences
from tests.support.kills import KILLED, MARK, Kill, Story, points, random_kills, tell
from tests.support.runs import rows_of

STEPS = 6
MANY_STEPS = 12
"""Of a story with kills in up to four different steps."""
RANKS = 2
FLAGS = {
    "train_iters": STEPS, "save_interval": 3, "eval_interval": 3, "rl_prompts_per_eval": 2,
    "rl_samples_per_eval_prompt": 2, "use_distributed_optimizer": True, "grpo_iterations": 2, "global_batch_size": 8,
    "rl_keep_zero_variance_groups": True, "resume": True,
}  # fmt: skip
POINTS = sorted(points())
ON_RANK_0 = {"metrics_row", "save_state", "save_listed", "save_renamed", "save_committed", "journal_forgotten"}
"""Only the main rank comes by."""
A_STEP = {"rollout": 3, "grade_asked": 2, "journal_written": 2, "optimizer_due": 4, "optimizer_done": 4, "loss": 8}
"""About how often a step comes by, where it is more than once."""
KILLS_A_STORY = 4


def kill_at(point: str, seed: int) -> Kill:
    """In the first three steps after the launch, on either rank; at the first save or evaluation."""
    draw = random.Random(f"{point}{seed}")
    rank = 0 if point in ON_RANK_0 else draw.randrange(RANKS)
    if point.startswith("save") or point in ("journal_forgotten", "evaluation"):
        return Kill(rank, point, 1)
    return Kill(rank, point, draw.randint(1, 3 * A_STEP.get(point, 1)))


def stories_of(seed: int) -> dict[str, list[Kill]]:
    """Every point once, in an order drawn by ``seed``; a run goes through several."""
    order = random.Random(seed).sample(POINTS, len(POINTS))
    parts = [order[at : at + KILLS_A_STORY] for at in range(0, len(order), KILLS_A_STORY)]
    return {f"story_{seed}_{n}": [kill_at(point, seed) for point in part] for n, part in enumerate(parts)}


class Tale:
    """Stories that were told, beside one in which nobody died."""

    def __init__(
        self, workshop, stories: dict[str, list[Kill]], timeout: float, omit: str = "", whole: str = "whole",
        own_servers: bool = False, **flags: object,
    ) -> None:  # fmt: skip
        """``whole`` is the one in which nobody died: of two replicas, as ``whole``, or with the same ``flags``."""
        self.workshop, self.whole, self.steps = workshop, whole, flags.get("train_iters", STEPS)
        told = [Story(name, self._argv(name, **flags), kills, omit) for name, kills in stories.items()]
        if not workshop.run_dir(whole).exists():
            waited_for = {name: value for name, value in flags.items() if name != "async_save"}
            told.insert(0, Story(whole, self._argv(whole, **(waited_for if whole != "whole" else {}))))
        self.logs = workshop.folder / "logs"
        self.codes = tell(told, self.logs, RANKS, timeout, own_servers)
        assert self.codes.get(whole, [[0] * RANKS]) == [[0] * RANKS], self.output(whole)

    def _argv(self, name: str, **flags: object) -> list[str]:
        return [str(word) for word in self.workshop.rl(name, **(FLAGS | flags))]

    def output(self, name: str) -> str:
        """The ends of what the ranks wrote."""
        return "\n".join(path.read_text(errors="replace")[-3000:] for path in sorted(self.logs.glob(f"{name}.*.log")))

    def check(self, name: str) -> None:
        """Weights, optimizer, counters, random states, metrics and every recorded rollout are those of ``whole``."""
        assert self.codes[name][-1] == [0] * RANKS, self.output(name)
        whole, run = self.workshop.run_dir(self.whole), self.workshop.run_dir(name)
        last = Path("checkpoints") / f"step_{self.steps:07d}"
        assert differences(whole / last, run / last) == []
        assert rows_of(run) == rows_of(whole)
        records = sorted(path.name for path in (whole / "rollouts").iterdir())
        assert sorted(path.name for path in (run / "rollouts").iterdir()) == records
        for record in records:
            assert (run / "rollouts" / record).read_text() == (whole / "rollouts" / record).read_text(), record
        assert not list((run / "journal").glob("*"))  # which a run of partial rollouts does not have
        assert not list((run / "checkpoints").glob("*.tmp"))


    def check_all(self, stories: dict[str, list[Kill]]) -> None:
        """Every kill was one, and none left a trace."""
        for name, kills in stories.items():
            for kill, codes in zip(kills, self.codes[name], strict=False):
                assert codes[kill.rank] == KILLED, f"{name}: {kill} was never reached\n{self.output(name)}"
            assert len(self.codes[name]) == len(kills) + 1
            self.check(name)


NOWHERE_ELSE = {
    "amid_steps": ("loss", "records", "metrics_row"), "amid_saves": ("journal_forgotten", "save_state", "evaluation"),
}
FIRST = {story: [kill_at(point, seed=1) for point in points] for story, points in NOWHERE_ELSE.items()}


@pytest.fixture(scope="module")
def first(workshop) -> Tale:
    return Tale(workshop, FIRST, timeout=900, own_servers=True)


@pytest.mark.parametrize("story", FIRST)
def test_killed_at_named_moments(first: Tale, story: str) -> None:
    first.check_all({story: FIRST[story]})


def test_no_process_is_left_behind(first: Tale) -> None:
    """Ranks that were killed had helpers of their own: the environment server and the writers of checkpoints."""
    deadline = time.monotonic() + 20
    while left := _orphans_of(first.workshop.folder):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def _orphans_of(folder: Path) -> list[str]:
    """Processes that descend from a rank of this module: they have its variable or, as forks do, write to its log."""
    found, logs = [], str(folder / "logs")
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == logs or os.readlink(f"/proc/{process.pid}/fd/1").startswith(logs):
                found.append(" ".join(process.cmdline()))
    return found


def test_the_journal_gave_groups_back(first: Tale) -> None:
    assert "groups were answered before" in "".join(map(first.output, FIRST))


def test_saved_in_the_background_and_killed_meanwhile(workshop) -> None:
    """The run is the same as with saves that are waited for."""
    points = ["background_committing", "background_forked", "background_planned", "background_written", "save_renamed"]
    kills = [Kill(int(point in ("background_forked", "background_written")), point) for point in points]
    stories = {"background_killed": kills}
    # A save may be over before its rank is killed: each kill needs a save of its own.
    tale = Tale(workshop, stories, timeout=900, save_interval=1, async_save=True)
    tale.check_all(stories)


@pytest.mark.long
def test_killed_on_either_stage(workshop) -> None:
    """Amid a rollout, where messages are under way; test_router_replay.py has its end, test_pipeline_kills.py updates.
    """
    stories = {"stages": [Kill(1, "rollout", 5), Kill(0, "rollout", 7)]}
    tale = Tale(workshop, stories, timeout=900, whole="whole_stages", pipeline_model_parallel_size=2)
    tale.check_all(stories)


def test_killed_in_partial_rollouts(workshop) -> None:
    """Amid a rollout that goes on from groups put aside, while it is graded, and after a save."""
    kills = [Kill(0, "rollout", 5), Kill(1, "grade_asked", 5), Kill(0, "save_committed")]
    flags = {
        "rl_partial_rollouts": True, "rl_oversampling": 6, "rl_generation_lag": 2, "rl_max_new_tokens": 40,
        "rl_dynamic_sampling": True, "rl_keep_zero_variance_groups": None,
    }  # fmt: skip
    stories = {"partial": kills}
    tale = Tale(workshop, stories, timeout=900, whole="whole_partial", **flags)
    tale.check_all(stories)


@pytest.mark.long
def test_killed_in_a_lora_run_with_quantised_rollouts_on_two_tensor_parallel_ranks(workshop) -> None:
    """Amid a rollout, between updates and around saves. Only adapters are saved: the base is drawn again."""
    kills = [
        Kill(1, "rollout", 5), Kill(0, "grade_asked", 5), Kill(0, "journal_closed"), Kill(1, "loss", 7),
        Kill(1, "optimizer_due", 3), Kill(0, "optimizer_done", 5), Kill(1, "save_begun"), Kill(0, "save_committed"),
    ]  # fmt: skip
    flags = {
        "tensor_model_parallel_size": 2, "sequence_parallel": True, "rl_rollout_quantization": "int8", "lora_rank": 4,
        "grpo_kl_beta": 0.05, "train_iters": MANY_STEPS,
    }  # fmt: skip
    stories = {"lora": kills}
    tale = Tale(workshop, stories, timeout=3600, whole="whole_lora", **flags)
    tale.check_all(stories)


NEEDED = ("prompts", "progress.updates", "progress.policy_version", "progress.tokens", "optimizer", "expected_lengths")
"""Not among them: the generators' states, which no step of this run draws from (dropout does, see test_resume.py),
and the largest log-prob gap, which a later step may reach again."""


@pytest.mark.parametrize(
    "item", [item if item == "prompts" else pytest.param(item, marks=pytest.mark.long) for item in NEEDED]
)
def test_without_any_item_of_the_state_the_comparison_fails(workshop, item: str) -> None:
    """The control of all the tests here: killed after the first save, and resumed without ``item``."""
    name = f"without_{item}"
    tale = Tale(workshop, {name: [Kill(0, "save_committed", 1)]}, timeout=900, omit=item)
    assert tale.codes[name][-1] == [0] * RANKS, tale.output(name)
    with pytest.raises(AssertionError):
        tale.check(name)


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_killed_at_every_named_moment_again(workshop, seed: int) -> None:
    stories = stories_of(seed)
    Tale(workshop, stories, timeout=1800, whole="whole_many", train_iters=MANY_STEPS).check_all(stories)


@pytest.mark.long
def test_killed_at_50_random_moments(workshop) -> None:
    stories = {f"random_{story}": random_kills(5, RANKS, longest=2.5, seed=story) for story in range(10)}
    tale = Tale(workshop, stories, timeout=3600, whole="whole_many", train_iters=MANY_STEPS)
    for name in stories:
        tale.check(name)
    killed = sum(KILLED in codes for name in stories for codes in tale.codes[name])
    assert killed >= 40, f"only {killed} kills came before the end"
