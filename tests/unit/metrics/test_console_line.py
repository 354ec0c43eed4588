"""The exact text of the terminal lines."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest

from megatron_rl.metrics.console import (
    COMPACT,
    ERASE_LINE,
    Column,
    ConsoleWriter,
    format_cells,
    format_duration,
    format_number,
)
from megatron_rl.metrics.rollouts import SHOWN_CHARACTERS, TextSample

RL_STEP = {
    "critic/rewards/mean": 0.4312,
    "response_length/mean": 21.34,
    "actor/pg_loss": -0.01214,
    "actor/grad_norm": 0.5234,
    "training/rollout_logprob_gap_mean": 1.23e-6,
    "timing_s/gen": 0.31,
    "timing_s/update_actor": 0.18,
    "perf/throughput": 12_120.0,
}


WORST = TextSample(
    "worst", 3, "toy", "7", "<bos>[b]2+2=", "so\n\x1b[2J\x1b]0;title\x07 5<eos>", 0.0, False, "4", 0.25, 16
)


class Terminal(io.StringIO):
    """A stream that lines may be erased on."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")


def uncoloured(stream: io.StringIO) -> str:
    """What was written, without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())


def test_a_sample_is_a_few_plain_lines() -> None:
    """What the model wrote to control a terminal is shown, not obeyed."""
    stream = io.StringIO()
    ConsoleWriter(stream, total_steps=80).write_samples(10, [WORST])
    assert stream.getvalue() == (
        "sample 10/80 | worst group | toy 7\n"
        "    prompt <bos>[b]2+2=\n"
        "    answer so↵�[2J�]0;title� 5<eos>\n"
        "    reward 0, wrong; right answer: 4; mean of the group's 16: 0.25\n"
    )


def test_a_reward_that_does_not_tell_is_neither_correct_nor_wrong() -> None:
    assert replace(WORST, correct=None).verdict == "0; right answer: 4; mean of the group's 16: 0.25"


def test_a_terminal_gets_a_frame_around_a_sample_and_keeps_its_bar() -> None:
    stream = Terminal()
    ConsoleWriter(stream, total_steps=80).write_samples(10, [WORST])
    text = uncoloured(stream)
    assert text.startswith(f"{ERASE_LINE}╭─ sample 10/80 | worst group | toy 7 ─")
    assert "│ prompt <bos>[b]2+2= " in text and "│ answer so↵�[2J�]0;title� 5<eos> " in text
    assert text.endswith("  12%\r")
    assert "\x1b" not in text.replace(ERASE_LINE, "")


def test_long_texts_are_cut_in_the_middle() -> None:
    sample = replace(WORST, prompt="q" * 1000, answer="a" * 1000 + "\n" * 5 + "42")
    stream = io.StringIO()
    ConsoleWriter(stream, total_steps=80).write_samples(10, [sample])
    assert "a [...] a" in stream.getvalue() and stream.getvalue().count("\n") == 4
    assert max(map(len, stream.getvalue().splitlines())) < SHOWN_CHARACTERS + 20


def test_rl_step_line() -> None:
    stream = io.StringIO()
    ConsoleWriter(stream, total_steps=80).write(2, RL_STEP)
    assert stream.getvalue() == (
        "step  2/80 | reward 0.43 | len 21.3 | loss -0.0121 | grad 0.523 | gap 1.2e-06 "
        "| gen 0.3s train 0.2s | 12.1k tok/s\n"
    )


def test_supervised_step_line() -> None:
    stream = io.StringIO()
    writer = ConsoleWriter(stream, total_steps=300)
    writer.write(12, {"train/loss": 1.23456, "train/perplexity": 3.437, "actor/lr": 1e-4})
    assert stream.getvalue() == "step  12/300 | loss 1.2346 | ppl 3.437 | lr 1.00e-04\n"


def test_evaluation_line_for_each_environment() -> None:
    stream = io.StringIO()
    ConsoleWriter(stream, total_steps=80).write(
        0,
        {
            "val/arithmetic/pass@1": 0.512,
            "val/arithmetic/greedy": 0.55,
            "val/arithmetic/response_length": 20.12,
            "val/team/math/pass@8": 1.0,
        },
    )
    assert stream.getvalue() == (
        "eval  0/80 | arithmetic | pass@1 0.512 | greedy 0.550 | len 20.1\neval  0/80 | team/math | pass@8 1.000\n"
    )


def test_glue_waits_for_a_neighbour() -> None:
    columns = [Column("gen {}s", "absent"), Column("train {}s", "t", ".1f", glue=" "), Column("{} tok", "n", COMPACT)]
    assert format_cells(columns, {"t": 2.0, "n": 5}) == "train 2.0s | 5 tok"


def test_plain_stream_gets_no_control_characters() -> None:
    stream = io.StringIO()
    writer = ConsoleWriter(stream, total_steps=2)
    writer.write(1, RL_STEP)
    writer.close()
    assert "\x1b" not in stream.getvalue() and "\r" not in stream.getvalue()


def test_terminal_gets_a_bar_that_the_next_line_erases() -> None:
    stream, now = Terminal(), iter([0.0, 30.0])
    writer = ConsoleWriter(stream, total_steps=4, clock=lambda: next(now))
    writer.write(1, {"critic/rewards/mean": 0.5})
    writer.write(2, {"critic/rewards/mean": 1.0})
    writer.close()
    assert uncoloured(stream) == (
        f"{ERASE_LINE}step 1/4 | reward 0.50\n"
        f"{ERASE_LINE}━━━━━━╺━━━━━━━━━━━━━━━━━  25%\r"
        f"{ERASE_LINE}step 2/4 | reward 1.00\n"
        f"{ERASE_LINE}━━━━━━━━━━━━╺━━━━━━━━━━━  50%  1m 00s left\r"
        f"{ERASE_LINE}"
    )


def test_narrow_encoding_loses_characters_not_lines() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    ConsoleWriter(stream, 1).write(1, {"val/数学/pass@1": 0.5})
    assert raw.getvalue() == b"eval 1/1 | ?? | pass@1 0.500\n"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (999, "999"),
        (999.6, "1.0k"),
        (12_120, "12.1k"),
        (3.4e6, "3.4M"),
        (2.5e9, "2.5G"),
        (-1500, "-1.5k"),
    ],
)
def test_compact_numbers(value: float, text: str) -> None:
    assert format_number(value, COMPACT) == text


def test_nonfinite_numbers_are_shown() -> None:
    assert format_number(float("nan"), ".2f") == "nan"
    assert format_number(float("inf"), COMPACT) == "infG"


@pytest.mark.parametrize(("seconds", "text"), [(45.2, "45s"), (200, "3m 20s"), (7500, "2h 05m")])
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
