"""The tolerances are tight enough: told a slightly different setting, the oracle disagrees with the product."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.oracles.product import Run

OTHERWISE: dict[str, tuple[str, dict[str, Any]]] = {
    "epsilon": ("plain", {"adam_eps": 1.01e-3}),
    "temperature": ("plain", {"rl_temperature": 0.701}),
    "denominator": ("kl", {"rl_loss_aggregation": "token-mean"}),
    "decay": ("plain", {"weight_decay": 0.09}),
    "clipping": ("plain", {"clip_grad": 0.99}),
    "second_moment": ("entropy", {"adam_beta2": 0.998}),
    "entropy_sign": ("entropy", {"grpo_entropy_term_weight": -0.1}),
    "clip_range": ("entropy", {"grpo_clamp_eps_upper": 0.051}),
    "estimator": ("kl", {"rl_kl_estimator": "k2"}),
    "dual_clip": ("kl", {"rl_dual_clip": 1.06}),
    "correction": ("int8", {"rl_correction_upper": 1.006}),
    "length": ("talk", {"rl_max_new_tokens": 8}),
    "baseline": ("rare", {"rl_advantage": "grpo"}),
}
QUICK = ("epsilon", "temperature", "denominator", "correction")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.long) for n in OTHERWISE])
def test_another_setting_is_seen(quick: dict[str, Run], name: str) -> None:
    case, changes = OTHERWISE[name]
    assert quick[case].differences(**changes) != []


def test_another_rotary_scaling_is_seen(quick: dict[str, Run], tmp_path: Path) -> None:
    run, other = quick["kl"], tmp_path / "model"
    shutil.copytree(run.model, other)
    config = json.loads((other / "config.json").read_text())
    config["rope_parameters"]["factor"] = 4.0
    (other / "config.json").write_text(json.dumps(config))
    assert replace(run, model=other).differences() != []
