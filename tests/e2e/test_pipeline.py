"""Runs on pipeline stages, sequences and experts over ranks: as on one rank, and checkpoints move among layouts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.runs import copy_as_of, facts_of, rows_of, run_many

STAGES = {"pipeline_model_parallel_size": 2}
DISTRIBUTED = {"use_distributed_optimizer": True}
EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 24, "qk_layernorm": True, "disable_bias_linear": True}
SHARED = {"expert_model_parallel_size": 2}
CONTEXT = {"context_parallel_size": 2}
Layouts = dict[str, tuple[int, dict[str, Any]]]
"""Name -> ranks and flags."""
VIRTUAL = STAGES | {"num_layers_per_virtual_pipeline_stage": 1}
OF_STAGES: Layouts = {
    "one": (1, {}),
    "stages": (2, STAGES),
    "context": (2, CONTEXT),
    "uneven": (2, STAGES | {"decoder_last_pipeline_num_layers": 1}),
    "virtual": (2, VIRTUAL),
}
LOOP = {"no_moe_grouped_gemm": True}
OF_EXPERTS: Layouts = {
    "one": (1, {}), "stages": (2, STAGES), "shared": (2, SHARED), "context": (2, CONTEXT | SHARED),
}  # fmt: skip
OF_LOOPS: Layouts = {"one": (1, {}), "loop": (2, SHARED | LOOP)}
STAGES_MOVED = [
    ("stages", "one"), ("one", "stages"), ("virtual", "uneven"), ("uneven", "virtual"), ("context", "one"),
    ("one", "context"), ("context", "stages"),
]  # fmt: skip
TIED_MOVED = [("stages", "one"), ("one", "stages"), ("virtual", "uneven"), ("context", "stages")]
EXPERTS_MOVED = [
    ("shared", "one"), ("one", "shared"), ("shared", "stages"), ("stages", "shared"), ("shared", "shared"),
    ("context", "stages"),
]  # fmt: skip
LOOPS_MOVED = [("loop", "one"), ("one", "loop"), ("loop", "loop")]
MODELS: dict[str, tuple[dict[str, Any], Layouts, list[tuple[str, str]]]] = {
    "few": (
        DISTRIBUTED, {"one": (1, {}), "context": (2, CONTEXT), "virtual": (2, VIRTUAL)},
        [("one", "virtual"), ("virtual", "one"), ("context", "virtual")],
    ),
    "few experts": (
        EXPERTS, {"one": (1, {}), "stages": (2, STAGES), "loop": (2, SHARED | LOOP)},
        [("one", "loop"), ("loop", "one"), ("stages", "loop"), ("loop", "loop")],
    ),
    "untied": (DISTRIBUTED, OF_STAGES, STAGES_MOVED),
    "tied": (DISTRIBUTED | {"untie_embeddings_and_output_weights": None}, OF_STAGES, TIED_MOVED),
    "experts": (DISTRIBUTED | EXPERTS, OF_EXPERTS, EXPERTS_MOVED),
    "experts, whole optimizer": (EXPERTS, OF_EXPERTS, EXPERTS_MOVED),
    "loops": (DISTRIBUTED | EXPERTS, OF_LOOPS, LOOPS_MOVED),
    "loops, whole optimizer": (EXPERTS, OF_LOOPS, LOOPS_MOVED),
}
"""Flags, layouts, and pairs of them: saved by the first after 2 of 4 steps, and gone on with by the second."""
NUMBERS = ("train/loss", "actor/grad_norm", "actor/params_norm", "perf/total_num_tokens")


QUICK = {"few", "few experts"}
"""The others, in which these are contained, take ``--long``."""


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[] if name in QUICK else [pytest.mark.long]) for name in MODELS]
)
def runs(request: pytest.FixtureRequest, workshop: Any) -> str:
    """Whole runs of one of `MODELS`, and their second halves where another layout goes on."""
    kind, (flags, layouts, moved) = request.param, MODELS[request.param]
    model = {"num_layers": 4, "log_params_norm": True, "untie_embeddings_and_output_weights": True} | flags

    def start(commands: dict[str, list[str]], ranks: int) -> None:
        for outcome in run_many(list(commands.values()), ranks):
            outcome.check()

    for ranks in (1, 2):
        started = {
            f"{layout}_{kind}": workshop.supervised(f"{layout}_{kind}", **model, **sizes, save_interval=2)
            for layout, (size, sizes) in layouts.items()
            if size == ranks
        }
        start(started, ranks)
    for ranks in (1, 2):
        resumed = {}
        for saved, layout in moved:
            size, sizes = layouts[layout]
            if size == ranks:
                name = f"{saved}_{layout}_{kind}"
                copy_as_of(2, workshop.run_dir(f"{saved}_{kind}"), workshop.run_dir(name))
                resumed[name] = workshop.supervised(name, **model, **sizes, resume=True)
        start(resumed, ranks)
    return kind


def test_the_same_numbers_in_every_layout(runs: str, workshop: Any) -> None:
    one = rows_of(workshop.run_dir(f"one_{runs}"))
    _, layouts, moved = MODELS[runs]
    names = [f"{layout}_{runs}" for layout in layouts] + [f"{a}_{b}_{runs}" for a, b in moved]
    for name in names:
        assert facts_of(workshop.run_dir(name))["status"] == "finished"
        rows = rows_of(workshop.run_dir(name))
        assert len(rows) == len(one) == 4
        for own, wanted in zip(rows, one, strict=True):
            for number in NUMBERS:
                assert own[number] == pytest.approx(wanted[number], rel=1e-4, abs=1e-5), (name, number)
    for layout in (saved for saved, resumed in moved if saved == resumed):
        whole, resumed = (rows_of(workshop.run_dir(name)) for name in (f"{layout}_{runs}", f"{layout}_{layout}_{runs}"))
        assert resumed == whole
