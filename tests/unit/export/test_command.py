"""The command as it is typed: flags, exit codes, one line of error and no traceback."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from tests.support.forks import Fork, run_python
from tests.unit.export.conftest import read_tensors, write_model, write_tensors

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "tools" / "checkpoint" / "bf16_cast_fp8.py"
main = runpy.run_path(str(SCRIPT))["main"]


def _flags(source: Path, output: Path, *more: str) -> list[str]:
    return ["--input-bf16-hf-path", str(source), "--output-fp8-hf-path", str(output), *more]


@pytest.fixture(autouse=True)
def _own_signals() -> object:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_model(tmp_path / "in", "qwen3_moe")


@pytest.mark.parametrize("text", ["False", "false", "0", "True", "true", "1"])
def test_the_truth_of_a_word(source: Path, tmp_path: Path, text: str) -> None:
    assert main(_flags(source, tmp_path / "out", "--force-pow-2-scale", text)) == 0
    wanted = text in ("True", "true", "1")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (config.get("scale_fmt") == "ue8m0") is wanted
    scales = [t for name, t in read_tensors(tmp_path / "out").items() if name.endswith("_scale_inv")]
    assert all(bool((torch.frexp(scale).mantissa == 0.5).all()) for scale in scales) is wanted


@pytest.mark.parametrize(("form", "powers"), [("fp8_block", True), ("fp8_channel", False), ("int8", False)])
def test_without_the_flag_tiles_have_powers_of_two(source: Path, tmp_path: Path, form: str, powers: bool) -> None:
    assert main(_flags(source, tmp_path / "out", "--format", form)) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (config.get("scale_fmt") == "ue8m0") is powers
    scales = [t.float() for name, t in read_tensors(tmp_path / "out").items() if "_scale" in name]
    assert scales
    assert all(bool((torch.frexp(scale).mantissa == 0.5).all()) for scale in scales) is powers


@pytest.mark.parametrize("text", ["yes", "", "2", "None", "Falsee"])
def test_another_word_is_an_error(source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str) -> None:
    assert main(_flags(source, tmp_path / "out", "--force-pow-2-scale", text)) == 2
    assert caplog.messages == [f"--force-pow-2-scale is '{text}', which is neither True nor False; use one of them"]
    assert not (tmp_path / "out").exists()


def test_the_summary_lists_what_was_done(source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert main(_flags(source, tmp_path / "out", "--format", "int8")) == 0
    text = "\n".join(caplog.messages)
    assert "converted: 32 tensors" in text
    assert "8 x model.layers.*.mlp.experts.*.up_proj.weight" in text
    assert "2 x model.layers.*.mlp.gate.weight" in text[text.index("kept:") :]
    assert "1 x model.embed_tokens.weight" in text[text.index("kept:") :]
    assert "note:" in text  # experts in compressed-tensors


def test_the_summary_warns_of_dimensions_128_does_not_divide(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for rows, noted in ((192, True), (256, False), (64, False)):
        caplog.clear()
        weight = {"model.layers.0.mlp.up_proj.weight": torch.ones(rows, 128)}
        output = tmp_path / f"out{rows}"
        assert main(_flags(write_tensors(tmp_path / f"in{rows}", weight), output)) == 0
        assert any(line.startswith("note:") for line in caplog.messages) is noted


def _run(*flags: str, prefix: str = "") -> subprocess.CompletedProcess[str]:
    code = f"import runpy, sys; sys.argv = sys.argv[1:]; {prefix}; runpy.run_path(sys.argv[0], run_name='__main__')"
    return run_python("-c", code, SCRIPT, *flags)


def test_the_script_converts_and_says_one_line_when_it_cannot(source: Path, tmp_path: Path) -> None:
    done = _run(*_flags(source, tmp_path / "out", "--force-pow-2-scale", "False"), prefix="pass")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()
    again = _run(*_flags(source, tmp_path / "out"), prefix="pass")
    assert again.returncode == 1
    assert again.stderr.splitlines() == [
        f"output {tmp_path / 'out'} is not empty; use another directory, or --overwrite"
    ]


def test_a_real_limit_on_file_size_is_one_line(source: Path, tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100000, 100000))"
    done = _run(*_flags(source, tmp_path / "out"), prefix=limit)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "model.safetensors cannot be written (File too large)" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing(source: Path, tmp_path: Path, number: signal.Signals) -> None:
    """The writes wait, so that the signal comes in the middle of one."""
    wait = "import os, time; w = os.pwrite; os.pwrite = lambda *a: (time.sleep(0.05), w(*a))[1]"
    code = f"import runpy, sys; sys.argv = sys.argv[1:]; {wait}; runpy.run_path(sys.argv[0], run_name='__main__')"
    with (tmp_path / "log").open("wb") as log:
        fork = Fork(["-c", code, str(SCRIPT), *_flags(source, tmp_path / "out")], os.environ, log, log)
    until = time.monotonic() + 120
    while not (tmp_path / "out.tmp" / "model.safetensors").exists():
        assert time.monotonic() < until and fork.poll() is None
        time.sleep(0.01)
    os.kill(fork.pid, number)
    assert fork.wait(120) == 130
    assert (tmp_path / "log").read_text().splitlines() == ["interrupted; nothing was written"]
    (tmp_path / "log").unlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]
