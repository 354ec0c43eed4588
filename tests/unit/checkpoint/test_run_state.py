"""The readable part of a checkpoint, and whether a run may start from it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_rl.checkpoint.run_state import (
    FILE_NAME,
    FORMAT_VERSION,
    ModelFacts,
    RunState,
    architecture_of,
    architecture_problems,
    continuation_problems,
    optimizer_form_of,
    read_run_state,
    write_run_state,
)
from megatron_rl.errors import CheckpointError
from tests.support.tiny import tiny_config


def _state(**changes: object) -> RunState:
    config = tiny_config()
    state = RunState(
        step=4, model=ModelFacts(architecture_of(config.architecture()), vocab_size=16),
        optimizer_form=optimizer_form_of(config),
        components={"progress": {"updates": 7, "logprob_gap_max": 0.25}, "lengths": {"digits": {"mean": 1 / 3}}},
    )  # fmt: skip
    return replace(state, **changes)


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_run_state(tmp_path, _state())
    assert read_run_state(tmp_path) == _state()


def test_a_field_of_a_later_version_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text('{"step": 4, "components": {"moon": {"is": "full"}}, "moon": "full"}')
    state = read_run_state(tmp_path)
    assert state == RunState(step=4, components={"moon": {"is": "full"}})


def test_a_file_of_a_later_format_is_one_line_that_says_so(tmp_path: Path) -> None:
    write_run_state(tmp_path, _state())
    path = tmp_path / FILE_NAME
    values = json.loads(path.read_text())
    assert values["format_version"] == FORMAT_VERSION
    path.write_text(json.dumps(values | {"format_version": FORMAT_VERSION + 1}))
    with pytest.raises(CheckpointError, match=r"a later version of megatron-rl wrote it, in format 2; update meg"):
        read_run_state(tmp_path)
    del values["format_version"]
    path.write_text(json.dumps(values))
    assert read_run_state(tmp_path) == _state()


@pytest.mark.parametrize(
    "text",
    [None, "", "[]", '{"step": 4}', '{"format_version": "2", "step": 4, "components": {}}',
     pytest.param("[" * 20_000, id="deep")],
)  # fmt: skip
def test_what_cannot_be_read_is_named(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(CheckpointError, match=FILE_NAME):
        read_run_state(tmp_path)


def test_every_flag_of_another_architecture_is_named(tmp_path: Path) -> None:
    write_run_state(tmp_path, _state())
    assert architecture_problems(tiny_config(), tmp_path, vocab_size=16) == []
    other = tiny_config(num_layers=3, rotary_base=500)
    lines = architecture_problems(other, tmp_path, vocab_size=20)
    assert [text in line for text, line in zip(
        ["num_layers 2, this run has 3", "rotary_base 10000, this run has 500", "16 tokens, --tokenizer-model has 20"],
        lines, strict=True,
    )] == [True] * 3  # fmt: skip


def test_without_a_tokenizer_the_vocabulary_is_not_judged(tmp_path: Path) -> None:
    write_run_state(tmp_path, _state())
    assert architecture_problems(tiny_config(), tmp_path) == []


def test_a_run_goes_on_in_its_mode_and_with_its_kind_of_optimizer(tmp_path: Path) -> None:
    write_run_state(tmp_path, _state())
    assert continuation_problems(tiny_config(), tmp_path) == []
    supervised = tiny_config(perform_rl_step=False, grpo_group_size=False, grpo_prompts_per_step=False)
    (mode,) = continuation_problems(supervised, tmp_path)
    assert "in mode rl" in mode
    assert "add --perform-rl-step" in mode
    distributed = tiny_config(use_distributed_optimizer=True)
    (form,) = continuation_problems(distributed, tmp_path)
    assert "use_distributed_optimizer False, this run has True" in form


def test_a_fresh_optimizer_may_be_of_another_kind(tmp_path: Path) -> None:
    write_run_state(tmp_path, _state())
    assert continuation_problems(tiny_config(bf16=True, no_load_optim=True), tmp_path) == []
    write_run_state(tmp_path, _state(has_optimizer=False))
    assert continuation_problems(tiny_config(bf16=True), tmp_path) == []


def test_a_supervised_run_names_the_one_flag_that_takes_its_weights(tmp_path: Path) -> None:
    write_run_state(tmp_path, _state(mode="supervised"))
    (line,) = continuation_problems(tiny_config(resume=True), tmp_path)
    assert f"write --pretrained-checkpoint {tmp_path} in place of --resume, with another --run-dir" in line
    assert "to go on with it leave out --perform-rl-step" in line
