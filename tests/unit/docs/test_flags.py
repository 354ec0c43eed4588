"""Every flag that a page for users names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_rl.cli.first_run import FirstRun
from megatron_rl.config.flags import flags_of
from megatron_rl.config.no_effect import no_effect
from megatron_rl.config.rl_config import all_spellings

DOCS = Path(__file__).parents[3] / "docs"
DECLARED = (*all_spellings(), *(spelling for flag in flags_of(FirstRun) for spelling in flag.spellings))
KNOWN = {f"--{spelling}" for spelling in (*DECLARED, *no_effect())}
OF_LAUNCHERS = {
    "--nproc", "--nproc-per-node", "--nnodes", "--node-rank", "--master-addr", "--master-port", "--help-all",
    "--logdir", "--nodes", "--signal", "--requeue", "--kill-on-bad-exit", "--input-dir", "--output-dir",
    "--prompts", "--output", "--temperature",
}  # fmt: skip
"""Of torchrun, Slurm, TensorBoard, and of commands besides training."""
NOT_TAKEN = {"--data-path"}
"""Megatron-LM's, which the page tells what to use in place of."""
PAGES = (
    "tutorial", "concepts", "troubleshooting", "multi_node", "coming_from", "hyperparameters", "glossary", "extending",
)  # fmt: skip


def named(text: str) -> set[str]:
    """Flags, but not the ends of links such as ``algorithms.md#dynamic-sampling---rl-dynamic-sampling``."""
    return set(re.findall(r"(?<![\w\-#])--[a-z][a-z0-9-]*[a-z0-9]", re.sub(r"\]\([^)]*\)", "]", text)))


@pytest.mark.parametrize("page", PAGES)
def test_flags_are_there(page: str) -> None:
    assert named((DOCS / f"{page}.md").read_text(encoding="utf-8")) - KNOWN - OF_LAUNCHERS - NOT_TAKEN == set()


def test_each_row_for_people_of_another_trainer_names_something_of_ours() -> None:
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|", (DOCS / "coming_from.md").read_text(encoding="utf-8"), re.MULTILINE)
    ours = [right for _, right in rows if right.strip() not in ("here", "–")]
    assert len(ours) > 60
    assert [text for text in ours if not named(text)] == []
