"""`megatron-rl`: its sub-commands, what they print and their exit codes."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_rl
from megatron_rl import cli
from tests.support.ranks import REPOSITORY


def test_the_version(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"megatron-rl {megatron_rl.__version__}\n"


@pytest.mark.parametrize("command", ["train", "eval", "check", "estimate"])
def test_help_begins_with_what_one_types(command: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main([command, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: megatron-rl {command} [--nproc RANKS]")


@pytest.mark.parametrize("command", ["export", "report", "compare", "new"])
def test_the_other_commands_have_a_help(command: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("usage: ")


def test_new_writes_an_environment(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["new", "evenness", "--dir", str(tmp_path)]) == 0
    assert (tmp_path / "evenness" / "__init__.py").is_file()
    assert cli.main(["new", "Even-ness", "--dir", str(tmp_path)]) == 1
    assert "'Even-ness' cannot name an environment" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["eval", "check", "estimate"])
def test_a_command_says_what_it_does_and_which_flags_are_its_own(command: str, capsys: pytest.CaptureFixture[str]):
    cli.main([command, "--help"])
    usage, about, own, rest = capsys.readouterr().out.split("\n\n", 3)
    assert about.startswith(("Evaluate weights", "Look for everything wrong", "Print the bytes"))
    assert own.startswith("for this command:\n")
    assert ("--check-world-size" in own) == (command != "eval")
    assert ("--rl-prompts-per-eval" in own) == (command == "eval")
    cli.main(["train", "--help"])
    assert capsys.readouterr().out.endswith(rest), "then come the common flags, as for train"


@pytest.mark.parametrize("command", sorted(cli.COMMANDS))
def test_help_is_read_in_a_terminal(command: str, capsys: pytest.CaptureFixture[str]):
    if command == "doctor":  # it has nothing to explain
        return
    for flag in ("--help", "--help-all") if command in ("train", "check") else ("--help",):
        with contextlib.suppress(SystemExit):
            cli.main([command, flag])
        assert "``" not in capsys.readouterr().out


@pytest.mark.parametrize(("word", "hint"), [("trian", "did you mean train?"), ("--lr", "these are the commands:")])
def test_an_unknown_command_is_called_so(word: str, hint: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main([word]) == 2
    assert capsys.readouterr().err.startswith(f"unknown command {word!r}; {hint}\n\nusage: megatron-rl COMMAND")
    assert cli.main([]) == 2
    assert capsys.readouterr().err.startswith("usage: megatron-rl COMMAND")


@pytest.mark.parametrize("command", ["check", "train", "estimate"])
def test_a_misspelt_flag_is_told_before_torch_or_transformers_is_imported(command: str, tmp_path: Path):
    """Of a command that has everything else: 4 CPU seconds became 0.4."""
    program = (
        "import sys; from megatron_rl.cli import main; code = main(sys.argv[1:]); "
        "print({'torch', 'transformers', 'megatron', 'numpy'} & set(sys.modules)); sys.exit(code)"
    )
    (tmp_path / "tokenizer").mkdir()
    words = [command, "--lrr", "1", "--perform-rl-step", "--tokenizer-model", str(tmp_path / "tokenizer")]
    words += ["--pretrained-checkpoint", str(tmp_path), "--langrl-env-config", "none.yaml", "--run-dir", str(tmp_path)]
    finished = subprocess.run([sys.executable, "-c", program, *words], cwd=REPOSITORY, capture_output=True, text=True)
    assert (finished.returncode, finished.stdout) == (2, "set()\n"), finished.stderr
    assert "--lrr is not a flag; did you mean --lr?" in finished.stderr
    assert "in the configuration (files and names are looked at once every flag is known):" in finished.stderr


@pytest.mark.parametrize(("more", "is_refused"), [([], True), (["--resume"], False), (["--eval-only"], False)])
def test_ranks_that_are_started_again_go_on(capsys: pytest.CaptureFixture[str], more: list[str], is_refused: bool):
    assert cli.main(["train", "--max-restarts", "2", *more]) == 2
    line = "--max-restarts 2 without --resume: what is started again would find its own run directory taken"
    assert (line in capsys.readouterr().err) == is_refused


def test_wrong_flags_are_found_before_anything_is_imported_or_started():
    """For 8 ranks here, and for those of 2 machines: torch is not there yet, so no rank can be."""
    program = (
        "import sys; from megatron_rl.cli import main; code = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    place = ["--nproc", "4", "--nnodes=2", "--node-rank=1", "--master-addr=a"]
    words = ["train", *place, "--tensor-model-parallel-size=3"]
    finished = subprocess.run([sys.executable, "-c", program, *words], cwd=REPOSITORY, capture_output=True, text=True)
    assert finished.returncode == 2, finished.stderr
    assert "world size 8 is not divisible by 3" in finished.stderr
