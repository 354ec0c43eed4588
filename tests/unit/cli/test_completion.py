"""Tab completion: what the shell offers, asked with the script that the command writes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl import cli
from tests.support.ranks import REPOSITORY

BASH = shutil.which("bash")
needs_bash = pytest.mark.skipif(BASH is None, reason="needs bash")
ASK = """
COMP_WORDS=("$@"); COMP_CWORD=$(( $# - 1 )); _megatron_rl; printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def script(capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["completion", "bash"]) == 0
    return capsys.readouterr().out


def _offered(script: str, *words: str) -> list[str]:
    # Without a PATH no program can be started: what is offered comes from the script alone, at once.
    command = [BASH, "--norc", "-c", script + ASK, "megatron-rl", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, env={"PATH": ""}).stdout.split()


@needs_bash
@pytest.mark.parametrize(("words", "offered"), [
    (["tra"], ["train"]),
    (["train", "--rl-policy-l"], ["--rl-policy-loss", "--rl-policy-loss-args"]),
    (["train", "--model", "x", "--nproc-"], ["--nproc-per-node"]),
    (["eval", "--no-swi"], ["--no-swiglu"]),
    (["train", "--rl-policy-loss", "gspo_"], ["gspo_token"]),
    (["train", "--lr", "1", "--lr-decay-style", "co"], ["constant", "cosine"]),
    (["completion", ""], ["bash", "zsh"]),
    (["report", "runs/"], []),
])  # fmt: skip
def test_commands_flags_and_their_values_are_offered(script, words, offered):
    assert _offered(script, "megatron-rl", *words) == offered


@needs_bash
def test_every_command_is_offered_and_files_where_nothing_else_is(script):
    assert _offered(script, "megatron-rl", "") == list(cli.COMMANDS)
    assert "complete -o default -F _megatron_rl megatron-rl" in script


def test_zsh_gets_the_script_behind_its_support_of_bashs(script, capsys):
    assert cli.main(["completion", "zsh"]) == 0
    written = capsys.readouterr().out
    assert written.endswith(script) and "bashcompinit\n" in written.removesuffix(script)
    zsh = shutil.which("zsh")
    if zsh is None:
        pytest.skip("needs zsh for the rest")
    asked = written + '\nprint -- "${_comps[megatron-rl]}"\n'
    ended = subprocess.run([zsh, "-f", "-c", asked], capture_output=True, text=True, check=True)
    assert "_bash_complete" in ended.stdout


def test_the_script_is_written_without_torch_and_another_shell_is_one_line(capsys):
    assert cli.main(["completion", "fish"]) == 2
    assert "megatron-rl completion bash" in capsys.readouterr().err
    program = "import sys; from megatron_rl import cli\n"
    program += "cli.main(['completion', 'zsh']); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
    assert "cli/*.txt" in Path(REPOSITORY, "setup.py").read_text(), "it is installed"
