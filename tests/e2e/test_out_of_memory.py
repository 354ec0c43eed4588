"""Memory that runs out is one line that names the phase and what to lower, and no finished step is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checkpoints import differences
from tests.support.ranks import run_ranks
from tests.support.runs import facts_of, rows_of, run_many

LAST = Path("checkpoints") / "step_0000004"
TWO_UPDATES = {"global_batch_size": 8, "rl_keep_zero_variance_groups": True, "save_interval": 2}
OFFLOAD = {"rl_offload_optimizer_during_inference": True}
PROMPTS = 4
"""Groups that the engine is given in a rollout, over all ranks."""
CASES = {
    "rollout": (OFFLOAD, "rollout", 2 * PROMPTS + 1),
    "first": ({}, "rollout", 1),
    "update": ({}, "loss", 6),
    "half done": (TWO_UPDATES, "optimizer", 6),
    "unsaved": (TWO_UPDATES, "optimizer", 8),
}
"""Flags, what fails, and at which call of it."""


@pytest.fixture(scope="module")
def lines(workshop) -> dict[str, str]:
    """The last line of every case; then the cases are resumed, beside runs that nothing befell."""
    jobs = [(workshop.rl(name, **flags), where, call) for name, (flags, where, call) in CASES.items()]
    (outcomes,) = run_ranks("tests.support.memory_runs:failing_runs", 1, runs=jobs)
    found = {}
    for name, (code, output) in zip(CASES, outcomes, strict=True):
        assert code == 1, output
        assert "Traceback" not in output
        (found[name],) = [line for line in output.splitlines() if "out of memory in" in line]
        facts = facts_of(workshop.run_dir(name))
        assert facts["status"] == "failed"
        assert facts["error"] in found[name]
        assert not list(workshop.run_dir(name).glob("checkpoints/*.tmp"))
    found["saved"] = {name: latest(workshop.run_dir(name)) for name in CASES}
    resumed = [workshop.rl(name, **CASES[name][0], resume=True) for name in ("rollout", "update", "half done")]
    for outcome in run_many([workshop.rl("whole"), workshop.rl("whole two", **TWO_UPDATES), *resumed]):
        outcome.check()
    return found


@pytest.fixture(scope="module")
def two_ranks(workshop) -> list[str]:
    """The last lines of both ranks; memory runs out on rank 0 in the third rollout. Then the run is resumed."""
    jobs = [(workshop.rl("two ranks"), "rollout", 2 * PROMPTS // 2 + 1)]
    ranks = run_ranks("tests.support.memory_runs:failing_runs", 2, runs=jobs)
    whole, resumed = run_many([workshop.rl("two whole"), workshop.rl("two ranks", resume=True)], ranks=2)
    whole.check()
    resumed.check()
    assert [code for ((code, _),) in ranks] == [1, 1]
    return [output.splitlines()[-1] for ((_, output),) in ranks]


def test_on_one_stage_the_other_does_not_wait_for_ever(workshop) -> None:
    """It is amid the rollout; far sooner than --distributed-timeout-minutes it has seen that the first has ended."""
    jobs = [(workshop.rl("stages", pipeline_model_parallel_size=2, save_interval=1), "rollout", PROMPTS + 1)]
    ((code, output),), ((other_code, other),) = run_ranks("tests.support.memory_runs:failing_runs", 2, runs=jobs)
    assert [code, other_code] == [1, 1]
    assert "out of memory in a rollout (CUDA out of memory" in output.splitlines()[-1]
    assert "another rank has ended" in other.splitlines()[-1]


def saved_step(line: str) -> int:
    """Some step, but not the last one."""
    saved = int(line.partition(" is saved")[0].split()[-1])
    assert saved in (1, 2, 3)
    return saved


def latest(run_dir: Path) -> str:
    pointer = run_dir / "checkpoints" / "latest"
    return pointer.read_text().strip() if pointer.exists() else "none"


def test_in_a_rollout(workshop, lines) -> None:
    """The steps before it are saved, and the resumed run ends as if nothing had been."""
    line = lines["rollout"]
    assert "out of memory in a rollout (CUDA out of memory. Tried to allocate 2.00 GiB." in line
    for flag in ("-batch-size (16)", "buffer-size-gb (not given)", "--rl-max-new-tokens (16)"):
        assert flag in line
    assert "--rl-offload" not in line, "it is given already"
    assert line.endswith(" is saved, and --resume goes on from there")
    assert lines["saved"]["rollout"] == f"step_{saved_step(line):07d}"
    assert rows_of(workshop.run_dir("rollout")) == rows_of(workshop.run_dir("whole"))
    assert differences(workshop.run_dir("rollout") / LAST, workshop.run_dir("whole") / LAST) == []


def test_in_an_update(workshop, lines) -> None:
    line = lines["update"]
    assert "out of memory in an update (can't allocate memory: you tried to allocate 1152921504606846976 bytes" in line
    assert "lower --rl-sequence-packing-bin-size (96) or --micro-batch-size (2), or recompute layers" in line
    assert lines["saved"]["update"] == f"step_{saved_step(line):07d}"
    assert differences(workshop.run_dir("update") / LAST, workshop.run_dir("whole") / LAST) == []


def test_after_the_first_of_two_updates_the_weights_are_no_steps(workshop, lines) -> None:
    """The second update of step 3 is half done. The checkpoint of step 2 stays what it was."""
    assert lines["half done"].endswith("--resume goes on from step 2")
    assert lines["saved"]["half done"] == "step_0000002"
    assert differences(workshop.run_dir("half done") / LAST, workshop.run_dir("whole two") / LAST) == []


def test_weights_between_two_steps_are_not_saved(lines) -> None:
    assert lines["unsaved"].endswith(
        "step 3 is not saved, the weights have changed since: --resume goes on from step 2"
    )
    assert lines["saved"]["unsaved"] == "step_0000002"


def test_in_the_first_step_there_is_nothing_to_save(lines) -> None:
    assert lines["first"].endswith("; no step was finished")
    assert "give --rl-offload-optimizer-during-inference" in lines["first"]
    assert lines["saved"]["first"] == "none"


def test_ranks_with_whole_models_save_together(workshop, two_ranks) -> None:
    """Both leave by the same error, and the one that had memory says that it was not its own."""
    assert "(CUDA out of memory. Tried to allocate 2.00 GiB." in two_ranks[0]
    assert "out of memory in a rollout (on another rank)" in two_ranks[1]
    assert all(line.endswith(" is saved, and --resume goes on from there") for line in two_ranks)
    assert saved_step(two_ranks[0]) == saved_step(two_ranks[1])
    ended, whole = workshop.run_dir("two ranks"), workshop.run_dir("two whole")
    assert rows_of(ended) == rows_of(whole)
    assert differences(ended / LAST, whole / LAST) == []
