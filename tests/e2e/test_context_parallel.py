"""RL runs whose ranks share each training sequence: as those of two replicas, and each rank generates.

Without ``--long``, tests/distributed/test_layouts.py has their updates, test_stages.py their int8 rollouts, and
test_resume.py whole runs that other layouts go on with.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.runs import Outcome, rows_of, run_many

pytestmark = pytest.mark.long
MODEL = {
    "log_params_norm": True, "eval_interval": 2, "rl_prompts_per_eval": 3, "rl_samples_per_eval_prompt": 2,
    "global_batch_size": 8, "rl_keep_zero_variance_groups": True, "clip_grad": 0.0, "rl_mismatch_interval": 1,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "moe_ffn_hidden_size": 24, "add_qkv_bias": None, "qk_layernorm": True, "rl_router_replay": True,
}  # fmt: skip
CONTEXT = {"context_parallel_size": 2}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "penalised": ({"grpo_kl_beta": 0.05, "grpo_iterations": 2, "rl_fused_output_layer": True}, CONTEXT),
    "int8": ({"rl_rollout_quantization": "int8", "rl_correction": "token_tis", "rl_kv_cache_dtype": "bf16"}, CONTEXT),
    "shared experts, replayed": (EXPERTS, CONTEXT | {"expert_model_parallel_size": 2}),
}
"""Flags of both runs, and what one of them has besides."""
STEPS = {"int8": 2}
"""How many are compared: the last bits of an update decide how a few weights are rounded."""
MEASURED = ("val/", "critic/", "actor/", "rollout", "response_length", "training/rollout", "parity/")


@pytest.fixture(scope="module")
def runs(workshop: Any) -> dict[str, Outcome]:
    commands = {}
    for case, (flags, layout) in CASES.items():
        commands[case] = workshop.rl(case, **MODEL, **flags)
        commands[f"{case}, context"] = workshop.rl(f"{case}, context", **MODEL, **flags, **layout)
    outcomes = dict(zip(commands, run_many(list(commands.values()), 2), strict=True))
    for outcome in outcomes.values():
        outcome.check()
    return outcomes


@pytest.mark.parametrize("case", CASES)
def test_a_run_is_that_of_two_replicas(runs: dict[str, Outcome], workshop: Any, case: str) -> None:
    own, replicas = rows_of(workshop.run_dir(f"{case}, context")), rows_of(workshop.run_dir(case))
    assert len(own) == len(replicas) == 5
    for row, wanted in list(zip(own, replicas, strict=True))[: STEPS.get(case, 4) + 1]:
        assert row.keys() == wanted.keys()
        names = [name for name in wanted if name.startswith(MEASURED)]
        assert names
        for name in names:
            assert row[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-5), (name, wanted["step"])
