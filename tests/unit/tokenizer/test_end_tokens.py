"""Which tokens end an answer, from the model's files to the engine; what plain text begins with; stop strings."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.errors import ConfigError
from megatron_rl.families.hf_config import end_token_ids
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.run.generation import build_engine, stop_strings
from megatron_rl.run.preflight.inputs import open_tokenizer
from megatron_rl.tokenizer import Tokenizer, load_tokenizer
from tests.support.generation import generate, ragged_requests
from tests.support.tiny import tiny_config, tiny_policy, write_tokenizer
from tests.support.toy import letters_tokenizer

ROOT = Path(__file__).parents[3]
END, USER, ASSISTANT = 0, 1, 2
"""The special tokens of `chat`: <|end|>, <|user|>, <|assistant|>; then one token a byte."""

TURNS = "{% for m in messages %}<|user|>{{ m['content'] }}"
"""The beginning of a template, up to what closes a turn."""


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    """A directory with a chat model's tokenizer."""
    runpy.run_path(str(ROOT / "examples" / "dapo_pipeline_check" / "make_tokenizer.py"))["main"](tmp_path / "chat")
    return tmp_path / "chat"


def _write(directory: Path, **files: Any) -> Path:
    directory.mkdir(exist_ok=True)
    for name, eos in files.items():
        (directory / f"{name}.json").write_text(json.dumps({} if eos is None else {"eos_token_id": eos}))
    return directory


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"config": 5}, (5,)),
        ({"config": [128001, 128008, 128009]}, (128001, 128008, 128009)),
        ({"config": 151645, "generation_config": [151645, 151643]}, (151645, 151643)),
        ({"config": None, "generation_config": 7}, (7,)),
        ({}, ()),
    ],
    ids=["one", "Llama 3.1", "Qwen2.5 Instruct", "generation alone", "neither"],
)
def test_both_files_are_read(tmp_path: Path, files: dict[str, Any], found: tuple[int, ...]) -> None:
    assert end_token_ids(_write(tmp_path, **files)) == found


@pytest.mark.parametrize("eos", ["<|end|>", [1, "2"], [[1]], True, {"a": 1}, 1.0])
def test_what_is_no_token_id_is_one_line(tmp_path: Path, eos: object) -> None:
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id must be a token id or a list"):
        end_token_ids(_write(tmp_path, generation_config=eos))


def test_a_generation_config_that_is_not_json_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"generation_config\.json is not JSON"):
        end_token_ids(tmp_path)


def test_a_tokenizer_knows_those_of_its_directory_and_of_the_models(chat: Path, tmp_path: Path) -> None:
    _write(chat, generation_config=[END, USER])
    assert load_tokenizer(str(chat)).end_token_ids == (END, USER)
    model = _write(tmp_path / "model", config=ASSISTANT)
    tokenizer = load_tokenizer(str(chat), [str(model)])
    assert (tokenizer.end_token_id, tokenizer.end_token_ids) == (END, (END, USER, ASSISTANT))


def test_flags_that_name_the_model_name_its_end_tokens(chat: Path, tmp_path: Path) -> None:
    config = tiny_config(tokenizer_model=chat)
    model = str(_write(tmp_path / "model", generation_config=[USER]))
    for section, name in (("checkpoint", "load_hf"), ("model", "hf_config")):
        named = SimpleNamespace(
            tokenizer=config.tokenizer, checkpoint=SimpleNamespace(load_hf=None), model=SimpleNamespace(hf_config=None)
        )
        setattr(getattr(named, section), name, model)
        assert open_tokenizer(named).end_token_ids == (END, USER)


def test_those_of_a_checkpoint_are_added(chat: Path) -> None:
    tokenizer = load_tokenizer(str(chat)).ending_also_at([USER, END])
    assert tokenizer.end_token_ids == (END, USER)
    assert tokenizer.ending_also_at([]).end_token_ids == (END, USER)


def test_an_ordinary_word_does_not_end_an_answer(tmp_path: Path) -> None:
    """Id 2 is the default of LlamaConfig, and a digit here; 5000 is beyond the vocabulary."""
    directory = _write(write_tokenizer(tmp_path), config=2, generation_config=[0, 5000])
    tokenizer = load_tokenizer(str(directory))
    assert tokenizer.end_token_ids == (0,)
    assert tokenizer.passed_over == (2, 5000)


def _with_template(directory: Path, template: str) -> Tokenizer:
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    return load_tokenizer(str(directory))


def test_a_turn_that_any_end_token_closes_is_not_closed_again(chat: Path) -> None:
    """The template closes a turn with <|end|>; the model may have said another one."""
    _write(chat, generation_config=[END, USER])
    tokenizer = _with_template(chat, TURNS + "<|end|>{% endfor %}<|assistant|>")
    prompt, reply = ({"role": "user", "content": "a"},), ({"role": "user", "content": "b"},)
    closed = tokenizer.encode_reply(prompt, reply, ended=True)
    assert tokenizer.encode_reply(prompt, reply, ended=False) == [END, *closed]
    tokenizer = _with_template(chat, TURNS + "<|user|>{% endfor %}<|assistant|>")
    assert tokenizer.encode_reply(prompt, reply, ended=False) == [USER, *tokenizer.encode_reply(prompt, reply, True)]


def test_every_end_token_ends_an_answer_in_the_engine(one_rank: ParallelGroups) -> None:
    """Ends are tokens 0, 5 and, as a stop string, 31."""
    config = tiny_config(rl_stop_strings="4")
    tokenizer = letters_tokenizer({5: "e", 31: "4"}).ending_also_at([5])
    policy = tiny_policy(config)
    built = build_engine(config, policy, tokenizer, one_rank)
    completions = [c for group in generate(policy, built, ragged_requests(24, 4, max_new_tokens=20)) for c in group]
    last = {c.token_ids[-1] for c in completions if c.finish_reason == "stop"}
    assert last == {0, 5, 31}
    assert not {0, 5, 31} & {number for c in completions for number in c.token_ids[:-1]}
    assert {c.finish_reason for c in completions} == {"stop", "length"}


def test_stop_strings_that_are_special_tokens_are_looked_for_by_id(chat: Path) -> None:
    tokenizer = load_tokenizer(str(chat))
    wanted = SimpleNamespace(rollout=SimpleNamespace(rl_stop_strings=("<|user|>", "</answer>", "user")))
    assert stop_strings(wanted, tokenizer) == ([USER], ("</answer>", "user"))


def _with_beginning(directory: Path) -> Tokenizer:
    """The chat tokenizer with a post-processor like Llama 3's, whose beginning-of-text token is <|user|>."""
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|user|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|user|>": {"id": "<|user|>", "ids": [USER], "tokens": ["<|user|>"]}},
    }
    path.write_text(json.dumps(content))
    settings = directory / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"bos_token": "<|user|>"}))
    return load_tokenizer(str(directory))


def test_plain_text_begins_as_the_tokenizer_begins_it(chat: Path) -> None:
    plain = load_tokenizer(str(chat))
    assert plain.encode_prompt("2+2") == plain.encode("2+2")
    tokenizer = _with_beginning(chat)
    text = tokenizer.encode("2+2")
    assert text == plain.encode("2+2")
    assert tokenizer.encode_prompt("2+2") == [USER, *text]
    assert tokenizer.encode_prompt("<|user|>2+2") == [USER, *text], "it has it already"
    assert tokenizer.encode_reply("2+2", ({"role": "user", "content": "=4"},), True) == tokenizer.encode("=4")
    assert tokenizer.encode_prompt(({"role": "user", "content": "2+2"},)) == [USER, *text, ASSISTANT]


def test_a_beginning_of_text_token_that_the_tokenizer_does_not_put_is_not_put(chat: Path) -> None:
    """As Qwen's, where one is named and add_bos_token is false."""
    settings = chat / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"bos_token": "<|user|>"}))
    tokenizer = load_tokenizer(str(chat))
    assert tokenizer.encode_prompt("2+2") == tokenizer.encode("2+2")
