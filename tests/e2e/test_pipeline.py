"""Supervised runs on pipeline stages: as on one rank, and checkpoints go from one layout to another."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from tests.support.runs import facts_of, rows_of, run_many

MODEL = {"num_layers": 4, "use_distributed_optimizer": True, "log_params_norm": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "stages": {"pipeline_model_parallel_size": 2},
    "uneven": {"pipeline_model_parallel_size": 2, "decoder_last_pipeline_num_layers": 1},
    "virtual": {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1},
}
RESUMED = [("stages", "one"), ("one", "stages"), ("virtual", "uneven"), ("uneven", "virtual")]
"""Saved by the first after 2 of 4 steps, and gone on with by the second."""
NUMBERS = ("train/loss", "actor/grad_norm", "actor/params_norm", "perf/total_num_tokens")


def ranks_of(layout: str) -> int:
    return LAYOUTS[layout].get("pipeline_model_parallel_size", 1)


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def runs(request: pytest.FixtureRequest, workshop: Any) -> str:
    """Whole runs, first halves, and halves that another layout goes on with; the end of their names."""
    suffix = "tied" if request.param else "untied"
    model = MODEL | {"untie_embeddings_and_output_weights": None if request.param else True}

    def start(commands: dict[str, list[str]], ranks: int) -> None:
        for outcome in run_many(list(commands.values()), ranks):
            outcome.check()

    def commands(ranks: int) -> dict[str, list[str]]:
        found = {}
        for layout in (name for name in LAYOUTS if ranks_of(name) == ranks):
            for half in (False, True):
                name = f"{layout}_{'half' if half else 'whole'}_{suffix}"
                stop = {"exit_interval": 2} if half else {}
                found[name] = workshop.supervised(name, **model, **LAYOUTS[layout], **stop)
        return found

    start(commands(1), 1)
    start(commands(2), 2)
    for ranks in (1, 2):
        resumed = {}
        for saved, layout in (pair for pair in RESUMED if ranks_of(pair[1]) == ranks):
            name = f"{saved}_{layout}_{suffix}"
            shutil.copytree(workshop.run_dir(f"{saved}_half_{suffix}"), workshop.run_dir(name))
            resumed[name] = workshop.supervised(name, **model, **LAYOUTS[layout], resume=True)
        start(resumed, ranks)
    return suffix


def test_the_same_numbers_in_every_layout(runs: str, workshop: Any) -> None:
    one = rows_of(workshop.run_dir(f"one_whole_{runs}"))
    names = [f"{layout}_whole_{runs}" for layout in LAYOUTS] + [f"{a}_{b}_{runs}" for a, b in RESUMED]
    for name in names:
        assert facts_of(workshop.run_dir(name))["status"] == "finished"
        rows = rows_of(workshop.run_dir(name))
        assert len(rows) == len(one) == 4
        for own, wanted in zip(rows, one, strict=True):
            for number in NUMBERS:
                assert own[number] == pytest.approx(wanted[number], rel=1e-4, abs=1e-5), (name, number)
