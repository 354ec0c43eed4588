"""A save while the optimizer's state waits on the host: it comes home first."""

from __future__ import annotations

from pathlib import Path

from megatron_rl.checkpoint.manager import CheckpointManager
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.run.memory.holdings import state_storages
from tests.support.checkpoints import contents, differences
from tests.support.saves import saving_run, train_a_step
from tests.support.tiny import tiny_config
from tests.unit.checkpoint.test_damage import SUPERVISED


def test_it_is_the_save_of_the_step(one_rank: ParallelGroups, tmp_path: Path) -> None:
    flags = SUPERVISED | {"bf16": True, "rl_offload_optimizer_during_inference": True}
    run = saving_run(tiny_config(**flags), one_rank, tmp_path)
    train_a_step(run)
    saved = {}
    for name in ("between", "amid"):
        run.checkpoints = CheckpointManager(tmp_path / name, 0, one_rank)
        if name == "between":
            run.save(final=True)
        else:
            with run.phases.rollouts(quantized=False):
                assert state_storages(run.optimization) == []
                run.save(final=True)
                assert state_storages(run.optimization)
        (saved[name],) = [path for path in (tmp_path / name).iterdir() if path.is_dir()]
    run.closing.close()
    assert any("exp_avg" in key for key in contents(saved["amid"]))
    assert differences(saved["between"], saved["amid"]) == []
