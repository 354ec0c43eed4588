"""Every combination of --load, --pretrained-checkpoint, --load-hf, --finetune and --resume, in one process.

The table in docs/checkpoints.md has the same rows. A run trains a little (noise on its weights) and saves; what a later
start finds in the model, and in the reference of its KL term, is compared with what it should be, bit for bit.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from megatron_rl.checkpoint import tensors
from megatron_rl.checkpoint.manager import CheckpointManager
from megatron_rl.checkpoint.run_state import (
    ModelFacts,
    RunState,
    StartingWeights,
    architecture_of,
    mode_of,
    optimizer_form_of,
)
from megatron_rl.checkpoint.tensors import fingerprints, weights_fingerprint
from megatron_rl.config.rl_config import RLConfig
from megatron_rl.config.rules import notes
from megatron_rl.errors import CheckpointError
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.run.preflight.machine import output_problems
from megatron_rl.run.preflight.starts import checkpoint_problems, resumes
from megatron_rl.run.weights import Start, start_weights
from tests.support.hugging_face import hf_run, write_model
from tests.support.samples import all_equal, weights_of
from tests.support.tiny import tiny_config, tiny_policy

Weights = Sequence[torch.Tensor]


class Runs:
    """Starts runs in one folder, one after the other."""

    def __init__(self, folder: Path, groups: ParallelGroups) -> None:
        self.folder, self.groups = folder, groups

    def config(self, name: str, **flags: object) -> RLConfig:
        make = hf_run if "load_hf" in flags else tiny_config
        if "load_hf" in flags:
            flags = {"perform_rl_step": True, "grpo_group_size": 4, "grpo_prompts_per_step": 4, **flags}
            flags["directory"] = flags.pop("load_hf")
        return make(**{"run_dir": self.folder / name, "grpo_kl_beta": 0.1, **flags})

    def start(self, name: str, **flags: object) -> tuple[Start, Weights, Weights | None]:
        """A start of the run ``name``; what its model and its reference have."""
        config = self.config(name, **flags)
        assert checkpoint_problems(config, None) == []
        return self.build(config)

    def build(self, config: RLConfig) -> tuple[Start, Weights, Weights | None]:
        policy = tiny_policy(config, seed=config.training.seed)
        manager = CheckpointManager(Path(config.checkpoint.save), 0, self.groups)
        start = start_weights(config, policy, manager, self.groups)
        model, reference = weights_of(policy), None
        if start.reference is not None:
            with start.reference.swapped_in():
                reference = weights_of(policy)
        self._last = config, policy, manager
        return start, model, reference

    def train_and_save(self, start: Start, forget_origin: bool = False) -> Weights:
        """One step of the run started last; its weights then."""
        config, policy, manager = self._last
        step = 1 if start.saved is None else start.saved.step + 1
        with torch.no_grad():
            for parameter in policy.gpt.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        state = RunState(
            step=step, mode=mode_of(config), has_optimizer=False, seed=config.training.seed,
            model=ModelFacts(architecture_of(config.architecture()), end_token_ids=[0, 5]),
            optimizer_form=optimizer_form_of(config), origin=None if forget_origin else start.origin,
        )  # fmt: skip
        manager.save(state, policy, start.optimization)
        return weights_of(policy)

    def trained(self, name: str, **flags: object) -> Weights:
        """A run that was started and saved one step."""
        return self.train_and_save(self.start(name, **flags)[0])

    def refusal(self, name: str, **flags: object) -> str:
        """The one line of a start that is refused, before a model is built or after."""
        config = self.config(name, **flags)
        problems = checkpoint_problems(config, None)
        if not problems:
            with pytest.raises(CheckpointError) as raised:
                self.build(config)
            problems = [str(raised.value)]
        (line,) = map(str, problems)
        assert "\n" not in line
        return line

    def checkpoints(self, name: str) -> Path:
        return self.folder / name / "checkpoints"


@pytest.fixture
def runs(tmp_path: Path, one_rank: ParallelGroups) -> Runs:
    return Runs(tmp_path, one_rank)


@pytest.fixture
def warm(runs: Runs) -> Weights:
    """The checkpoint ``W/checkpoints/step_0000001``, of a run whose weights are drawn with another seed."""
    return runs.trained("W", seed=5, grpo_kl_beta=0)


def _is_of(start: tuple[Start, Weights, Weights | None], model: Weights, reference: Weights | None) -> None:
    _, has, refers = start
    assert all_equal(has, model), "the model has other weights"
    assert (refers is None) == (reference is None)
    assert reference is None or all_equal(refers, reference), "the reference has other weights"


FROM_W = {
    "finetune": lambda runs: {"load": runs.folder / "W", "finetune": True},
    "pretrained": lambda runs: {"pretrained_checkpoint": runs.checkpoints("W")},
    "by its step": lambda runs: {"pretrained_checkpoint": runs.checkpoints("W") / "step_0000001"},
    "megatron's way": lambda runs: {
        "pretrained_checkpoint": runs.folder / "W", "load": runs.checkpoints("A"), "finetune": True,
    },
    "an empty --load": lambda runs: {"pretrained_checkpoint": runs.folder / "W", "load": runs.folder / "nothing"},
    "both": lambda runs: {
        "load": runs.folder / "W", "finetune": True, "pretrained_checkpoint": runs.folder / "nothing",
    },
}  # fmt: skip


@pytest.mark.each_value
@pytest.mark.parametrize("first_resumes", [False, True], ids=["", "--resume from the first start"])
@pytest.mark.parametrize("way", FROM_W)
def test_a_run_from_weights_keeps_them_as_its_reference(runs, warm, way: str, first_resumes: bool) -> None:
    flags = FROM_W[way](runs)
    first = runs.start("A", resume=first_resumes, **flags)
    _is_of(first, warm, warm)
    trained = runs.train_and_save(first[0])
    again = runs.start("A", resume=True, **flags)
    _is_of(again, trained, warm)
    trained = runs.train_and_save(again[0])
    _is_of(runs.start("A", resume=True), trained, warm)


def test_a_run_from_random_weights_keeps_those(runs) -> None:
    first = runs.start("A", resume=True)
    drawn = first[1]
    _is_of(first, drawn, drawn)
    trained = runs.train_and_save(first[0])
    _is_of(runs.start("A", resume=True), trained, drawn)
    line = runs.refusal("A", resume=True, seed=99)
    assert "random weights (seed 1234" in line
    assert "same --seed" in line


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_that_goes_on_elsewhere_takes_its_reference_along(runs, warm, resume: bool) -> None:
    """`--load` of another run in a fresh directory, where `--resume` has nothing of its own to go on from."""
    trained = runs.trained("A", pretrained_checkpoint=runs.folder / "W")
    elsewhere = runs.start("B", load=runs.folder / "A", resume=resume)
    _is_of(elsewhere, trained, warm)
    assert elsewhere[0].saved.step == 1
    later = runs.train_and_save(elsewhere[0])
    _is_of(runs.start("B", load=runs.folder / "A", resume=True), later, warm)
    finetuned = runs.start("C", load=runs.folder / "B", finetune=True)
    _is_of(finetuned, later, later)
    assert finetuned[0].saved is None


def test_end_tokens_come_with_the_weights(runs, warm) -> None:
    assert runs.start("A")[0].end_token_ids == ()
    for flags in ({"load": runs.folder / "W"}, {"load": runs.folder / "W", "finetune": True}):
        assert runs.start("B", **flags, grpo_kl_beta=0)[0].end_token_ids == [0, 5]
    assert runs.start("C", pretrained_checkpoint=runs.folder / "W")[0].end_token_ids == [0, 5]
    assert runs.start("W", resume=True, seed=5)[0].end_token_ids == [0, 5]


def test_a_penalty_may_come_later_and_go(runs, warm) -> None:
    flags = {"pretrained_checkpoint": runs.folder / "W"}
    trained = runs.trained("A", grpo_kl_beta=0, **flags)
    second = runs.start("A", resume=True, grpo_kl_beta=0)
    _is_of(second, trained, None)
    trained = runs.train_and_save(second[0])
    _is_of(runs.start("A", resume=True, **flags), trained, warm)
    shutil.rmtree(runs.folder / "W")
    _is_of(runs.start("A", resume=True, grpo_kl_beta=0, **flags), trained, None)


def test_a_reference_that_was_moved_is_found_where_a_flag_says(runs, warm) -> None:
    trained = runs.trained("A", load=runs.folder / "W", finetune=True)
    (runs.folder / "W").rename(runs.folder / "V")
    for flags in ({}, {"load": runs.folder / "W", "finetune": True}):
        line = runs.refusal("A", resume=True, **flags)
        assert "reference of --grpo-kl-beta" in line
        assert str(runs.checkpoints("W")) in line
        assert "--pretrained-checkpoint" in line
    moved = runs.start("A", resume=True, pretrained_checkpoint=runs.folder / "V")
    _is_of(moved, trained, warm)
    trained = runs.train_and_save(moved[0])
    _is_of(runs.start("A", resume=True), trained, warm)


def test_other_weights_are_never_taken_for_the_reference(runs, warm) -> None:
    runs.trained("A", load=runs.folder / "W", finetune=True)
    runs.trained("other", seed=6, grpo_kl_beta=0)
    line = runs.refusal("A", resume=True, pretrained_checkpoint=runs.folder / "other")
    assert f"{str(runs.checkpoints('other') / 'step_0000001')!r} has other weights" in line
    assert str(runs.checkpoints("W") / "step_0000001") in line
    shutil.rmtree(runs.folder / "W")
    (runs.folder / "other").rename(runs.folder / "W")
    assert "has other weights" in runs.refusal("A", resume=True, load=runs.folder / "W", finetune=True)


def test_the_reference_is_the_checkpoint_that_was_the_newest_at_the_start(runs, warm) -> None:
    flags = {"load": runs.folder / "W", "finetune": True}
    trained = runs.trained("A", **flags)
    newer = runs.train_and_save(runs.start("W", resume=True, seed=5, grpo_kl_beta=0)[0])
    assert not all_equal(newer, warm)
    _is_of(runs.start("A", resume=True, **flags), trained, warm)


def test_a_run_of_an_earlier_version_needs_a_flag_for_its_reference(runs, warm, caplog) -> None:
    trained = runs.train_and_save(runs.start("A", pretrained_checkpoint=runs.folder / "W")[0], forget_origin=True)
    line = runs.refusal("A", resume=True)
    assert "does not say what its run started from" in line
    assert "--pretrained-checkpoint or --load-hf" in line
    _is_of(runs.start("A", resume=True, pretrained_checkpoint=runs.folder / "W"), trained, warm)
    assert "does not say what its run started from" in caplog.text
    _is_of(runs.start("A", resume=True, grpo_kl_beta=0), trained, None)


@pytest.mark.parametrize("flags", [{}, {"resume": True}, {"finetune": True}, {"finetune": True, "resume": True}])
def test_a_load_that_holds_nothing_is_refused_where_nothing_else_is_named(runs, flags: dict[str, bool]) -> None:
    assert runs.refusal("A", load=runs.folder / "nothing", **flags).startswith("--load: no checkpoint in")


def test_the_reference_may_be_read_in_another_number_format(runs, warm) -> None:
    runs.trained("A", pretrained_checkpoint=runs.folder / "W")
    rounded = [tensor.bfloat16() for tensor in warm]
    start = runs.start("A", resume=True, bf16=True, no_load_optim=True)
    assert all_equal(start[2], rounded)
    assert start[0].origin.weights.keys() == {"float32", "bfloat16"}


def test_a_run_from_a_hugging_face_directory(runs) -> None:
    from megatron_rl.families.family import SMALL

    write_model(runs.folder / "hf", "qwen2", SMALL)
    flags = {"load_hf": runs.folder / "hf"}
    first = runs.start("A", **flags)
    loaded = first[1]
    _is_of(first, loaded, loaded)
    trained = runs.train_and_save(first[0])
    _is_of(runs.start("A", resume=True, **flags), trained, loaded)
    (runs.folder / "hf").rename(runs.folder / "moved")
    _is_of(runs.start("A", resume=True, load_hf=runs.folder / "moved"), trained, loaded)
    write_model(runs.folder / "hf", "qwen2", {**SMALL, "tie_word_embeddings": False})
    for path in (runs.folder / "hf").glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1  # the exponent of one number
        path.write_bytes(data)
    assert "has other weights" in runs.refusal("A", resume=True, **flags)


def test_the_fingerprint_is_of_the_weights_and_of_nothing_else(one_rank: ParallelGroups) -> None:
    policy = tiny_policy(tiny_config(make_vocab_size_divisible_by=8))
    before = weights_fingerprint(policy, one_rank)
    assert weights_fingerprint(policy, one_rank) == before
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors, "SUMMED_AT_ONCE", 7)
        assert weights_fingerprint(policy, one_rank) == before
    padded = tiny_policy(tiny_config(make_vocab_size_divisible_by=100), seed=2)
    assert padded.padded_vocab_size > policy.padded_vocab_size
    with torch.no_grad():
        for own, other in zip(padded.gpt.parameters(), policy.gpt.parameters(), strict=True):
            own[: len(other)] = other
    assert weights_fingerprint(padded, one_rank) == before
    weight = next(policy.gpt.parameters())
    with torch.no_grad():
        weight.view(-1)[3] = torch.nextafter(weight.view(-1)[3], torch.tensor(9.0))
    assert weights_fingerprint(policy, one_rank) != before


def test_number_formats_are_compared_where_both_are_known(one_rank: ParallelGroups) -> None:
    whole = StartingWeights("drawn", weights=fingerprints(tiny_policy(), one_rank))
    rounded = tiny_policy()
    rounded.gpt.to(torch.bfloat16)
    in_bf16 = {"bfloat16": f"{weights_fingerprint(rounded, one_rank):016x}"}
    assert whole.is_of(whole.weights)
    assert whole.is_of(in_bf16)
    assert not whole.is_of(fingerprints(tiny_policy(seed=2), one_rank))
    assert not whole.is_of({})
    assert not whole.is_of({**whole.weights, "float32": "0"})


def test_megatrons_restart_with_finetune_goes_on(runs, warm) -> None:
    """`--save X --load X --finetune`: the first start takes other weights, the same command goes on with its own."""
    flags = {"save": runs.checkpoints("A"), "load": runs.checkpoints("A"), "finetune": True}
    flags |= {"pretrained_checkpoint": runs.folder / "W"}
    first = runs.start("A", **flags)
    _is_of(first, warm, warm)
    trained = runs.train_and_save(first[0])
    config = runs.config("A", **flags)
    assert resumes(config) and not list(output_problems(config))
    assert notes(config) == ["--finetune has no effect: --load names --save, whose run goes on where it holds one"]
    again = runs.start("A", **flags)
    _is_of(again, trained, warm)
    assert again[0].saved.step == 1
    assert not resumes(runs.config("A", **flags, eval_only=True))
    assert notes(runs.config("A", load=runs.folder / "W", finetune=True)) == []
