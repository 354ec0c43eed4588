"""RL runs and evaluations on pipeline stages: as on one rank."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.runs import rows_of, run_many
from tests.support.tiny import LATENT

STAGES = {"pipeline_model_parallel_size": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "stages": STAGES,
    "uneven": STAGES | {"decoder_last_pipeline_num_layers": 1},
    "virtual": STAGES | {"num_layers_per_virtual_pipeline_stage": 1},
}
MODEL = {
    "train_iters": 2, "num_layers": 4, "log_params_norm": True, "eval_interval": 2, "rl_prompts_per_eval": 3,
    "rl_samples_per_eval_prompt": 2, "global_batch_size": 16, "rl_keep_zero_variance_groups": True,
    "clip_grad": 0.0,
}  # fmt: skip
"""Not clipped: the norm of stages adds up in another order."""
ROUNDED = {"rl_kv_cache_dtype": "bf16"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "stages": ("plain", {}),
    "virtual": ("plain", {}),
    "uneven": ("penalised", {"untie_embeddings_and_output_weights": None, "grpo_kl_beta": 0.05, "grpo_iterations": 2}),
    "stages_int8": ("int8", {"rl_rollout_quantization": "int8", "rl_correction": "token_tis", **ROUNDED}),
}
"""The layout, and what it is compared with: one rank with the same flags."""
LONG = {"stages"}
"""With --long alone: the others have two stages of whole models too."""
MEASURED = ("val/", "critic/", "actor/", "rollout", "response_length", "training/rollout", "parity/")


@pytest.fixture(scope="module")
def runs(with_long: bool, workshop: Any) -> dict[str, Any]:
    """Each case on one rank and on its stages, and an evaluation of what the first has learned; outcomes by name."""
    ones, twos = {}, {}
    left_out = set() if with_long else LONG
    for case, (wanted, flags) in CASES.items():
        if case in left_out:
            continue
        layout = LAYOUTS[case.partition("_")[0]]
        ones[f"rl_{wanted}"] = workshop.rl(f"rl_{wanted}", **MODEL, **flags)
        twos[f"rl_{case}"] = workshop.rl(f"rl_{case}", **MODEL, **layout, **flags)
    latent = {name: value or None for name, value in LATENT.items()}
    smooth = MODEL | latent | STAGES | {"num_layers": 4, "rl_rollout_quantization": "int8_smooth", "train_iters": 1}
    twos["smooth"] = workshop.rl("smooth", **smooth)
    alone = {name: value for name, value in MODEL.items() if name.startswith(("num", "rl_prompts", "rl_samples"))}
    alone |= {"perform_rl_step": None, "eval_only": True, "load": workshop.run_dir("rl_plain") / "checkpoints"}
    alone |= dict.fromkeys(("grpo_group_size", "grpo_prompts_per_step", "train_iters"))
    ones["alone_one"] = workshop.rl("alone_one", **alone)
    twos["alone_stages"] = workshop.rl("alone_stages", **alone, **STAGES)
    outcomes = {}
    for commands, ranks in ((ones, 1), (twos, 2)):
        outcomes |= zip(commands, run_many(list(commands.values()), ranks), strict=True)
    for outcome in outcomes.values():
        outcome.check()
    return outcomes


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.long if case in LONG else []) for case in CASES])
def test_an_rl_run_is_that_of_one_rank(runs: dict[str, Any], workshop: Any, case: str) -> None:
    own, one = rows_of(workshop.run_dir(f"rl_{case}")), rows_of(workshop.run_dir(f"rl_{CASES[case][0]}"))
    assert len(own) == len(one) == 3
    for row, wanted in zip(own, one, strict=True):
        assert row.keys() == wanted.keys()
        names = [name for name in wanted if name.startswith(MEASURED)]
        assert names
        for name in names:
            assert row[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-5), name


def test_an_evaluation_is_that_of_one_rank(runs: dict[str, Any], workshop: Any) -> None:
    own, one = ((workshop.run_dir(f"alone_{name}") / "evaluation.json").read_text() for name in ("stages", "one"))
    assert own == one


def test_calibrated_copies_are_what_the_trainer_would_compute(runs: dict[str, Any], workshop: Any) -> None:
    """Not compared with one rank: what idle rows compute counts in a calibration. Absorption is told apart."""
    row = rows_of(workshop.run_dir("smooth"))[1]
    assert row["parity/emulation_gap_mean"] < 1e-6 < row["parity/gap_mean"]
    assert row["parity/absorption_gap_mean"] < 1e-6
    assert not any("absorption" in name for name in rows_of(workshop.run_dir("rl_int8"))[1]), "it has no latents"


def test_the_table_of_the_first_rollout_has_all_stages(runs: dict[str, Any], workshop: Any) -> None:
    paths = (workshop.run_dir(name) / "quantization.json" for name in ("rl_stages_int8", "rl_int8"))
    own, one = (json.loads(path.read_text())["layers"] for path in paths)
    assert [row["layer"] for row in own] == [row["layer"] for row in one]
    assert len(own) == 16
