"""The fused optimizer's state through a checkpoint on one GPU. Run with: bash tests/run.sh tests/gpu

On a GPU its step counters lie on the device, and megatron-core loads one on the host for all parameters.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.test_gpu_memory import KINDS, _train
from tests.support.samples import tiny_optimization, weights_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("changes", KINDS, ids=["replicated", "distributed"])
def test_training_goes_on_from_a_checkpoint_to_the_bit(one_rank, tmp_path: Path, changes: dict[str, bool]) -> None:
    from megatron_rl.checkpoint.saving import SaveAttempt
    from megatron_rl.checkpoint.tensors import load, save_tensors

    whole, resumed = tiny_optimization(**changes), tiny_optimization(**changes)
    for seed in range(2):
        _train(one_rank, whole, seed)
    with SaveAttempt(tmp_path, is_main=True).collective_part():  # as in a run, where nothing is forked
        save_tensors(tmp_path, whole.policy, whole)
    load(tmp_path, resumed.policy, resumed)
    for seed in range(2, 4):
        for optimization in (whole, resumed):
            _train(one_rank, optimization, seed)
        pairs = zip(weights_of(whole.policy), weights_of(resumed.policy), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    steps = [
        values["step"].item()
        for part in resumed.optimizer.chained_optimizers
        for values in part.optimizer.state.values()
        if "step" in values
    ]
    assert set(steps) <= {4.0}


@pytest.mark.parametrize("changes", KINDS, ids=["replicated", "distributed"])
def test_a_save_in_the_background_has_the_weights_as_they_were(
    one_rank, tmp_path: Path, changes: dict[str, bool]
) -> None:
    from megatron_rl.checkpoint.saving import BackgroundSave, SaveAttempt
    from megatron_rl.checkpoint.tensors import load, save_tensors

    whole, resumed = tiny_optimization(**changes), tiny_optimization(**changes)
    for seed in range(2):
        _train(one_rank, whole, seed)
    saved, attempt = weights_of(whole.policy), SaveAttempt(tmp_path, is_main=True)
    with attempt.collective_part():
        request = save_tensors(tmp_path, whole.policy, whole, in_background=True)
    save = BackgroundSave(request, attempt, None, on_cuda=True)
    _train(one_rank, whole, 2)
    save.go_on(wait=True)
    load(tmp_path, resumed.policy, resumed)
    assert all(torch.equal(a, b) for a, b in zip(weights_of(resumed.policy), saved, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(weights_of(whole.policy), saved, strict=True))
