"""What holds for every declared flag, and the reference page."""

from __future__ import annotations

from collections import Counter

import pytest

from megatron_rl.config.flags import Flag, flags_of
from megatron_rl.config.no_effect import NoEffect, no_effect, no_effect_problems
from megatron_rl.config.reference import REFERENCE, help_text, main, reference_text
from megatron_rl.config.rl_config import all_flags, resolve, section_classes
from megatron_rl.config.rules import notes
from tests.support.flags import parse_config

SECTIONS = [
    "model", "layers", "latent", "delta", "experts", "rotation", "kernels", "tokenizer", "parallel", "precision",
    "training", "optimizer", "schedule", "lora", "checkpoint", "logging", "environment", "rollout", "quantization",
    "algorithm", "critic", "teacher",
]


def test_the_sections():
    assert list(section_classes()) == SECTIONS


@pytest.mark.parametrize("flag", all_flags(), ids=lambda flag: flag.name)
def test_a_flag_is_documented_and_its_default_is_allowed(flag: Flag):
    assert flag.help.endswith(".")
    assert len(flag.help) > 10
    if flag.default is not None and not flag.many:
        assert flag.refusal(flag.default) is None
        assert type(flag.default) is flag.kind


@pytest.mark.parametrize("row", dict.fromkeys(no_effect().values()), ids=lambda row: row.spellings[0])
def test_a_flag_without_effect_has_a_reason_and_is_read_in_every_spelling(row: NoEffect):
    assert len(row.why) > 10
    assert not row.why.endswith(".")
    words = [] if row.is_switch else ["8"] if row.note else [row.values.split(", ")[0]]
    words = ["1"] if row.values.startswith("--") else words  # the default of each of those flags
    for spelling in row.spellings:
        config = resolve(parse_config([spelling, *words]), 1)
        assert list(config.no_effect) == [row]
        assert notes(config) == ([row.note] if row.note else [])
        refused = row.values == "refused"
        assert [problem.flag for problem in no_effect_problems(config, 1)] == [row.spellings[0]] * refused


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--mock-data", "7"], "--mock-data takes no value, got '7'"),
        (["--num-workers"], "--num-workers needs a value"),
        (["--num-workers", "1", "2"], "--num-workers takes one value, got 2: '1 2'"),
        (["--rl-inference-parsers"], "--rl-inference-parsers needs a value"),
        (["--attention-dropout", "0.1"], "--attention-dropout '0.1' is not built: the attention kernels have none"),
        (["--tokenizer-type", "GPT2BPETokenizer"], "use HuggingFaceTokenizer"),
        (["--rl-inference-tensor-model-parallel-size", "2"], "'2' is not --tensor-model-parallel-size 1: rollouts"),
        (["--fp16"], "--fp16 is refused: gradients"),
    ],
)
def test_a_wrong_value_of_a_flag_without_effect_is_a_line(argv: list[str], text: str):
    (problem,) = no_effect_problems(resolve(parse_config(argv), 1), 1)
    assert text in problem.text


def test_every_spelling_and_field_name_belongs_to_one_flag():
    flags = [each for flag in all_flags() for each in (flag, *flag.seconds)]
    spellings = Counter([*(text for flag in flags for text in flag.spellings), *no_effect()])
    names = Counter(flag.name for flag in all_flags())
    assert [text for text, count in spellings.items() if count > 1] == []
    assert [name for name, count in names.items() if count > 1] == []


def test_a_switch_that_is_on_shows_the_flag_that_switches_it_off():
    assert [f.name for f in all_flags() if f.default is True and f.off is None] == []
    assert [f.name for f in all_flags() if f.default is not True and f.off is not None] == []


def test_every_switch_works_both_ways():
    for flag in all_flags():
        if flag.kind is bool:
            for text, on in flag.spellings.items():
                assert parse_config([f"--{text}"]).value(flag.name) is on


def test_about_twenty_flags_are_common():
    assert 18 <= sum(flag.common for flag in all_flags()) <= 26


def test_the_shape_of_a_model_is_one_section_that_the_short_help_leaves_out():
    own = {flag.spelling for name in SECTIONS[:6] for flag in flags_of(section_classes()[name])}
    short, whole = (help_text(common_only=common_only) for common_only in (True, False))
    listed = {line.split()[0] for line in whole[whole.index("\nmodel: ") :].splitlines() if line.startswith("  --")}
    assert len(own) == 77 and own <= listed
    assert "\nmodel: " not in short and not own & {line.split()[0] for line in short.splitlines() if line[:4] == "  --"}


def test_the_reference_page_is_up_to_date():
    assert REFERENCE.read_text(encoding="utf-8") == reference_text()
    assert main(["--check"]) == 0


def test_the_reference_page_has_a_row_for_every_flag():
    rows = [line for line in reference_text().splitlines() if line.startswith("| `--")]
    assert len(rows) == len(all_flags()) + len({*no_effect().values()})
    assert {row.count(" | ") for row in rows} == {2, 3}


def test_a_stale_page_fails_the_check_and_writing_repairs_it(tmp_path, capsys):
    page = tmp_path / "flags.md"
    assert main(["--check", "--output", str(page)]) == 1
    assert "stale" in capsys.readouterr().out
    assert main(["--output", str(page)]) == 0
    assert main(["--check", "--output", str(page)]) == 0
