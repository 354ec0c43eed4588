"""Whole toy runs: the bytes that each phase holds are the estimate's, and what has left changes no number."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.checkpoint.manager import CheckpointManager
from megatron_rl.loop import RLRun, rl_step
from megatron_rl.platform import current_platform
from megatron_rl.platform.device import DeviceMemory
from megatron_rl.platform.groups import ParallelGroups, initialize, shut_down
from megatron_rl.run.memory.estimate import estimate
from megatron_rl.run.memory.holdings import size_of
from megatron_rl.run.training import record_updates
from tests.support.checkpoints import differences
from tests.support.quantized import held_bytes
from tests.support.ranks import run_ranks
from tests.support.samples import all_equal, weights_of
from tests.support.tiny import VOCABULARY, single_thread, tiny_config
from tests.support.toy import toy_run

SHARDED = {
    "bf16": True, "use_distributed_optimizer": True, "rl_rollout_quantization": "fp8",
    "hidden_size": 128, "ffn_hidden_size": 256, "rl_quantization_skip": "last:1", "num_layers": 3,
    "rl_max_new_tokens": 12,
}  # fmt: skip
"""As on a GPU: rollouts that do not read the weights, and an optimizer that can make them again."""
VARIANTS: dict[str, dict[str, Any]] = {
    "everything leaves": {},
    "state waits on the host": {"rl_offload_optimizer_during_inference": True},
    "weights stay": {"rl_keep_in_rollouts": ("weights",)},
    "all stays": {"rl_keep_in_rollouts": ("weights", "gradients")},
    "overlapped": {"overlap_grad_reduce": True, "overlap_param_gather": True},
    "calibrated": {"rl_rollout_quantization": "int8_smooth"},
    "critic": {"rl_advantage": "gae"},
    "critic waits on the host": {"rl_advantage": "gae", "rl_offload_optimizer_during_inference": True},
    "aligned": {"rl_train_forward": "quantized", "grpo_kl_beta": 0.1},
}


def held_by(run: RLRun) -> dict[str, int]:
    """Bytes on the device now, by the estimate's names; without activations and logits."""
    training, cache, teacher = run.phases.training, run.phases.cache, run.trainer.teacher
    return {
        "weights": size_of(training.weights.storages),
        "gradients": size_of(training.policy.gradients.storages),
        "optimizer": size_of(training.policy.state.storages),
        "critic": 0 if training.critic is None else training.critic.size,
        "quantized": held_bytes(run.phases.quantization.linears),
        "teacher": 0 if teacher is None else size_of(teacher.storages),
        "kv_cache": 0 if cache.is_released else cache.size,
    }


def counted(run: RLRun) -> dict[str, int]:
    """What the run holds now. Of quantised copies without what only CPUs keep."""
    held = held_by(run)
    copies = run.phases.quantization.linears.layers
    operands = sum(layer.weight.operand.nbytes for layer in copies if layer.weight.operand is not None)
    return held | {"quantized": held["quantized"] - operands}


def a_step(run: RLRun, step: int) -> dict[str, int]:
    """One step, and what was held while it generated."""
    seen: dict[str, int] = {}
    generate = run.collector.rollouter.run

    def looked_at(*given: Any) -> Any:
        seen.update(counted(run))
        return generate(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run.collector.rollouter, "run", looked_at)
        record_updates(run, rl_step(run, step))
    return seen


CONTAINED = ("state waits on the host", "critic")
"""In "critic waits on the host"."""


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(name, marks=[pytest.mark.long] if name in (*CONTAINED, "weights stay") else [])
        for name in VARIANTS
        if name not in ("aligned", "calibrated")
    ],
)
def test_each_phase_holds_what_the_estimate_says(one_rank: ParallelGroups, variant: str) -> None:
    config = tiny_config(**SHARDED | VARIANTS[variant])
    expected = estimate(config, 1, VOCABULARY)
    run = toy_run(config, one_rank)
    a_step(run, 1)
    in_rollout, between = a_step(run, 2), counted(run)
    run.closing.close()
    logits = expected.rollout_logits.rollout
    assert sum(in_rollout.values()) == pytest.approx(expected.rollout - logits, rel=0.05)
    passing = expected.activations.update + expected.training_logits.update
    assert sum(between.values()) == pytest.approx(expected.training - passing, rel=0.05)
    for name, size in in_rollout.items():
        assert size == pytest.approx(getattr(expected, name).rollout, rel=0.05, abs=2048), name


def test_a_32b_model_on_64_ranks_rolls_out_in_less_than_6_gib() -> None:
    """Beside the KV cache, by the estimate, whose rows the test above holds to a run's."""
    from tests.unit.estimate.test_published_models import on_64

    flags = ("--transformer-impl", "local", "--rl-rollout-quantization", "fp8")
    least, most = on_64(*flags), on_64(
        *flags, "--no-rl-offload-optimizer-during-inference", "--rl-keep-in-rollouts", "weights", "gradients"
    )
    assert (least.rollout - least.kv_cache.rollout) / 2**30 < 6
    assert (most.rollout - most.kv_cache.rollout) / 2**30 > 30


@pytest.mark.long  # a larger one than the first of `VARIANTS`
def test_a_scaled_model_holds_the_same_shares(one_rank: ParallelGroups) -> None:
    """With everything that can leave away: two bytes of embeddings and norms, one byte and scales of the rest."""
    config = tiny_config(
        **SHARDED | {"rl_quantization_skip": False, "hidden_size": 256, "ffn_hidden_size": 1024, "num_layers": 4},
        rl_offload_optimizer_during_inference=True,
    )
    run = toy_run(config, one_rank)
    a_step(run, 1)
    held = a_step(run, 2)
    run.closing.close()
    assert held["gradients"] == held["optimizer"] == 0
    expected = estimate(config, 1, VOCABULARY)
    beside_cache = sum(held.values()) - held["kv_cache"]
    beside = expected.kv_cache.rollout + expected.rollout_logits.rollout
    assert beside_cache == pytest.approx(expected.rollout - beside, rel=0.05)
    on_eight = expected.weights.update + expected.gradients.update + expected.optimizer.update / 8
    assert beside_cache < 6 / 30.9 * on_eight


def test_updates_have_neither_cache_nor_copies_where_they_want_the_room(
    one_rank: ParallelGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = toy_run(tiny_config(**SHARDED), one_rank)
    plenty = toy_run(tiny_config(**SHARDED), one_rank)
    monkeypatch.setattr(DeviceMemory, "free", lambda self: 0)
    for step in (1, 2):
        in_rollout = a_step(run, step)
        assert in_rollout["kv_cache"] > 0
        assert in_rollout["quantized"] > 0
        held = held_by(run)
        assert held["kv_cache"] == 0
        assert held["quantized"] < 0.2 * in_rollout["quantized"], "scales stay"
        assert held["weights"] < 1.05 * estimate(run.config, 1, VOCABULARY).weights.update
    monkeypatch.undo()
    for step in (1, 2):
        a_step(plenty, step)
    assert all_equal(weights_of(run.policy), weights_of(plenty.policy))
    run.closing.close()
    plenty.closing.close()


def two_steps(groups: ParallelGroups, flags: dict[str, Any], folder: Path) -> tuple[list, Sequence[torch.Tensor]]:
    run = toy_run(tiny_config(groups.world_size, **flags), groups)
    metrics = []
    for step in (1, 2):
        result = rl_step(run, step)
        record_updates(run, result)
        metrics.append({name: value for name, value in result.metrics.items() if "timing" not in name})
    run.checkpoints = CheckpointManager(folder, 0, groups)
    run.save(final=True)
    run.closing.close()
    return metrics, weights_of(run.policy)


UNLIKE = ("idle_share", "throughput", "per_s")
"""Metrics that have the time in them."""


SMALL = {"hidden_size": 32, "ffn_hidden_size": 64}


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(name, marks=[pytest.mark.long] if name in CONTAINED else [])
        for name in VARIANTS
        if "stay" not in name
    ],
)
def test_what_leaves_changes_no_number(one_rank: ParallelGroups, tmp_path: Path, variant: str) -> None:
    flags = SHARDED | SMALL | VARIANTS[variant]
    moved, after = two_steps(one_rank, flags, tmp_path / "moved")
    stays = flags | {"rl_keep_in_rollouts": ("weights", "gradients"), "rl_offload_optimizer_during_inference": False}
    plain, wanted = two_steps(one_rank, stays, tmp_path / "plain")
    for one, other in zip(moved, plain, strict=True):
        for name in one:
            assert one[name] == other[name] or any(word in name for word in UNLIKE), name
    assert all_equal(after, wanted)
    saved = [next(path for path in (tmp_path / kind).iterdir() if path.is_dir()) for kind in ("moved", "plain")]
    assert differences(*saved) == []


def two_replicas(folder: str, flags: dict[str, Any]) -> list[list[float]]:
    """Runs on each rank: the weights after two steps."""
    single_thread()
    config = tiny_config(2, **flags)
    groups = initialize(config.parallel, current_platform())
    _, weights = two_steps(groups, flags, Path(folder))
    shut_down()
    return [weight.float().flatten().tolist() for weight in weights]


def test_two_replicas_make_the_weights_again_to_the_bit(tmp_path: Path) -> None:
    """Each has half of the main parameters; the other half comes with the gather."""
    small = SHARDED | SMALL
    program = "tests.unit.phases.test_what_each_phase_holds:two_replicas"
    moved = run_ranks(program, 2, folder=str(tmp_path / "moved"), flags=small)
    stays = small | {"rl_keep_in_rollouts": ("weights", "gradients")}
    plain = run_ranks(program, 2, folder=str(tmp_path / "plain"), flags=stays)
    assert moved[0] == moved[1] == plain[0]


def test_a_rollout_that_fails_leaves_a_run_that_can_be_saved(one_rank: ParallelGroups, tmp_path: Path) -> None:
    saved = []
    for name, fails in (("failed", True), ("plain", False)):
        run = toy_run(tiny_config(**SHARDED, rl_offload_optimizer_during_inference=True), one_rank)
        a_step(run, 1)
        if fails:
            with pytest.raises(ValueError, match="in a rollout"), run.phases.rollouts():
                raise ValueError("in a rollout")
            assert held_by(run)["kv_cache"] == 0, "what is saved may need the room"
        run.checkpoints = CheckpointManager(tmp_path / name, 0, one_rank)
        run.save(final=True)
        run.closing.close()
        saved.append(next(path for path in (tmp_path / name).iterdir() if path.is_dir()))
    assert differences(*saved) == []
