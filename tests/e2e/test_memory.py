"""Optimizer state that waits on the host during rollouts; the KV cache's size and residency, as the log tells them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.checkpoints import differences
from tests.support.runs import Outcome, rows_of, run_many

OFFLOAD = "rl_offload_optimizer_during_inference"
LAST = Path("checkpoints") / "step_0000004"
KINDS = {
    "fp32": {},
    "bf16": {
        "bf16": True, "use_distributed_optimizer": True, "eval_interval": 2, "rl_prompts_per_eval": 4,
        "save_interval": 2,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(workshop) -> dict[str, Outcome]:
    """Each kind without the flag, with it, and with it from two halves."""
    commands = {}
    for kind, flags in KINDS.items():
        commands[kind] = workshop.rl(kind, **flags)
        commands[f"{kind} away"] = workshop.rl(f"{kind} away", **flags, **{OFFLOAD: True}, async_save=True)
        commands[f"{kind} first"] = workshop.rl(f"{kind} halves", **flags, **{OFFLOAD: True}, exit_interval=2)
        commands[f"{kind} second"] = workshop.rl(f"{kind} halves", **flags, **{OFFLOAD: True}, resume=True)
    return dict(zip(commands, run_many(list(commands.values())), strict=True))


def _away(outcome: Outcome) -> list[str]:
    """MiB of optimizer state on the host, every time it was told."""
    return re.findall(r"during rollouts (\S+) MiB of optimizer state wait on the host", outcome.check().output)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["away", "halves"])
def test_a_run_ends_with_the_same_bits(outcomes, workshop, kind: str, how: str) -> None:
    for outcome in outcomes.values():
        outcome.check()
    whole, other = workshop.run_dir(kind), workshop.run_dir(f"{kind} {how}")
    assert rows_of(other) == rows_of(whole)
    assert differences(other / LAST, whole / LAST) == []


def test_a_save_in_the_background_is_not_of_what_has_left(outcomes, workshop) -> None:
    """Its files are written while the next rollout has the state on the host."""
    halfway = LAST.with_name("step_0000002")
    assert differences(workshop.run_dir("bf16 away") / halfway, workshop.run_dir("bf16") / halfway) == []


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_flag_nothing_is_moved(outcomes, kind: str) -> None:
    assert _away(outcomes[kind]) == []


def test_moments_leave_once_they_are_there(outcomes) -> None:
    """bf16 has fp32 main parameters from the start; two moments come with the first update."""
    assert _away(outcomes["fp32 away"])[0] == "0.00"
    main, everything = map(float, _away(outcomes["bf16 away"]))
    assert everything == pytest.approx(3 * main, abs=0.02)
    assert main > 0


@pytest.mark.parametrize(
    ("first", "second"),
    [("fp32 away", "fp32 second"), ("bf16 away", "bf16 second")],
)
def test_all_that_a_resume_has_loaded_leaves_too(outcomes, first: str, second: str) -> None:
    assert _away(outcomes[second]) == _away(outcomes[first])[-1:]


def test_the_cache_is_told_in_one_line(outcomes) -> None:
    lines = [line for line in outcomes["fp32"].check().output.splitlines() if "KV cache: " in line]
    (line,) = lines
    assert "for 16 of 16 sequences at once (the largest batch)" in line
    assert "the cache stays meanwhile" in line
