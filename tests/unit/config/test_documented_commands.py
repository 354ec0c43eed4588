"""Every command of README and docs that starts training has flags that are there, with values they take."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from megatron_rl.cli.first_run import FirstRun, is_first_run
from megatron_rl.cli.options import read_ranks, take
from megatron_rl.cli.propose import Question, proposes
from megatron_rl.config.arguments import read_config
from megatron_rl.config.rl_config import RLConfig

REPOSITORY = Path(__file__).parents[3]
PAGES = sorted([REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")])
TUTORIAL = REPOSITORY / "docs" / "tutorial.md"
QWEN2_5_0_5B = {
    "architectures": ["Qwen2ForCausalLM"], "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14,
    "num_hidden_layers": 24, "num_key_value_heads": 2, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "tie_word_embeddings": True, "vocab_size": 151936,
}  # fmt: skip
_STARTS = re.compile(r"(?:train_rl\.py|megatron-rl (?:train|eval|check|estimate))(?=\s+--)")


def _commands(page: Path) -> list[str]:
    """Whole lines of fenced blocks, continuations joined, and what stands in backticks."""
    fences = re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    lines = [line for fence in fences for line in fence.replace("\\\n", " ").splitlines()]
    spans = re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL))
    return [text for text in (*lines, *(span.replace("\n", " ") for span in spans)) if _STARTS.search(text)]


COMMANDS = [pytest.param(text, id=f"{page.stem}-{n}") for page in PAGES for n, text in enumerate(_commands(page))]


def _read(text: str) -> tuple[RLConfig, list[str], bool]:
    """The configuration, its problems, and whether the command is only a part of one."""
    words = shlex.split(text[_STARTS.search(text).end() :], comments=True)
    shown = [word for word in words if word not in ("...", "FLAGS", "--help")]
    shown += ["--eval-only"] if "megatron-rl eval" in text else []
    found, flags = read_ranks(shown)
    if is_first_run(flags) and not proposes(flags):  # tests/unit/cli/test_first_run.py runs those of docs/cli.md
        asked, flags = take(FirstRun, flags)
        assert asked.model and asked.data and (asked.reward or asked.sft)
        flags = ["--load-hf", "DIR", *flags]
    elif proposes(flags):
        asked, flags = take(Question, flags)
        flags = ["--load-hf", "DIR", *flags]
    ranks = re.search(r"--nproc-per-node[= ](\d+)", text)
    config, problems = read_config(flags, int(ranks[1]) if ranks else found.world_size)
    return config, problems, "--run-dir" not in shown


def test_there_are_some():
    assert len(COMMANDS) >= 8


@pytest.mark.parametrize("text", COMMANDS)
def test_its_flags_are_there(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen2.5-0.5B-Instruct", "Qwen2.5-7B", "DIR"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text(json.dumps(QWEN2_5_0_5B))
        (tmp_path / name / "tokenizer_config.json").touch()
    settings = re.search(r"`sorting-model.yaml`.*?```yaml\n(.*?)```", TUTORIAL.read_text(), re.DOTALL)[1]
    (tmp_path / "sorting-model.yaml").write_text(settings)
    monkeypatch.chdir(tmp_path)
    _, problems, is_a_part = _read(text)
    left_out = (" is missing", "not divisible", "does not say what its model is")  # by a part of a command
    assert [line for line in map(str, problems) if not (is_a_part and any(part in line for part in left_out))] == []


def test_the_command_for_gpus_trains_in_bf16_and_is_found():
    readme = (REPOSITORY / "README.md").read_text()
    block = readme.partition("## Every setting a flag")[2].partition("```")[2].partition("```")[0]
    assert block.index("/bin/activate") < block.index("megatron-rl train")
    (text,) = [text for text in _commands(REPOSITORY / "README.md") if "--nproc 8" in text]
    assert _read(text)[0].precision.bf16
