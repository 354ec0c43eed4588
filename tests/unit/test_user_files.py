"""What a user names as a file is a text, or one line says why not: never a wait, a full memory or a traceback."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_rl import cli
from megatron_rl.chat import read_template
from megatron_rl.cli import serve
from megatron_rl.cli.generate import read_prompts
from megatron_rl.config.arguments import read_config
from megatron_rl.config.model_directory import saved_model
from megatron_rl.environments.config import load_environment_specs
from megatron_rl.environments.data.layouts import Layout
from megatron_rl.environments.data.rows import Source, read_rows
from megatron_rl.errors import CheckpointError, ConfigError
from megatron_rl.families import read_model
from megatron_rl.metrics.jsonl import read_json_object
from megatron_rl.metrics.rundir import RunDirectory, unwritable
from megatron_rl.registry import LOSSES, import_reference
from megatron_rl.run.preflight.starts import resumes
from megatron_rl.tensor_files import stored_tensors
from megatron_rl.user_files import path_refusal, read_text
from tests.support.ranks import REPOSITORY

NAMES = ("fifo", "/dev/zero", "loop", "folder", "n" * 5000, "nul\0byte", "nowhere")
"""What no text can be read from: a reader of the first waited for ever, one of the second filled the memory."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    Path("loop").symlink_to("loop")
    Path("folder").mkdir()
    return tmp_path


def _config(name: str) -> None:
    if problems := [each for each in read_config(["--config", name], 1)[1] if each.flag == "--config"]:
        raise ConfigError(problems)


def _in_folder(read: Callable[[str], object], file: str) -> Callable[[str], object]:
    """Reads ``file`` of a directory, which is a link to the name."""

    def reader(name: str) -> object:
        folder = Path("holds_it")
        folder.mkdir(exist_ok=True)
        if len(name) < 200 and "\0" not in name:
            Path(folder, file).symlink_to(os.path.abspath(name))
        return read(str(folder))

    return reader


def _rows(name: str) -> list[object]:
    return list(read_rows(Source("", "train", (Layout("question", "answer"),), path=name), lambda row: row.values))


READERS: dict[str, Callable[[str], object]] = {
    "--config": _config,
    "the list of environments": load_environment_specs,
    "--chat-template": read_template,
    "--prompts": lambda name: list(read_prompts(Path(name))),
    "rows": lambda name: _rows(name) if name.endswith(".jsonl") else _rows(_with_ending(name)),
    "config.json": _in_folder(read_model, "config.json"),
    "config.yaml of a run": _in_folder(lambda name: RunDirectory(Path(name)).read_settings(), "config.yaml"),
}


def _with_ending(name: str) -> str:
    if len(name) < 200 and "\0" not in name:
        Path("rows.jsonl").symlink_to(os.path.abspath(name))
        return "rows.jsonl"
    return f"{name}.jsonl"


@pytest.mark.parametrize("what", READERS)
@pytest.mark.parametrize("name", NAMES, ids=lambda name: name[:9].replace("\0", "."))
def test_what_is_no_text_file_is_one_line(here: Path, what: str, name: str):
    with pytest.raises((ConfigError, ValueError)) as caught:
        READERS[what](name)
    line = str(caught.value)
    assert "\n" not in line and len(line) < 12_000
    assert "cannot be read (" in line or "is a folder" in line or "is too long" in line or "control char" in line, line


@pytest.mark.parametrize("name", ["fifo", "/dev/zero", "loop"])
def test_what_may_be_absent_is_as_if_it_were(here: Path, name: str):
    Path("folder/run_state.json").symlink_to(os.path.abspath(name))
    assert saved_model("folder") is None
    assert read_json_object(Path("folder/run_state.json")) == {}
    with pytest.raises(ConfigError, match="--token-file .* cannot be read"):
        serve.COMMAND.parse(["no model", "--port", "0", "--token-file", name], 1)
    with pytest.raises(ConfigError, match="^no model") as caught:
        serve.COMMAND.parse(["no model", "--port", "0", "--token-file", "nowhere"], 1)
    assert "token" not in str(caught.value)


def test_a_byte_order_mark_is_no_part_of_the_text(here: Path):
    """As programs on Windows write it."""
    mark = "\N{BYTE ORDER MARK}"
    Path("run.yaml").write_text(f"{mark}lr: 1e-6\n")
    Path("template").write_text(f"{mark}{{{{ messages }}}}")
    Path("list.yaml").write_text(f"{mark}- environment: arithmetic\n")
    Path("prompts.jsonl").write_bytes(f'{mark}"one"\r\n"two"\r\n'.encode())
    Path("rows.jsonl").write_text(f'{mark}{{"question": "1+1?", "answer": "2"}}\n')
    Path("rows.csv").write_text(f"{mark}question,answer\n1+1?,2\n")
    assert read_config(["--config", "run.yaml"], 1)[0].optimizer.lr == 1e-6
    assert read_template("template") == "{{ messages }}"
    assert [spec.name for spec in load_environment_specs("list.yaml")] == ["arithmetic"]
    assert list(read_prompts(Path("prompts.jsonl"))) == ["one", "two"]
    assert _rows("rows.jsonl") == _rows("rows.csv") == [{"question": "1+1?", "answer": "2"}]


def test_links_that_lead_to_themselves(here: Path):
    config, problems = read_config(["--load", "loop", "--save", "loop", "--load-hf", "loop", "--hf-config", "x"], 1)
    assert resumes(config) and any("both say what the model is" in str(each) for each in problems)
    assert "loop is a file or a broken link" in unwritable(Path("loop"))
    assert "loop is a file or a broken link" in unwritable(Path("loop/run"))


def test_nothing_resolves_a_name_in_the_way_that_raises():
    """`os.path.realpath` does the same and has an answer for a link that leads to itself."""
    files = [*(REPOSITORY / "megatron_rl").rglob("*.py"), *(REPOSITORY / "environments").rglob("*.py")]
    assert [str(file) for file in files if ".resolve()" in file.read_text()] == []


def test_a_file_that_is_too_large_or_no_text(here: Path):
    Path("large").write_bytes(b"x" * 101)
    Path("latin").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match="has more than .* MiB"):
        read_text("large", 100)
    with pytest.raises(ValueError, match="is not UTF-8 text"):
        read_text("latin")


@pytest.mark.parametrize("name", ["-x", "--lr", "", " ", "n" * 256, "a\nb"])
def test_names_that_no_flag_takes(name: str):
    assert path_refusal(name) is not None
    _, problems = read_config([f"--run-dir={name}"], 1)
    assert any(each.flag == "--run-dir" and "missing" not in str(each) for each in problems)


@pytest.mark.parametrize("words", [["chat"], ["generate", "--prompts", "x"], ["serve"]])
@pytest.mark.parametrize("name", ["", "n" * 5000])
def test_a_model_of_no_such_name(words: list[str], name: str, capsys: pytest.CaptureFixture[str]):
    command, *rest = words
    assert cli.main([command, name, *rest]) == 2
    assert "MODEL is " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["", "n" * 5000])
@pytest.mark.parametrize(
    "words", [["report"], ["compare", "."], ["export", "--output-dir", "x", "--input-dir"], ["new", "fine", "--dir"]]
)
def test_a_directory_of_no_such_name(words: list[str], name: str, capsys: pytest.CaptureFixture[str], here: Path):
    with pytest.raises(SystemExit) as caught:
        cli.main([*words, name])
    assert caught.value.code == 2
    assert "is empty" in capsys.readouterr().err if not name else "is too long" in capsys.readouterr().err
    assert not Path("report.html").exists()


def test_an_extension_of_no_such_name():
    with pytest.raises(ConfigError, match="cannot be imported"):
        LOSSES.get("n" * 5000 + ".py:Loss")
    assert LOSSES.stated("n" * 5000 + ".py:Loss", "clamp_eps_lower") is None


@pytest.mark.parametrize("name", ["model.safetensors", "adapter_model.safetensors"])
def test_a_pipe_in_place_of_weights_is_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match=rf"{name} is not a whole safetensors file \(it is not a file\)"):
        stored_tensors(tmp_path)


def test_a_pipe_in_place_of_code_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "mine.py")
    with pytest.raises(ImportError, match="mine.py is not a file"):
        import_reference(str(tmp_path / "mine.py"))
