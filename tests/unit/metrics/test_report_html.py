"""The report: hostile text stays text, curves stay small, and nothing is fetched."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.metrics.jsonl import JsonlWriter
from megatron_rl.metrics.report import build_payload, main, to_script_json, write_report
from megatron_rl.metrics.report_rollouts import (
    FEWEST_STEPS,
    MAX_STEPS,
    MAX_TOKENS_PER_SAMPLE,
    TOKEN_BUDGET,
    build_rollouts,
    read_groups,
)
from megatron_rl.metrics.rollouts import write_rows
from megatron_rl.metrics.rundir import RunDirectory
from megatron_rl.types import Branch, Completion, Grade, Rollout, RolloutGroup, SourcedTask, Task
from tests.support.records import write_rollouts
from tests.support.rollouts import drawn, group_of, sample_of, told

HOSTILE = (
    "__STYLE__ __SCRIPT__ $& \\1",
    "</script><script>alert(1)</script>",
    "<!-- <script>",
    "__REPORT_DATA__",
    "]]> &lt; &amp; \" ' \\ \u2028 \u2029 \x00 \ud800 \U0001f600",
)


class ScriptCollector(HTMLParser):
    """What a browser would take for scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self._inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "script":
            self.scripts.append((dict(attrs), ""))
            self._inside = True

    def handle_data(self, data: str) -> None:
        if self._inside:
            attributes, text = self.scripts[-1]
            self.scripts[-1] = (attributes, text + data)

    def handle_endtag(self, tag: str) -> None:
        self._inside = self._inside and tag != "script"


def embedded_data(page: str) -> Any:
    collector = ScriptCollector()
    collector.feed(page)
    assert [attributes.get("id") for attributes, _ in collector.scripts] == ["report-data", None]
    return json.loads(collector.scripts[0][1])


def decode(ids: Sequence[int]) -> str:
    """Prompts are characters, and token 7 is hostile."""
    return HOSTILE[0] if ids == (7,) else "".join(map(chr, ids))


def make_group(text: str, tokens: int = 1) -> RolloutGroup:
    completion = Completion((7,) * tokens, (-0.5,) * tokens, "stop", policy_version=0)
    rollout = Rollout(completion, text, Grade(1.0))
    return RolloutGroup(SourcedTask(text, Task(text, text, {"gold": text})), tuple(map(ord, text)), (rollout,))


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "run")
    run.create({}, {}, ["python", "train_rl.py", *HOSTILE])
    return run


def test_hostile_text_comes_back_unchanged_and_stays_data(run: RunDirectory) -> None:
    groups = [make_group(text) for text in HOSTILE]
    write_rollouts(run.rollouts_path(1), 1, groups, decode_raw=decode)
    page = write_report(run.path).read_text(encoding="utf-8")
    data = embedded_data(page)
    shown = data["rollouts"][0]["groups"]
    assert [group["prompt"] for group in shown] == list(HOSTILE)
    assert [group["gold"] for group in shown] == list(HOSTILE)
    assert [group["samples"][0]["completion"] for group in shown] == list(HOSTILE)
    assert shown[0]["samples"][0]["tokens"] == [HOSTILE[0]]
    assert page.count("</script>") == 2
    assert HOSTILE[0] in data["facts"]["command"]


def test_escaped_json_holds_no_markup_and_is_ascii() -> None:
    text = to_script_json({"completion": HOSTILE, "loss": float("nan")})
    assert not set(text) & set("<>&\u2028\u2029")
    assert text.isascii()
    assert json.loads(text) == {"completion": list(HOSTILE), "loss": None}


def test_page_is_self_contained(run: RunDirectory) -> None:
    page = write_report(run.path).read_text(encoding="utf-8")
    urls = set(re.findall(r"https?://[^\"'\s)]+", page))
    assert urls <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"""<(link|img|iframe)\b|\bsrc=|@import|url\(|innerHTML|\beval\(""", page)
    assert "default-src 'none'" in page


def test_report_of_an_empty_directory_and_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"
    data = embedded_data((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert (data["charts"], data["rollouts"], data["table"], data["evaluation"]) == ([], [], [], None)
    with pytest.raises(SystemExit):
        main([str(tmp_path / "absent")])


def test_a_report_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "report.html").mkdir()
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    assert capsys.readouterr().err.endswith(f"the report of {tmp_path} cannot be written: Is a directory\n")


@pytest.mark.parametrize(("text", "total"), [("a: [", ""), ("training: {train_iters: 80, run_dir: a}", " of 80")])
def test_a_damaged_config_costs_the_number_of_steps_alone(tmp_path: Path, text: str, total: str) -> None:
    run = RunDirectory(tmp_path)
    JsonlWriter(run.metrics).write(3, {"train/loss": 1.0})
    run.config.write_text(text)
    assert re.fullmatch(rf"step \d+{total}, .*UTC", build_payload(run)["progress"])


def test_only_recorded_metrics_get_a_chart(run: RunDirectory) -> None:
    writer = JsonlWriter(run.metrics)
    writer.write(1, {"critic/rewards/mean": 0.25, "critic/score/mean": 0.25, "actor/grad_norm": float("nan")})
    writer.write(2, {"critic/rewards/mean": 0.5, "critic/score/mean": 0.5, "val/gsm8k/pass@1": 0.75})
    data = embedded_data(write_report(run.path).read_text(encoding="utf-8"))
    assert [chart["title"] for chart in data["charts"]] == ["Training reward", "Held-out: gsm8k"]
    assert data["figures"] == [["training reward", "0.25 \u2192 0.5"], ["gsm8k pass@1", "0.75"]]
    assert data["progress"].startswith("step 2, ")
    # The score repeats the reward here, so one line stands for both.
    assert data["charts"][0]["series"] == [{"label": "reward", "steps": [1, 2], "values": [0.25, 0.5]}]
    numbers = {"first": 0.25, "last": 0.5, "lowest": 0.25, "highest": 0.5}
    assert data["table"][0] == {"chart": "Training reward", "line": "reward", **numbers}


def test_verdict_and_extracted_answer_stand_beside_the_reward(run: RunDirectory) -> None:
    grades = [
        Grade(-1.0, status="wrong", extracted="35"),
        Grade(1.0, status="correct", extracted="34"),
        Grade(-1.0, status="wrong", extracted="<b>36"),
        Grade(-1.0, status="no_answer"),
        Grade(None, code="timeout", message="slow"),
        Grade(1.0),
        Grade(2.0),
    ]
    group = make_group("2+2")
    rollouts = tuple(replace(group.rollouts[0], grade=told(grade)) for grade in grades)
    write_rollouts(run.rollouts_path(1), 1, [replace(group, rollouts=rollouts)])
    [shown] = embedded_data(write_report(run.path).read_text(encoding="utf-8"))["rollouts"][0]["groups"]
    assert [(sample["verdict"], sample["correct"], sample["extracted"]) for sample in shown["samples"]] == [
        ("wrong", False, "35"), ("correct", True, "34"), ("wrong", False, "<b>36"), ("no_answer", False, None),
        ("not graded", None, None), ("correct", True, None), ("graded", None, None),
    ]  # fmt: skip
    assert [sample["by_reward"] for sample in shown["samples"]] == [False] * 5 + [True, False]
    # rewards -1, 1, -1, -1, 1 and 2 of the six that were graded
    assert (shown["count"], shown["mean"], shown["correct"], shown["equal"]) == (7, pytest.approx(1 / 6), 2, False)


def test_of_records_without_correct_nobody_can_tell(tmp_path: Path) -> None:
    group, path = make_group("2+2"), tmp_path / "step_000001.jsonl"
    rollouts = [replace(group.rollouts[0], grade=Grade(reward)) for reward in (-1.0, 0.0, 0.5)]
    write_rollouts(path, 1, [replace(group, rollouts=tuple(rollouts))])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({k: v for k, v in row.items() if k != "correct"}) + "\n" for row in rows))
    [shown] = build_rollouts(tmp_path)[0]["groups"]
    assert [(sample["correct"], sample["verdict"]) for sample in shown["samples"]] == [(None, "graded")] * 3
    assert shown["correct"] is None


def test_identical_answers_are_shown_once(tmp_path: Path) -> None:
    """Of six samples 0, 2 and 5 say the same; 3 got another reward, and 4 was cut at its limit."""
    group = make_group("2+2")
    said = group.rollouts[0]
    cut = replace(said, completion=replace(said.completion, finish_reason="length"))
    rollouts = (said, replace(said, text="other"), said, replace(said, grade=Grade(0.0)), cut, said)
    write_rollouts(tmp_path / "step_000001.jsonl", 1, [replace(group, rollouts=rollouts)])
    [shown] = build_rollouts(tmp_path)[0]["groups"]
    assert [sample["samples"] for sample in shown["samples"]] == [[0, 2, 5], [1], [3], [4]]
    assert (shown["count"], shown["truncated"], shown["mean"]) == (6, 1, pytest.approx(5 / 6))


def test_rewards_and_signal_by_environment(run: RunDirectory) -> None:
    writer = JsonlWriter(run.metrics)
    for step, (easy, hard) in enumerate([(0.5, 0.0), (1.0, 0.25)], start=1):
        writer.write(step, {
            "critic/rewards/mean": (easy + hard) / 2, "training/signal_share": 0.75,
            "reward/easy/mean": easy, "reward/easy/signal_share": 1.0,
            "reward/hard/mean": hard, "reward/hard/signal_share": 0.5,
        })  # fmt: skip
    data = embedded_data(write_report(run.path).read_text(encoding="utf-8"))
    assert data["training"]["rows"] == [
        ["easy", "0.5 \u2192 1", "1"], ["hard", "0 \u2192 0.25", "0.5"], ["all", "0.25 \u2192 0.625", "0.75"],
    ]  # fmt: skip
    lines = {chart["title"]: [one["label"] for one in chart["series"]] for chart in data["charts"]}
    assert lines["Training reward"] == ["reward", "easy", "hard"]
    assert lines["Share of groups with reward variance"] == ["all", "easy", "hard"]


def test_tokens_of_the_environment_have_no_logprob(tmp_path: Path) -> None:
    """Six tokens, of which 2, 3 and 5 were fed in; a span beyond the end is cut, an empty one dropped."""
    write_rollouts(tmp_path / "step_000001.jsonl", 1, [make_group("a", tokens=6), make_group("b", tokens=2)])
    rows = [json.loads(line) for line in (tmp_path / "step_000001.jsonl").read_text().splitlines()]
    rows[0]["environment_spans"] = [[2, 4], [4, 4], [5, 9]]
    (tmp_path / "step_000001.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fed, plain = (group["samples"][0] for group in build_rollouts(tmp_path)[0]["groups"])
    assert fed["spans"] == [(2, 4), (5, 6)]
    assert fed["logprobs"] == [-0.5, -0.5, None, None, -0.5, None]
    assert (plain["spans"], plain["logprobs"]) == ([], [-0.5, -0.5])


def test_held_out_answers_follow_the_training_steps(tmp_path: Path) -> None:
    write_rollouts(tmp_path / "step_000002.jsonl", 2, [make_group("a")])
    for step in (0, 2):
        groups = [make_group("b"), make_group("b")]
        write_rollouts(tmp_path / f"eval_{step:06d}.jsonl", step, groups, greedy=[False, True])
    steps = build_rollouts(tmp_path)
    assert [step["label"] for step in steps] == ["step 2", "held-out, step 0", "held-out, step 2"]
    [group] = steps[1]["groups"]  # the greedy answer is beside the sampled ones, and not of their mean
    assert [sample["greedy"] for sample in group["samples"]] == [False, True]
    assert group["count"] == 1


def test_the_newest_results_are_a_table(run: RunDirectory) -> None:
    writer = JsonlWriter(run.metrics)
    measures = {"pass@1": 0.5, "pass@1_ci95": 0.25, "pass@4": 1.0, "maj@k": 0.75, "greedy": 0.25, "reward": -0.5,
                "response_length": 12.34, "truncated": 0.125, "num_tasks": 30.0, "failed_grades": 2.0}  # fmt: skip
    writer.write(0, {f"val/aime/{measure}": 0.0 for measure in measures})
    writer.write(4, {f"val/aime/{measure}": value for measure, value in measures.items()})
    assert embedded_data(write_report(run.path).read_text(encoding="utf-8"))["evaluation"] == {
        "step": 4,
        "headers": ["environment", "pass@1 = avg@k", "pass@4", "maj@k", "greedy", "reward", "tokens", "truncated",
                    "tasks", "failed"],
        "rows": [["aime", "0.500 \u00b1 0.250", "1.000", "0.750", "0.250", "-0.500", "12.3", "0.125", "30", "2"]],
    }  # fmt: skip


def test_rollouts_are_cut_to_a_size_a_browser_opens(tmp_path: Path) -> None:
    groups = [make_group(f"t{index}", tokens=MAX_TOKENS_PER_SAMPLE + 5) for index in range(12)]
    for step in range(1, 2 * MAX_STEPS + 1):
        write_rollouts(tmp_path / f"step_{step:06d}.jsonl", step, groups[: 12 if step > 78 else 1])
    steps = build_rollouts(tmp_path)
    assert len(steps) == MAX_STEPS
    assert (steps[0]["step"], steps[-1]["step"]) == (1, 2 * MAX_STEPS)
    assert steps[-1]["recorded"] == 12
    assert len(steps[-1]["groups"]) == -(-TOKEN_BUDGET // MAX_STEPS // MAX_TOKENS_PER_SAMPLE)
    sample = steps[-1]["groups"][0]["samples"][0]
    assert (len(sample["tokens"]), sample["num_tokens"]) == (MAX_TOKENS_PER_SAMPLE, MAX_TOKENS_PER_SAMPLE + 5)
    assert sample["tokens"][0] == "[7]"


def test_of_large_files_few_are_read_and_not_to_their_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged line is no sample; what is beyond the budget is not even parsed."""
    group = make_group("a", tokens=10)
    for step in range(1, 11):
        write_rollouts(tmp_path / f"step_{step:06d}.jsonl", step, [replace(group, rollouts=group.rollouts * 3)] * 2)
    monkeypatch.setattr("megatron_rl.metrics.report_rollouts.BYTE_BUDGET", 1000)
    assert len(build_rollouts(tmp_path)) == FEWEST_STEPS
    path = tmp_path / "step_000001.jsonl"
    lines = path.read_text().splitlines()
    other = [line.replace('"task_id": "a"', '"task_id": "b"') for line in lines]
    path.write_text("\n".join(["{torn", *lines[:3], *other[:2]]) + "\n")
    rows, recorded = read_groups(path, budget=15)
    assert ([row["sample"] for row in rows], recorded) == ([0, 1, 2], 5)


def test_sequences_of_a_sample_are_shown_together_and_counted_once(tmp_path: Path) -> None:
    """Two samples are alike in all their sequences, one only in the first."""
    tree = sample_of(1.0, ([1], drawn([7, 8])), ([1, 7, 2], drawn([8], finish_reason="length")))
    other = replace(tree, branches=(Branch((3,), drawn([8])),))
    failed = sample_of(None, ([4], drawn([7])))
    path = tmp_path / "step_000001.jsonl"
    write_rollouts(path, 1, [group_of(tree, other, tree, failed, prompt_ids=(1,))])
    [step] = build_rollouts(tmp_path)
    [group] = step["groups"]
    figures = step["recorded"], group["count"], group["mean"], group["truncated"], group["prompt"]
    assert figures == (4, 4, 1.0, 2, "[1]")
    alike, apart, bad = group["samples"]
    assert (alike["samples"], apart["samples"], bad["samples"]) == ([0, 2], [1], [3])
    assert (alike["prompt"], bad["prompt"]) == (None, "[4]")
    [branch] = alike["branches"]
    shown = {name: branch[name] for name in ("number", "of", "shared", "read", "tokens", "finish_reason")}
    assert shown == {
        "number": 1, "of": 0, "shared": 2, "read": "[2]", "tokens": ["[8]"], "finish_reason": "length",
    }  # fmt: skip
    assert (bad["branches"], bad["verdict"]) == ([], "not graded")


def test_rows_of_before_there_were_branches_are_a_sample_each(tmp_path: Path) -> None:
    path = tmp_path / "step_000001.jsonl"
    write_rollouts(path, 1, [make_group("a"), make_group("b")], decode_raw=decode)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        del row["branch"]
    write_rows(path, rows)
    [step] = build_rollouts(tmp_path)
    assert step["recorded"] == 2
    assert [len(group["samples"]) for group in step["groups"]] == [1, 1]
