"""Checkpoints of adapters know no layout: a run of two ranks goes on on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.platform.groups import ParallelGroups
from tests.distributed.lora_programs import adapters, begin_or_go_on, lora_config, train
from tests.support.ranks import run_ranks

EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 24}
TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "tensor": {
        "dense": TENSOR | {"use_distributed_optimizer": True},
        "experts": TENSOR | EXPERTS,
        "single experts": TENSOR | EXPERTS | {"no_moe_grouped_gemm": True},
    },
    "experts": {"distributed": EXPERTS | {"expert_model_parallel_size": 2, "use_distributed_optimizer": True}},
}
OF_LAYOUT = frozenset({*TENSOR, "expert_model_parallel_size"})


@pytest.mark.parametrize("layout", CASES)
def test_one_rank_goes_on_where_two_stopped(one_rank: ParallelGroups, tmp_path: Path, layout: str) -> None:
    cases = CASES[layout]
    run_ranks("tests.distributed.lora_programs:save_between_two_updates", 2, folder=str(tmp_path), cases=cases)
    for name, changes in cases.items():
        own = {flag: value for flag, value in changes.items() if flag not in OF_LAYOUT}
        policy, start, _ = begin_or_go_on(lora_config(tmp_path / name, 1, resume=True, **own), one_rank)
        assert start.saved.step == 1
        train(policy, start, one_rank)
        expected: dict[str, torch.Tensor] = {}
        for rank in (0, 1):
            expected |= torch.load(tmp_path / f"{name}.{rank}.pt", weights_only=True)
        found = adapters(policy, one_rank)
        assert found.keys() == expected.keys()
        for adapter, values in found.items():
            torch.testing.assert_close(values, expected[adapter], rtol=0, atol=2e-5, msg=f"{name}: {adapter}")
