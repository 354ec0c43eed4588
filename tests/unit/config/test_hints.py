"""Words of TRL, verl and Hugging Face lead to flags that are there; the first of all is the model."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from megatron_rl.config.arguments import foreign_flags, read_config
from megatron_rl.config.flags import flags_of
from megatron_rl.config.rl_config import all_flags, all_spellings, typed_settings

TABLE = Path(__file__).parents[3] / "megatron_rl" / "config" / "foreign_flags.txt"
OURS = all_spellings().keys()


def _problems(*argv: str) -> list[str]:
    return [str(problem) for problem in read_config(argv, 1)[1]]


def test_every_hint_names_flags_that_are_there_and_no_flag_of_ours_has_another():
    from megatron_rl.cli.options import Ranks

    known = OURS | {text for flag in flags_of(Ranks) for text in flag.spellings} | {"nnodes", "nproc-per-node"}
    for word, hint in foreign_flags().items():
        flags = [part.removeprefix("--") for part in shlex.split(hint) if part.startswith("--")]
        assert set(flags) <= known and bool(flags) == bool(hint), (word, hint)
        assert word.replace("_", "-") not in OURS or flags == [word.replace("_", "-")]


def test_the_table_is_the_one_of_the_document_row_by_row():
    text = (Path(__file__).parents[3] / "docs" / "coming_from.md").read_text(encoding="utf-8")
    tables = text[text.index("## TRL") : text.index("## Megatron-LM")]
    rows = re.findall(r"^\| (`[^|]+) \| ([^|]+) \|", tables, re.MULTILINE)
    ours = TABLE.read_text(encoding="utf-8").splitlines()
    assert [f"{left} | {right}".replace("`", "") for left, right in rows] == ours
    words = {word for theirs, _ in rows for word in re.findall("`([^`]+)`", theirs)}
    assert set(foreign_flags()) == {word.lower() for word in words} | {word.partition("=")[0] for word in words}


def test_the_document_names_each_default_that_is_not_megatrons():
    text = (Path(__file__).parents[3] / "docs" / "coming_from.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in text[text.index("## Megatron-LM") :].splitlines() if line.startswith("| ")]
    said = {flag: row[0] for row in rows for flag in re.findall("`(--[a-z0-9-]+)`", row[1])}
    told = {flag.spelling: re.search(r"Megatron's default:\s+([\w.]+)", flag.help) for flag in all_flags()}
    assert [flag for flag, value in told.items() if value and value[1] not in said.get(flag, "")] == []


@pytest.mark.parametrize(
    "word",
    ["reward_model.model.path", "critic.model.path", "critic.optim.weight_decay", "optim.lr", "lr.other",
     "data.reward_weights", "val_kwargs.temperature", "some.n", "reward_model.n_gpus_per_node"],
)  # fmt: skip
def test_a_word_of_which_only_the_end_is_known_gets_no_hint(word: str):
    assert f"--{word} is not a flag; --help-all lists all flags" in _problems(f"--{word}", "1")


@pytest.mark.parametrize("word", ["reward_weights", "loss_type", "top_p", "top_k", "use_vllm"])
def test_a_word_for_which_there_is_nothing_is_not_taken_for_one_of_ours(word: str):
    assert f"--{word} is not a flag; docs/coming_from.md says why there is none" in _problems(f"--{word}", "1")


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--learning-rate", "1e-6"], "--learning-rate is not a flag; use --lr"),
        (["--num_generations", "8"], "--num_generations is not a flag; use --grpo-group-size"),
        (["--model", "Qwen/Qwen3-0.6B"], "--model is not a flag; use --load-hf"),
        (["--actor_rollout_ref.rollout.n=8"], "--actor_rollout_ref.rollout.n is not a flag; use --grpo-group-size"),
        (
            ["data.train_batch_size=64"],
            "'data.train_batch_size=64' stands before any flag; use --grpo-prompts-per-step",
        ),
        (["--critic.optim.lr=1"], "--critic.optim.lr is not a flag; use --rl-critic-lr"),
        (["actor_rollout_ref.rollout.val_kwargs.temperature=0"],
         "'actor_rollout_ref.rollout.val_kwargs.temperature=0' stands before any flag; use --rl-eval-temperature"),
        (["--loss_type", "dr_grpo"], "--loss_type is not a flag; use --rl-loss-aggregation constant"),
        (["--max_prompt_length", "9"], "--max_prompt_length is not a flag; use --seq-length"),
        (["--gradient_accumulation_steps=9"], "--gradient_accumulation_steps is not a flag; use --global-batch-size"),
        (["--learning-rat", "1"], "--learning-rat is not a flag; --help-all lists all flags"),
    ],
)
def test_a_foreign_word_is_translated(argv: list[str], line: str):
    assert line in _problems(*argv)


def test_in_a_file_the_hint_is_spelt_as_in_a_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("learning_rate: 1e-6\n")
    assert f"{path} line 1: learning_rate is not a flag; use lr" in _problems("--config", str(path))


@pytest.mark.parametrize("argv", [[], ["--perform-rl-step"], ["--tokenizer-model", "x"]])
def test_a_bare_call_asks_for_the_model_first(argv: list[str]):
    first, *others = _problems(*argv)
    assert first.startswith("--load-hf is missing: the model to start from")
    assert not any("--num-layers" in line or "--tokenizer-model" in line for line in others)


def test_a_shape_of_which_a_part_is_missing_is_completed():
    lines = _problems("--num-layers", "2")
    assert not any("--load-hf" in line for line in lines)
    assert sum(" is missing" in line for line in lines[:3]) == 3  # two widths and the tokenizer


def test_what_was_typed_is_told_as_one_types_it():
    argv = ["--lr", "1e-6", "--bf16", "--seed", "1234", "--no-swiglu", "--rl-stop-strings", "a b", "c"]
    config, _ = read_config([*argv, "--run-dir", "x"], 1)
    told = typed_settings(config)
    assert told == ["--lr 1e-06", "--bf16", "--rl-stop-strings 'a b' c", "--run-dir x"]  # not what is the default
    assert typed_settings(read_config(shlex.split(" ".join(told)), 1)[0]) == told
