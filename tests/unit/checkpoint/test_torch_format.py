"""Earlier checkpoints of ours in Megatron's format torch, and pickles that are more than data."""

from __future__ import annotations

import os
import pickle
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.transformer.enums import AttnBackend

from megatron_rl.checkpoint.foreign import MODEL_FILE, Topology, topology_of, topology_problems
from megatron_rl.checkpoint.layout import find_checkpoint
from megatron_rl.checkpoint.manager import CheckpointManager
from megatron_rl.checkpoint.pickled import read
from megatron_rl.checkpoint.run_state import ModelFacts, RunState, architecture_of
from megatron_rl.config.rl_config import RLConfig
from megatron_rl.errors import CheckpointError
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.models.parameters import named_parameters
from megatron_rl.trainer.optimizer import Optimization
from tests.support.checkpoints import contents
from tests.support.foreign import POINTER
from tests.support.tiny import tiny_config, tiny_policy
from tests.support.torch_format import write_ours

EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 32, "moe_router_topk": 2, "add_qkv_bias": False}
VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "distributed": {"use_distributed_optimizer": True},
    "distributed_bf16": {"use_distributed_optimizer": True, "bf16": True},
    "sgd": {"optimizer": "sgd"},
    "experts": EXPERTS,
    "experts_bf16": EXPERTS | {"bf16": True},
    "experts_distributed": EXPERTS | {"use_distributed_optimizer": True},
    "experts_distributed_bf16": EXPERTS | {"use_distributed_optimizer": True, "bf16": True},
    "experts_sgd": EXPERTS | {"optimizer": "sgd"},
}


def _built(config: RLConfig, seed: int, updates: int = 0) -> tuple[PolicyModel, Optimization]:
    policy = tiny_policy(config, seed)
    optimization = Optimization(policy, config)
    for number in range(updates):
        _update(optimization, number)
    return policy, optimization


def _update(optimization: Optimization, number: int) -> None:
    optimization.zero_grad()
    generator = torch.Generator().manual_seed(number)
    for parameter in optimization.policy.parameters():
        parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
    assert optimization.step().applied


def _state(config: RLConfig, step: int, updates: int) -> RunState:
    return RunState(
        step=step, components={"progress": {"updates": updates}},
        model=ModelFacts(architecture_of(config.architecture())), world={"ranks": 1, "tensor_model_parallel_size": 1},
    )  # fmt: skip


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            if not (key == "step" and "lr_mult" in value):  # left in a group by megatron's loading; Adam's is elsewhere
                yield from _leaves(item, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{name}.{index}")
    else:
        yield name, value


def _everything(policy: PolicyModel, optimization: Optimization) -> dict[str, Any]:
    parts = [
        [part.optimizer.state_dict(), getattr(part, "shard_fp32_from_float16_groups", []), part.state_dict()]
        for part in optimization.optimizer.chained_optimizers
    ]
    return dict(_leaves({"model": policy.gpt.state_dict(), "optimizer": parts}))


def _assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        if torch.is_tensor(value):
            assert value.dtype == other[name].dtype and torch.equal(value, other[name]), name
        else:
            assert value == other[name], name


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_moments_and_counters_come_back_bit_for_bit(one_rank, tmp_path: Path, variant: str) -> None:
    config = tiny_config(**VARIANTS[variant])
    policy, optimization = _built(config, seed=1, updates=3)
    optimization.schedule.go_to(finished_steps=2)  # the rate of step 3, not of update 4
    write_ours(tmp_path, _state(config, 2, 3), optimization, one_rank)
    other_policy, other = _built(config, seed=2)
    manager = CheckpointManager(tmp_path, 0, one_rank)
    assert manager.resume(manager.newest(), other_policy, other).components == {"progress": {"updates": 3}}
    _assert_same(_everything(policy, optimization), _everything(other_policy, other))
    if "sgd" not in variant:
        steps = {value.item() for part in other.optimizer.chained_optimizers for value in _steps(part)}
        assert steps == {3.0}
    for both in (optimization, other):
        _update(both, 9)
    _assert_same(_everything(policy, optimization), _everything(other_policy, other))


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name.startswith("experts")])
@pytest.mark.parametrize("was_grouped", [True, False])
def test_a_run_may_group_its_experts_from_now_on_or_no_longer(one_rank, tmp_path, variant: str, was_grouped) -> None:
    """What it has then is the same, and the next updates are."""
    flags = ({}, {"no_moe_grouped_gemm": True})
    before, after = (VARIANTS[variant] | flag for flag in (flags if was_grouped else reversed(flags)))
    runs = [_built(tiny_config(**before), seed=1, updates=2), _built(tiny_config(**after), seed=2)]
    runs[0][1].schedule.go_to(finished_steps=2)
    ours = write_ours(tmp_path / "before", _state(tiny_config(), 2, 2), runs[0][1], one_rank)
    CheckpointManager(tmp_path, 0, one_rank).resume(ours, *runs[1])
    theirs = write_ours(tmp_path / "after", _state(tiny_config(), 2, 2), runs[1][1], one_rank)
    ours, theirs = map(_tensors, (ours, theirs))
    kind = "momentum_buffer" if "sgd" in variant else "exp_avg"
    name = f"optimizer.state.{kind}.decoder.layers.mlp.experts.experts.linear_fc2.weight@1.3.0.0"
    assert any(found.endswith(name) for found in ours)
    _assert_same(ours, theirs)
    for name, (_, optimization) in zip(("before", "after"), runs, strict=True):
        _update_by_name(optimization)
        write_ours(tmp_path / name, _state(tiny_config(), 3, 3), optimization, one_rank)
    ours, theirs = (_tensors(tmp_path / name / "iter_0000003") for name in ("before", "after"))
    for found in ours:  # the gradients' norm is added up in another order
        torch.testing.assert_close(ours[found], theirs[found])


def _tensors(checkpoint: Path) -> dict[str, Any]:
    return {name: value for name, value in contents(checkpoint).items() if torch.is_tensor(value)}


def _update_by_name(optimization: Optimization) -> None:
    """Each parameter's gradients hang on its name, of stacked experts on each one's."""
    optimization.zero_grad()
    for name, parameter in named_parameters(optimization.policy.chunks):
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
    assert optimization.step().applied


@pytest.mark.parametrize("format_", ["torch", "torch_dist"])
@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("fp32", "distributed", {"torch": r"has no optimizer\.state\.\S+@0\.0 of \[.*--no-load-optim"}),
        ("distributed", "fp32", dict.fromkeys(("torch", "torch_dist"), "with --use-distributed-optimizer; add it")),
        ("distributed_bf16", "bf16", {}),
        ("sgd", "fp32", {}),
    ],
)
def test_another_optimizer_is_one_line(one_rank, tmp_path: Path, before, after, told, format_: str) -> None:
    manager, state = CheckpointManager(tmp_path, 0, one_rank), _state(tiny_config(), 1, 1)
    policy, optimization = _built(tiny_config(**VARIANTS[before]), seed=1, updates=1)
    if format_ == "torch":
        write_ours(tmp_path, state, optimization, one_rank)
    else:
        manager.save(state, policy, optimization)
    missing = {"torch": "has no optimizer", "torch_dist": "does not fit this model"}
    with pytest.raises(CheckpointError, match=told.get(format_, missing[format_])) as caught:
        manager.resume(manager.newest(), *_built(tiny_config(**VARIANTS[after]), seed=2))
    assert "\n" not in str(caught.value)


def test_an_earlier_versions_optimizer_is_one_line(one_rank, tmp_path: Path) -> None:
    """It went by the order of the parameters."""
    policy, optimization = _built(tiny_config(), seed=1, updates=1)
    directory = write_ours(tmp_path, _state(tiny_config(), 1, 1), optimization, one_rank)
    content = torch.load(_file(directory), weights_only=True)
    del content["optimizer_state"]
    torch.save(content, _file(directory))
    with pytest.raises(CheckpointError, match=r"has no optimizer\.state\..*or --no-load-optim"):
        CheckpointManager(tmp_path, 0, one_rank).resume(directory, policy, optimization)


def test_a_part_of_another_topology_is_not_taken(one_rank, tmp_path: Path) -> None:
    """It has the same name and lies at the same place, and is of another size."""
    policy, optimization = _built(tiny_config(), seed=1, updates=1)
    directory = write_ours(tmp_path, _state(tiny_config(), 1, 1), optimization, one_rank)
    content = torch.load(_file(directory), weights_only=True)
    name = "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight@1.0.0"
    content["optimizer_state"][name] = content["optimizer_state"][name][:, :8].clone()
    torch.save(content, _file(directory))
    with pytest.raises(CheckpointError, match=rf"has no {name} of "):
        CheckpointManager(tmp_path, 0, one_rank).resume(directory, policy, optimization)


def _steps(part: Any) -> list[torch.Tensor]:
    return [values["step"] for values in part.optimizer.state.values()]


@pytest.fixture
def saved(one_rank: object, tmp_path: Path) -> Path:
    """Steps 2 and 4."""
    _, optimization = _built(tiny_config(), seed=1, updates=1)
    for step in (2, 4):
        write_ours(tmp_path / "own", _state(tiny_config(), step, 1), optimization, one_rank)
    return tmp_path / "own"


def _file(directory: Path) -> Path:
    return directory / "mp_rank_00" / MODEL_FILE


def test_a_truncated_file_falls_back_to_the_one_before(saved: Path) -> None:
    path = _file(saved / "iter_0000004")
    path.write_bytes(path.read_bytes()[:-100])
    assert find_checkpoint(saved) == saved / "iter_0000002"


@pytest.mark.parametrize("text", ["40", "nonsense", None])
def test_a_pointer_to_nowhere_does_not_matter_where_there_are_checksums(saved: Path, text: str | None) -> None:
    pointer = saved / POINTER
    pointer.unlink() if text is None else pointer.write_text(text)
    assert find_checkpoint(saved) == saved / "iter_0000004"


class _Command:
    """Unpickled by Python's own unpickler, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self._path),)


def test_a_forbidden_class_is_named_and_nothing_is_executed(tmp_path: Path) -> None:
    path, proof = tmp_path / "model.pt", tmp_path / "executed"
    torch.save({"model": {}, "args": _Command(proof)}, path)
    with pytest.raises(CheckpointError, match=r"model\.pt.*posix\.mkdir.*nothing of it was executed") as caught:
        read(path)
    assert "\n" not in str(caught.value)
    assert not proof.exists()
    pickle.loads(pickle.dumps(_Command(proof)))  # noqa: S301 - the file would have done something
    assert proof.exists()


class _EarlyMember:
    """Stored as Python 3.11.0 to 3.11.3 store members of enums."""

    def __reduce__(self) -> tuple[Any, tuple[Any, str]]:
        return getattr, (AttnBackend, "flash")


def test_a_name_that_is_passed_over_is_not_called(tmp_path: Path) -> None:
    torch.save({"a": np.arange(3), "b": AttnBackend.flash, "c": _EarlyMember()}, tmp_path / "file.pt")
    content = read(tmp_path / "file.pt")
    assert {type(value).__name__ for value in content.values()} == {"_Nothing"}
    assert all(vars(value) == {} for value in content.values())


def test_what_others_allow_counts_for_nothing_here_and_is_left_as_it_was(tmp_path: Path) -> None:
    """megatron-core allows classes for the whole process."""
    torch.save(Fraction(1, 3), tmp_path / "file.pt")
    with torch.serialization.safe_globals([Fraction]):
        before = set(torch.serialization.get_safe_globals())
        with pytest.raises(CheckpointError, match=r"fractions\.Fraction"):
            read(tmp_path / "file.pt")
        assert set(torch.serialization.get_safe_globals()) == before


def test_ours_without_its_manifest_is_damaged(saved: Path) -> None:
    for step in (2, 4):
        (saved / f"iter_{step:07d}" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="no undamaged checkpoint"):
        find_checkpoint(saved)


@pytest.mark.parametrize(
    ("names", "topology"),
    [
        (["mp_rank_00"], Topology()),
        (["mp_rank_00", "mp_rank_01"], Topology(2)),
        (["mp_rank_00_000", "mp_rank_00_001"], Topology(1, 2)),
        (["mp_rank_00_000", "mp_rank_00_001", "mp_rank_01_000", "mp_rank_01_001"], Topology(2, 2)),
    ],
)
def test_directories_say_how_ranks_share_the_model(tmp_path: Path, names: list[str], topology: Topology) -> None:
    directory = tmp_path / "iter_0000012"
    for name in names:
        (directory / name).mkdir(parents=True)
        torch.save({"model": {}}, directory / name / MODEL_FILE)
    assert topology_of(directory) == topology and topology.names == names
    assert topology_problems(directory, topology) == []
    (line,) = topology_problems(directory, Topology(4, 2))
    assert "this run has --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2; its optimizer state" in line


def test_a_run_goes_on_in_torch_dist(saved: Path, one_rank) -> None:
    policy, optimization = _built(tiny_config(), seed=2)
    manager = CheckpointManager(saved, 2, one_rank)
    state = manager.resume(manager.newest(), policy, optimization)
    manager.save(replace(state, step=6), policy, optimization)
    assert find_checkpoint(saved) == saved / "step_0000006"
    assert sorted(path.name for path in saved.glob("*_00*")) == ["iter_0000004", "step_0000006"]
