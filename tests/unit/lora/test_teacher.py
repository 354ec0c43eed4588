"""A teacher that is adapters on the policy's base: whose memory it is, what it says, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_rl.checkpoint.hf.peft import export_peft
from megatron_rl.errors import CheckpointError
from megatron_rl.families import read_model
from megatron_rl.families.lora import adapters_of
from megatron_rl.families.peft import lora_at
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.run.memory.estimate import estimate
from megatron_rl.run.preflight.starts import adapter_problems
from megatron_rl.run.rl import build_teacher
from megatron_rl.trainer.scoring import Scorer
from tests.support.hugging_face import batch_of, write_model
from tests.support.lora import move_b
from tests.support.tiny import VOCABULARY
from tests.unit.lora.test_files import LORA, SIZES, config_of, save, started, train

RL = ["--perform-rl-step", "--grpo-prompts-per-step", "2", "--grpo-group-size", "2", "--global-batch-size", "4"]


class States:
    """A registry that keeps what is registered."""

    def register(self, name: str, state: Any, optional: bool) -> Any:
        return state


@pytest.fixture
def taught(tmp_path: Path, one_rank: ParallelGroups) -> tuple[Path, torch.Tensor]:
    """Adapters of rank 2 in PEFT's format on ``tmp_path/base``, and what the model with them says of a batch."""
    write_model(tmp_path / "base", "llama", SIZES)
    config = config_of(tmp_path / "base", "--lora-rank", "2", "--lora-alpha", "6", at=tmp_path / "teaching")
    policy, start, checkpoints = started(config, one_rank)
    move_b(policy, one_rank, 0.1, seed=7)
    start.optimization.reload_main_parameters()
    (logprobs,) = Scorer(policy, one_rank, 1.0).logprobs([batch_of(VOCABULARY, (20, 12))])
    export_peft(save(config, policy, start, checkpoints, 1), read_model(tmp_path / "base"), tmp_path / "teacher")
    return tmp_path / "teacher", logprobs


def test_it_scores_as_its_own_model_in_the_policys_memory(
    taught: tuple[Path, torch.Tensor], tmp_path: Path, one_rank: ParallelGroups
) -> None:
    directory, expected = taught
    flags = [*LORA, *RL, "--rl-teacher-lora", str(directory)]
    config = config_of(tmp_path / "base", *flags, at=tmp_path / "run")
    assert adapter_problems(config) == []
    policy, start, _ = started(config, one_rank)
    move_b(policy, one_rank, 0.1, seed=1)
    teacher = build_teacher(SimpleNamespace(config=config, groups=one_rank, policy=policy), States())
    batch = batch_of(VOCABULARY, (20, 12))

    def said() -> torch.Tensor:
        with teacher.on_device():
            return teacher.scored([batch])[0].teacher_logprobs

    torch.testing.assert_close(said(), expected, rtol=0, atol=1e-5)
    before = said()
    train(policy, start)
    assert torch.equal(said(), before), "the policy's update moves its own adapters alone"
    held = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    own = [storage for storage in teacher.storages if storage.data_ptr() not in held]
    parts = adapters_of(policy.layout, lora_at(directory))
    adapters = sum(each.size for part in parts for each in (part.a, part.b)) * 4
    assert sum(storage.nbytes() for storage in own) == adapters == estimate(config, 1, VOCABULARY).teacher.update
    moved = teacher.state_dict()
    teacher.load_state_dict(moved)
    with pytest.raises(CheckpointError, match=f"the teacher {directory} has other weights"):
        teacher.load_state_dict(moved | {"weights": dict.fromkeys(moved["weights"], "0" * 16)})


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--rl-teacher-lora", "T"], "needs a policy whose base stays as it is; add --lora-rank"),
        ([*LORA, "--rl-teacher-lora", "T", "--rl-teacher-load-hf", "T"], "are two teachers; use one of the two"),
        ([*LORA, "--rl-teacher-weight", "2"], "has no effect without a teacher"),
    ],
)
def test_what_it_cannot_be_with(flags: list[str], line: str, tmp_path: Path) -> None:
    write_model(tmp_path / "base", "llama", SIZES)
    problems: list[str] = []
    config_of(tmp_path / "base", *RL, *flags, at=tmp_path / "run", problems=problems)
    assert any(line in problem for problem in problems), problems


def test_files_that_are_no_adapters_of_this_base(taught: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_model(other, "llama", SIZES | {"intermediate_size": 64})
    config = config_of(other, *LORA, *RL, "--rl-teacher-lora", str(taught[0]), at=tmp_path / "run")
    (problem,) = adapter_problems(config)
    assert problem.flag == "--rl-teacher-lora" and "name its own base" in problem.text
    config = config_of(other, *LORA, *RL, "--rl-teacher-lora", str(tmp_path / "nowhere"), at=tmp_path / "run")
    (problem,) = adapter_problems(config)
    assert "is no adapter_config.json of PEFT" in problem.text or "nowhere" in problem.text
