"""The page of a replay: tokens in the colour of the chosen number, beside those that are in no loss."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.cli.replay import Choice
from megatron_rl.cli.replay_page import MEASURES, replay_page
from megatron_rl.cli.replay_step import Replayed, TokenInLoss
from tests.support.pages import NODE, shown_by
from tests.support.rollouts import drawn, group_of, sample_of

pytestmark = pytest.mark.skipif(NODE is None, reason="needs node, to run the page's script")


def token(sample: int, sequence: int, old: float, gradient: float) -> TokenInLoss:
    return TokenInLoss(0, sample, sequence, -1.0, old, 1.0, 1.0, (-1.0) ** sample, -0.25, gradient)


def shown(tmp_path: Path, sample: int | None) -> dict[str, Any]:
    """Sample 0 wrote "a", read "b" and wrote "c"; sample 1 has a second sequence, "d"."""
    read = drawn([0, 1, 2], environment_spans=((1, 2),))
    group = group_of(sample_of(1.0, ([9], read)), sample_of(0.0, ([9], drawn([2])), ([9, 2, 1], drawn([3]))))
    tokens = [token(0, 0, -1.0, 4.0), token(0, 0, -3.0, 1.0), token(1, 0, 0.0, 2.0), token(1, 1, -1.0, 0.0)]
    own = [one for one in tokens if sample in (None, one.sample)]
    found = Replayed([group], {}, 0, 4, own, {"layer 0": 0.5, "all": 0.5})
    page = tmp_path / "page.html"
    text = replay_page(
        "runs/mine", Choice(step=7, sample=sample), found, lambda ids: "".join("abcd     <"[one] for one in ids),
        [("actor/pg_loss", "1", "1")],
    )  # fmt: skip
    page.write_text(text)
    return shown_by(page)


def test_each_number_has_its_colours(tmp_path: Path) -> None:
    page = shown(tmp_path, None)
    assert page["header"].startswith("mine, step 7, replayed") and "denominator of its loss is 4" in page["header"]
    assert page["steps"] == [name for name, *_ in MEASURES] and page["opened"] == "gradient"
    colours = {name: [_signed(each) for each in view["backgrounds"]] for name, view in page["views"].items()}
    assert colours["gradient"] == [[1.0, 0.25], [0.5, 0.0]], "of the largest, 4"
    assert colours["log-prob, trainer - engine"] == [[0.0, -1.0], [0.5, 0.0]], "of 2 nats"
    assert colours["advantage"] == [[1.0, 1.0], [-1.0, -1.0]]
    assert page["views"]["gradient"]["coloured"] == [["a", "c"], ["c", "d"]]
    assert page["views"]["gradient"]["environment"] == ["b"]
    assert "layer 00.5" in page["run"] and "actor/pg_loss11" in page["run"]


def test_one_sample_alone(tmp_path: Path) -> None:
    view = shown(tmp_path, 1)["views"]["gradient"]
    assert [_signed(each) for each in view["backgrounds"]] == [[1.0, 0.0]]
    assert "2 samples" in view["groups"][0], "what the group's rewards were is still said"


def _signed(backgrounds: list[str]) -> list[float]:
    found = [re.fullmatch(r"rgba\(var\(--(heat|cool)\), ([\d.]+)\)", one).groups() for one in backgrounds]
    return [round(float(share) / 0.85, 2) * (1 if kind == "heat" else -1) for kind, share in found]
