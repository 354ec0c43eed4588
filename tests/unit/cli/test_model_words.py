"""What `chat` and `generate` understand: models, short flags and files of prompts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_rl import cli
from megatron_rl.checkpoint.hf.load import import_hf
from megatron_rl.cli import generate, serve
from megatron_rl.cli.generate import read_prompts
from megatron_rl.cli.model import model_config
from megatron_rl.cli.options import take
from megatron_rl.cli.serve import Place
from megatron_rl.errors import ConfigError
from megatron_rl.families import read_model
from megatron_rl.families.family import SMALL
from megatron_rl.inference.kv_cache import blocks_within, rows_within
from megatron_rl.run.memory.estimate import slot_bytes
from tests.support.chats import STRICT
from tests.support.hugging_face import write_model
from tests.support.tiny import write_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_model(directory, "qwen2", {**SMALL, "vocab_size": 17})
    write_tokenizer(directory)
    return directory


def test_short_flags_are_those_of_evaluations(model: Path):
    words = ["--temperature=0.7", "--top-p", "0.9", "--max-new-tokens", "5", "--seed", "3"]
    config = model_config(str(model), words, world_size=1, at_once=7)
    rollout = config.rollout
    assert (rollout.rl_eval_temperature, rollout.rl_eval_top_p, rollout.rl_eval_max_new_tokens) == (0.7, 0.9, 5)
    assert (config.training.seed, rollout.inference_max_batch_size) == (3, 7)


def test_temperature_0_is_greedy(model: Path):
    assert model_config(str(model), ["--temperature", "0"], 1, 1).rollout.rl_eval_top_k == 1


def test_an_answer_has_half_of_what_a_short_model_may_see(model: Path):
    config = model_config(str(model), [], 1, 1)
    positions = config.model.max_position_embeddings
    assert (config.training.seq_length, config.rollout.rl_eval_max_new_tokens) == (positions, positions // 2)


def test_a_converted_model_needs_no_run(model: Path, tmp_path: Path):
    """Its checkpoint says what it is; there is no config.yaml."""
    import_hf(read_model(model), tmp_path / "converted", torch.float32, 8)
    converted, given = (model_config(str(path), [], 1, 1) for path in (tmp_path / "converted", model))
    assert converted.checkpoint.load == str(tmp_path / "converted")
    assert converted.architecture() == given.architecture()
    assert converted.tokenizer.tokenizer_model == str(model)


SMOLLM2 = {
    "model_type": "llama", "num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip
"""135 million weights: 0.5 GB in fp32, and 64 sequences of 4,096 tokens would be 12."""


@pytest.mark.parametrize(
    ("flags", "changes", "rows", "most_gib"),
    [
        ("", {}, 5, 1.0),
        ("--bf16", {}, 11, 1.0),
        ("--seq-length 8192", {}, 2, 1.0),
        ("--seq-length 512 --max-new-tokens 100", {}, 45, 1.0),
        ("--seq-length 65536", {"max_position_embeddings": 65536}, 2, 6.0),
        ("--bf16", {"hidden_size": 4608, "intermediate_size": 12288, "head_dim": 64}, 64, 12.0),
        ("--inference-max-batch-size 16", {}, 16, 3.0),
        ("--inference-dynamic-batching-buffer-size-gb 3", {}, 17, 3.0),
        ("--rl-rollout-memory-fraction 0.5", {}, 64, 12.0),
    ],
)
def test_a_server_takes_no_more_than_it_needs(tmp_path: Path, monkeypatch, flags, changes, rows, most_gib):
    """By arithmetic: of the model there is only its config.json, and nothing is allocated."""
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2 | changes))
    monkeypatch.setattr("megatron_rl.cli.model.preflight", lambda config, is_run: [])
    plain = SimpleNamespace(has_chat_template=lambda: False)
    monkeypatch.setattr("megatron_rl.cli.model.open_tokenizer", lambda config: plain)
    words = [str(tmp_path), "--port", "0", "--tokenizer-model", "any", *flags.split()]
    config = serve.COMMAND.parse(words, 1).config
    rollout, sequence = config.rollout, slot_bytes(config)
    budget = rollout.inference_dynamic_batching_buffer_size_gb
    length = rollout.inference_max_seq_length
    assert rows_within(budget, sequence, length, rollout.inference_max_batch_size) == rows
    assert rows * sequence <= most_gib * 2**30
    for size in (64, 256):
        assert blocks_within(budget, sequence, length, size, rollout.inference_max_batch_size) * size >= length


@pytest.mark.parametrize("text", ["", "- 1", "training: {lr: 1.0}"])
def test_another_programs_config_is_one_line(tmp_path: Path, text: str):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match="is no run directory: config.yaml cannot be read") as caught:
        model_config(str(tmp_path), [], 1, 1)
    assert len(caught.value.lines) == 1


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["nowhere/model"], "nowhere/model"),
        (["{folder}"], "no config.json of Hugging Face and no checkpoint of ours and, there or above, no config.yaml"),
        (["{model}", "--temprature", "1"], "--temprature is not a flag"),
        (["{model}", "--tensor-model-parallel-size", "3"], "world size 1 is not divisible by 3"),
    ],
)
def test_what_is_wrong_is_one_line(model, tmp_path, capsys, monkeypatch, words, line):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    words = [word.format(model=model, folder=tmp_path) for word in words]
    assert cli.main(["chat", *words]) == 2
    head, *problems = capsys.readouterr().err.splitlines()
    assert "problem(s) in the configuration" in head
    assert any(line in problem for problem in problems)


def test_prompts_of_a_file(tmp_path: Path):
    text, rows = tmp_path / "a.txt", tmp_path / "a.jsonl"
    text.write_text("one\n\n two\n")
    rows.write_text('"one"\n{"prompt": "two"}\n{"messages": [{"role": "user", "content": "three"}]}\n')
    assert list(read_prompts(text)) == ["one", " two"]
    assert list(read_prompts(rows)) == ["one", "two", ({"role": "user", "content": "three"},)]


def test_a_switch_takes_no_value():
    """``--allow-remote=false`` permitted it."""
    with pytest.raises(ConfigError) as caught:
        take(Place, ["--allow-remote=false", "--port=1"])
    assert caught.value.lines == ["--allow-remote takes no value, got 'false'"]


@pytest.mark.parametrize("words", [[], ["--nproc", "2"], ["--temperature", "0", "model"]])
def test_without_a_model_the_usage_is_shown(capsys, words: list[str]):
    assert cli.main(["chat", *words]) == 2
    assert capsys.readouterr().err.startswith("usage: megatron-rl chat MODEL")


def test_a_line_ends_at_a_line_feed_alone(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text('"one\u2028two\x85three"\n"four"\n', encoding="utf-8")
    assert list(read_prompts(path)) == ["one\u2028two\x85three", "four"]


@pytest.mark.parametrize("output", ["nowhere/a.jsonl", ""])
def test_answers_that_could_not_be_written_are_not_drawn(model: Path, tmp_path: Path, capsys, output: str):
    (tmp_path / "a.txt").write_text("one\n")
    words = ["--prompts", str(tmp_path / "a.txt"), "--output", str(tmp_path / output)]
    assert cli.main(["generate", str(model), *words]) == 2
    assert "cannot be written; name a file in a directory that is there" in capsys.readouterr().err


NO_PROMPTS = [
    "{",
    '{"text": "a"}',
    "3",
    "[" * 9999,
    '{"messages": [{"role": "user"}]}',
    '{"messages": []}',
    '{"messages": "a"}',
    '{"messages": {"role": "user"}}',
    '{"messages": [{"role": "user", "content": null}]}',
    '{"messages": [{"role": "user", "content": "a"}], "prompt": "a"}',
    '{"prompt": ""}',
    '{"prompt": 3}',
    '""',
    "[]",
    "null",
]


@pytest.mark.parametrize("line", NO_PROMPTS)
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: str):
    path = tmp_path / "a.jsonl"
    path.write_text(f'"fine"\n{line}\n')
    with pytest.raises(ConfigError, match=rf"{path}:2: .* is no prompt"):
        list(read_prompts(path))


@pytest.mark.parametrize("content", [None, "", "\n \n"])
def test_a_file_without_prompts_is_one_line(model: Path, tmp_path: Path, capsys, content: str | None):
    path = tmp_path / "a.txt"
    if content is not None:
        path.write_text(content)
    assert cli.main(["generate", str(model), "--prompts", str(path)]) == 2
    assert f"--prompts {path}" in capsys.readouterr().err


def test_a_users_parser_is_called_in_a_process_of_its_own(model: Path, tmp_path: Path):
    """Its file ended `chat`, `generate` and `serve` without a word."""
    (tmp_path / "mine.py").write_text("import os; os._exit(0)")
    with pytest.raises(ConfigError, match=r"mine.py:PARSER' ended the process with status 0 while .* was imported"):
        model_config(str(model), ["--rl-tool-call-parser", f"{tmp_path}/mine.py:PARSER"], 1, 1)


QUESTION, SYSTEM = [{"role": "user", "content": "a"}], [{"role": "system", "content": "s"}]


@pytest.mark.parametrize(
    ("command", "template", "line"),
    [
        ("generate", "{% for m in messages %}", "cannot render a single question (TemplateSyntaxError"),
        ("generate", STRICT, "the chat template cannot render prompt row 2 of system, user (TemplateError: System"),
        ("chat", "{{ raise_exception('no ' * 999) }}", "cannot render a single question (TemplateError: no no"),
        ("serve", "{{ nobody() }}", "cannot render a single question (UndefinedError: 'nobody' is undefined"),
    ],
)
def test_a_template_that_cannot_be_used_is_one_line(model: Path, tmp_path: Path, capsys, command, template, line):
    """Before the weights are read."""
    (tmp_path / "own.jinja").write_text(template)
    rows = [{"messages": QUESTION}, {"messages": SYSTEM + QUESTION}, {"prompt": "a"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [command, str(model), "--chat-template", str(tmp_path / "own.jinja")]
    words += {"generate": ["--prompts", str(tmp_path / "a.jsonl")], "serve": ["--port", "0"]}.get(command, [])
    assert cli.main(words) == 2
    _, problem = capsys.readouterr().err.splitlines()
    assert line in problem and len(problem) < 900


def test_chats_need_a_template(model: Path, tmp_path: Path, capsys):
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": QUESTION}) + "\n")
    assert cli.main(["generate", str(model), "--prompts", str(tmp_path / "a.jsonl")]) == 2
    assert "cannot render a single question (ValueError: Cannot use chat template" in capsys.readouterr().err


def test_a_template_that_is_not_used_may_be_broken(model: Path, tmp_path: Path):
    (tmp_path / "own.jinja").write_text("{% for m in messages %}")
    (tmp_path / "a.txt").write_text("one\n")
    words = [str(model), "--chat-template", str(tmp_path / "own.jinja"), "--prompts", str(tmp_path / "a.txt"), "--raw"]
    assert generate.COMMAND.parse(words, 1).prompts == ["one"]
