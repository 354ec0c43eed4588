"""Runs beside each other: what differs, seeds as one group with mean and spread, and one page."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
import yaml

from megatron_rl import cli
from megatron_rl.errors import ConfigError
from megatron_rl.metrics import compare
from megatron_rl.metrics.compare import differences, groups_of, read_run, summary_rows
from tests.support.pages import NODE, shown_by

needs_node = pytest.mark.skipif(NODE is None, reason="needs node, to run the page's script")


def _write(folder: Path, name: str, rewards: list[float | None], lr: float = 1e-3, seed: int = 1) -> Path:
    run = folder / name
    run.mkdir()
    settings = {
        "optimizer": {"lr": lr},
        "critic": {"rl_critic_lr": lr},
        "training": {"seed": seed, "train_iters": len(rewards)},
        "logging": {"run_dir": str(run)},
        "tokenizer": {"tokenizer_model": f"{run}/tokenizer"},
    }
    (run / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    rows = [{"step": step, "critic/rewards/mean": value} for step, value in enumerate(rewards, start=1)]
    rows[-1]["val/arithmetic/pass@1"] = rewards[-1]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [
        _write(tmp_path, "a1", [0.0, 0.2, 0.4], seed=1),
        _write(tmp_path, "a2", [0.0, 0.4, 0.8], seed=2),
        _write(tmp_path, "b1", [0.0, None, 1.0], lr=1e-2, seed=1),
    ]


def test_seeds_are_one_group_and_what_is_of_the_place_or_follows_is_left_out(runs):
    read = [read_run(path) for path in runs]
    assert differences(read) == {"lr": [1e-3, 1e-3, 1e-2], "seed": [1, 2, 1]}
    a1, a2, b1 = map(str, runs)
    assert groups_of(read) == {f"{a1}, {a2}": [0, 1], b1: [2]}
    assert groups_of(read[:2]) == {f"{a1}, {a2}": [0, 1]}


def test_a_setting_that_happens_to_be_as_large_as_the_seed_still_differs(tmp_path: Path):
    read = [read_run(_write(tmp_path, str(n), [0.5] * n, seed=n)) for n in (1, 2)]
    assert differences(read) == {"seed": [1, 2], "train_iters": [1, 2]}
    assert list(groups_of(read).values()) == [[0], [1]]


def test_mean_and_spread_of_the_seeds(runs):
    read = [read_run(path) for path in runs]
    rows = {name: cells for name, *cells in summary_rows(read, groups_of(read))}
    # 0.4 and 0.8: mean 0.6, standard deviation sqrt(2 x 0.2^2 / 1) = 0.283
    assert rows["arithmetic pass@1"] == ["0.6 ± 0.28", "1"]
    # over the last steps: (0 + 0.2 + 0.4) / 3 = 0.2 and 0.4; of the third run the step that was not finite is left out
    assert rows["reward"] == ["0.3 ± 0.14", "0.5"]


def test_the_command_writes_a_table_and_one_page_that_fetches_nothing(runs, tmp_path, capsys):
    output = tmp_path / "both.html"
    assert cli.main(["compare", *map(str, runs), "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^ +\| a1, a2 +\| b1$", printed, re.MULTILINE), "run names, not paths, and seeds as one column"
    assert re.search(r"^setting +\| a1 +\| a2 +\| b1 *$", printed, re.MULTILINE)
    assert "train_iters" not in printed, "the same in all runs"
    assert re.search(r"arithmetic pass@1 +\| 0.6 ± 0.28 +\| 1", printed)
    html = output.read_text()
    assert "default-src 'none'" in html and not re.search(r"<(link|img)\b|\bsrc=", html)


def _heights(path: str) -> list[float]:
    return [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", path)]


def test_the_curves_as_a_table(runs, tmp_path, capsys):
    table = tmp_path / "curves.csv"
    output = ["--output", str(tmp_path / "page.html")]
    assert cli.main(["compare", *map(str, runs), *output, "--csv", str(table)]) == 0
    assert str(table) in capsys.readouterr().out
    rows = list(csv.reader(table.open(encoding="utf-8", newline="")))
    assert rows[0] == ["metric", "runs", "step", "mean", "lowest", "highest"]
    rewards = [row[1:] for row in rows if row[0] == "critic/rewards/mean"]
    assert [row[:2] for row in rewards] == [*(["a1, a2", step] for step in "123"), *(["b1", step] for step in "123")]
    found = [[float(value) if value else None for value in row[2:]] for row in rewards]
    expected = [[0, 0, 0], [0.3, 0.2, 0.4], [0.6, 0.4, 0.8], [0, 0, 0], None, [1, 1, 1]]
    assert found[4] == [None, None, None], "what was not finite is empty"
    assert all(row == pytest.approx(wanted) for row, wanted in zip(found, expected, strict=True) if wanted)
    assert [row[1:] for row in rows if row[0] == "val/arithmetic/pass@1"][0][:2] == ["a1, a2", "3"]


def test_runs_of_one_name_are_told_apart_by_their_paths(runs, tmp_path, capsys):
    (tmp_path / "more").mkdir()
    other = _write(tmp_path / "more", "a1", [0.0, 0.2, 0.4], lr=1.0)
    cli.main(["compare", str(runs[0]), str(other), "--output", str(tmp_path / "page.html")])
    assert f"{runs[0]} | {other}" in re.sub(" +", " ", capsys.readouterr().out)


def test_a_picture_of_the_curves(runs, tmp_path):
    pytest.importorskip("matplotlib", reason="draws with matplotlib, which the library does not need")
    picture = tmp_path / "curves.png"
    output = ["--output", str(tmp_path / "page.html")]
    assert cli.main(["compare", *map(str, runs), *output, "--png", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert len(picture.read_bytes()) > 10_000


def test_without_matplotlib_a_picture_is_one_line_that_says_how_to_get_it(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(compare, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        cli.main(["compare", *map(str, runs), "--png", str(tmp_path / "curves.png")])
    assert "--png needs matplotlib, which is not installed: pip install matplotlib" in capsys.readouterr().err


@needs_node
def test_the_page_draws_the_mean_of_seeds_with_a_band_and_breaks_a_line_at_a_gap(runs, tmp_path):
    output = tmp_path / "both.html"
    cli.main(["compare", *map(str, runs), "--output", str(output)])
    shown = shown_by(output)
    assert shown["header"] == "Runs compareda1, a2b1"
    assert shown["results"][:6] == ["", "a1, a2", "b1", "steps", "3 ± 0", "3"]
    assert shown["run"].endswith("lr0.0010.0010.01seed121")
    rewards, held_out = shown["drawn"]
    assert [rewards["title"], held_out["title"]] == ["Training reward: reward", "Held-out: arithmetic"]
    assert [color for color, _ in rewards["lines"]] == ["var(--c0)", "var(--c0)", "var(--c1)"], "band, mean, single run"
    band, mean, single = (path for _, path in rewards["lines"])
    assert band.endswith("Z") and [path.count("M") for path in (band, mean, single)] == [1, 1, 2]
    # Corners of the band are 0, 0.4, 0.8 above and 0.4, 0.2, 0 below, those of the mean 0, 0.3, 0.6.
    top, middle = _heights(band), _heights(mean)
    assert top[1] == pytest.approx(middle[0] + (middle[2] - middle[0]) * 0.4 / 0.6, abs=0.2)
    assert top[4] == pytest.approx(middle[0] + (middle[2] - middle[0]) * 0.2 / 0.6, abs=0.2)


@needs_node
def test_equal_settings_are_said_and_texts_of_a_run_stay_text(runs, tmp_path):
    hostile = _write(tmp_path, "<img src=x>", [0.0, 0.2, 0.4])
    cli.main(["compare", str(runs[0]), str(hostile), "--output", str(tmp_path / "page.html")])
    assert "<img" not in (tmp_path / "page.html").read_text()
    shown = shown_by(tmp_path / "page.html")
    assert shown["run"].endswith("All settings are the same.")
    assert f"a1, {hostile.name} 0.4" in shown["curves"]


@needs_node
def test_on_a_logarithmic_axis_equal_ratios_are_equal_distances(runs, tmp_path):
    for run in runs[:2]:
        rows = [{"step": step, "train/perplexity": value} for step, value in ((1, 1.0), (2, 10.0), (3, 100.0))]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cli.main(["compare", *map(str, runs[:2]), "--output", str(tmp_path / "page.html")])
    [card] = shown_by(tmp_path / "page.html")["drawn"]
    heights = _heights(card["lines"][1][1])
    assert len(heights) == 3
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.2)


def test_a_page_that_cannot_be_written_is_one_line(runs, tmp_path, capsys):
    with pytest.raises(SystemExit):
        cli.main(["compare", *map(str, runs[:2]), "--output", str(tmp_path / "nowhere" / "page.html")])
    assert "nowhere/page.html cannot be written: No such file or directory" in capsys.readouterr().err


def test_what_is_no_run_is_one_line(runs, tmp_path, capsys):
    assert cli.main(["compare", str(runs[0]), str(tmp_path)]) == 2
    assert "is no run directory: config.yaml cannot be read" in capsys.readouterr().err
    (runs[0] / "metrics.jsonl").unlink()
    with pytest.raises(ConfigError, match="has no steps yet"):
        read_run(runs[0])


@pytest.mark.parametrize("text", ["", "a list: [", "- 1", "lr: 1.0", "training: {lr: 1.0}", "a: " + "[" * 9999])
def test_another_programs_config_is_one_line(runs, text):
    (runs[0] / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match="is no run directory: config.yaml cannot be read"):
        read_run(runs[0])
