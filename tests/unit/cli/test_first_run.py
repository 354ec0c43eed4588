"""`megatron-rl train --model DIR --data FILE --reward exact`: what such a line means, and what is wrong with it."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from megatron_rl import cli
from megatron_rl.cli import first_run
from megatron_rl.cli.first_run import Machine, full_flags
from megatron_rl.config.arguments import read_config
from megatron_rl.config.rl_config import RLConfig
from megatron_rl.errors import ConfigError
from tests.support.chats import STRICT, chat
from tests.support.hugging_face import write_shape
from tests.support.ranks import REPOSITORY
from tests.support.tiny import write_tokenizer
from tests.unit.config.test_documented_commands import QWEN2_5_0_5B


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without weights, and 160 questions."""
    folder = tmp_path_factory.mktemp("first")
    write_tokenizer(folder / "model")
    write_shape(folder / "model")
    rows = [{"question": f"{number}+1=", "answer": str(number + 1)} for number in range(160)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = [{"prompt": f"{number}+1=", "completion": str(number + 1)} for number in range(40)]
    (folder / "shown.jsonl").write_text("".join(json.dumps(row) + "\n" for row in shown))
    return folder


@pytest.fixture(autouse=True)
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def _config(*words: str) -> RLConfig:
    ranks, flags = full_flags(words)
    config, problems = read_config(flags, ranks.world_size)
    assert problems == []
    return config


def test_a_question_and_an_answer_are_enough() -> None:
    config = _config("--model", "model", "--data", "questions.jsonl", "--reward", "exact", "--lr", "3e-4", "--nproc=2")
    entry = yaml.safe_load(config.environment.langrl_env_config)
    assert entry == {
        "environment": "dataset", "args": {"path": "questions.jsonl", "reward": "exact", "chat": False, "held_out": 16}
    }  # fmt: skip
    assert config.training.perform_rl_step and config.optimizer.lr == 3e-4, "what is typed holds"
    assert (config.algorithm.grpo_prompts_per_step, config.algorithm.grpo_group_size) == (8, 8)
    assert config.training.micro_batch_size == 32, "half of 64 samples"
    assert config.parallel.use_distributed_optimizer
    assert config.rollout.rl_max_new_tokens == 256
    assert config.training.seq_length == 320, "256, a prompt of five tokens, in units of 64"
    assert config.training.train_iters == 20 and config.training.eval_interval == 4
    assert config.logging.run_dir.startswith("runs/questions-20")


def test_bins_are_longer_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 16k tokens, as where no flag says how long they are; on a CPU up to 32 sequences."""
    words = ["--model", "model", "--data", "questions.jsonl", "--reward", "exact", "--rl-max-new-tokens", "50"]
    assert _config(*words).training.micro_batch_size == 32
    monkeypatch.setattr(first_run, "find_machine", lambda ranks, _: (ranks, Machine(True, 10**10, True)))
    config = _config(*words)
    assert (config.training.seq_length, config.training.micro_batch_size) == (64, 256)
    assert _config(*words, "--seq-length", "300").training.micro_batch_size == 32


@pytest.mark.parametrize(
    "words", [["--reward", "exact"], ["--sft", "--data-args", "prompt=question", "completion=answer"]]
)
def test_a_model_too_large_for_a_rank_is_laid_over_several(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a billion numbers on two GPUs: 18 bytes each take 8.9 GB on one, with the optimizer's 12 over both 5.9."""
    write_tokenizer(tmp_path / "0.5b")
    (tmp_path / "0.5b" / "config.json").write_text(json.dumps(QWEN2_5_0_5B))
    words = ["--model", str(tmp_path / "0.5b"), "--data", "questions.jsonl", *words]

    def tensor_and_data(gigabytes: float, *more: str) -> tuple[int, int]:
        machine = Machine(True, int(gigabytes * 1e9), True)
        monkeypatch.setattr(first_run, "find_machine", lambda ranks, _: (ranks, machine))
        config = _config(*words, "--nproc", "2", *more)
        return config.parallel.tensor_model_parallel_size, config.data_parallel_size(2)

    assert tensor_and_data(56) == (1, 2), "a copy on each, where it fits"
    assert tensor_and_data(5) == (2, 1)
    with pytest.raises(ConfigError, match="no layout of 2 ranks fits"):
        tensor_and_data(1)
    with pytest.raises(ConfigError, match="does not fit"):
        tensor_and_data(5, "--pipeline-model-parallel-size", "1")  # whoever types a size lays the model out


@pytest.mark.parametrize("words", [["--reward", "exact"], ["--sft"]])
def test_a_row_that_is_too_long_is_skipped_and_named(words: list[str], caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"prompt": f"{number}+1=", "answer": "2", "completion": "2"} for number in range(40)]
    rows[16]["prompt"] = "1+" * 200
    Path("long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words += [] if "--sft" in words else ["--data-args", "prompt=prompt", "answer=answer"]
    config = _config("--model", "model", "--data", "long.jsonl", *words, "--seq-length", "128")
    assert config.training.seq_length == 128
    assert "1 row(s) will be skipped; row 17 has a prompt of 400 tokens" in caplog.text
    Path("long.jsonl").write_text("".join(json.dumps({**row, "prompt": "1+" * 99}) + "\n" for row in rows))
    with pytest.raises(ConfigError, match="row 1 has a prompt of 198 tokens, and 112 leave room"):
        _config("--model", "model", "--data", "long.jsonl", *words, "--seq-length", "128")


def test_demonstrations_need_no_reward() -> None:
    config = _config("--model", "model", "--data", "shown.jsonl", "--sft")
    assert not config.training.perform_rl_step
    assert config.training.global_batch_size == 32 and config.training.seq_length == 64
    assert config.training.eval_interval is None, "of 40 rows none is held out"


def test_several_rewards_and_options_of_the_data() -> None:
    words = ["--reward", "exact", "exact_number=0.5", "--data-args", "template={question} Go: ", "held_out=4"]
    config = _config("--model", "model", "--data", "questions.jsonl", *words)
    args = yaml.safe_load(config.environment.langrl_env_config)["args"]
    assert args["rewards"] == {"exact": 1.0, "exact_number": 0.5}
    assert (args["template"], args["held_out"]) == ("{question} Go: ", 4)


def test_the_documents_lines_are_whole(folder: Path) -> None:
    """The commands of docs/cli.md as they stand, on a model that is here; its rewards are the page's."""
    page = (REPOSITORY / "docs" / "cli.md").read_text(encoding="utf-8").split("## A first run in one line")[1]
    commands, code = (re.search(rf"```{name}\n(.*?)```", page, re.DOTALL)[1] for name in ("bash", "python"))
    (folder / "rewards.py").write_text(code)
    for command in commands.splitlines():
        _, name, *words = shlex.split(command.replace("demonstrations.jsonl", "shown.jsonl"))
        words[words.index("--model") + 1] = "model"
        assert name == "train" and _config(*words).logging.run_dir


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (["--data", "questions.jsonl"], ["--model is missing", "--reward is missing"]),
        (["--model", "model", "--reward", "exact"], ["--data is missing"]),
        (["--model", "model", "--data", "questions.jsonl", "--sft", "--reward", "exact"], ["takes no --reward"]),
        (["--model", "nowhere", "--data", "questions.jsonl", "--reward", "exact"], ["--model"]),
        (["--model", "model", "--data", "none.jsonl", "--reward", "exact"], ["--data: none.jsonl cannot be read"]),
        (["--model", "model", "--data", "questions.jsonl", "--reward", "exact=x"], ["'x' is no number"]),
        (["--model", "model", "--data", "questions.jsonl", "--sft"], ["have nothing to learn"]),
        (["--model", "model", "--data", "questions.jsonl", "--reward", "exact", "--lrr", "1"], ["did you mean --lr?"]),
    ],
)
def test_what_is_wrong_is_a_line_each(words: list[str], lines: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", *words]) == 2
    head, *found = capsys.readouterr().err.splitlines()
    assert head.startswith(f"{len(lines)} problem(s)")
    assert all(line in text for line, text in zip(lines, found, strict=True)), found


def test_what_is_missing_and_what_is_unknown_are_told_together() -> None:
    with pytest.raises(ConfigError) as refused:
        first_run.full_flags(["--data", "x.jsonl", "--sft", "--learning-rate", "1e-6"])
    lines = [problem.text for problem in refused.value.problems]
    assert [line.partition(";")[0].partition(":")[0] for line in lines] == [
        "--model is missing", "--learning-rate is not a flag",
    ]  # fmt: skip


def test_chat_templates(tmp_path: Path) -> None:
    """One that cannot be used is named; one that refuses the longest prompt is no reason to end."""
    (tmp_path / "strict.jinja").write_text(STRICT)
    (tmp_path / "broken.jinja").write_text("{{ nobody() }}")
    rows = [{"q": chat("user: 1+1="), "a": "2"}, {"q": chat("system: 1", "user: 1111+1111="), "a": "2222"}]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--model", "model", "--data", f"{tmp_path}/chats.jsonl", "--data-args", "prompt=q", "answer=a"]
    words += ["--reward", "exact", "--chat-template"]
    assert _config(*words, f"{tmp_path}/strict.jinja").training.seq_length > 256
    with pytest.raises(ConfigError, match="broken.jinja cannot render a single question .UndefinedError: 'nobody'"):
        full_flags([*words, f"{tmp_path}/broken.jinja"])
