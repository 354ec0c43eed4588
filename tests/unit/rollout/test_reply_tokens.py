"""What follows a turn of the model, with a real tokenizer and chat templates."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from megatron_rl.errors import EnvironmentFault
from megatron_rl.tokenizer import Tokenizer, load_tokenizer

ROOT = Path(__file__).parents[3]
PROMPT = ({"role": "user", "content": "What is 2+2?"},)
REPLY = ({"role": "user", "content": "Are you sure?"},)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("tokenizer")
    runpy.run_path(str(ROOT / "examples" / "dapo_pipeline_check" / "make_tokenizer.py"))["main"](made)
    return made


def with_template(folder: Path, template: str) -> Tokenizer:
    (folder / "chat_template.jinja").write_text(template)
    return load_tokenizer(str(folder))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    end = json.loads((folder / "tokenizer_config.json").read_text())["eos_token"]
    return with_template(folder, CHATML.replace("<|im_end|>", end))


def test_a_chat_goes_on_as_its_template_says(tokenizer: Tokenizer) -> None:
    """Prompt, turn and reply in tokens are the tokens of the whole chat: nothing is lost or doubled at the seams."""
    said = tokenizer.encode("4, of course") + [tokenizer.end_token_id]
    reply = tokenizer.encode_reply(PROMPT, REPLY, ended=True)
    chat = (*PROMPT, {"role": "assistant", "content": "4, of course"}, *REPLY)
    assert tokenizer.encode_prompt(PROMPT) + said + reply == tokenizer.encode_prompt(chat)


def test_a_turn_that_was_cut_is_closed_for_the_model(tokenizer: Tokenizer) -> None:
    cut = tokenizer.encode_reply(PROMPT, REPLY, ended=False)
    assert cut == [tokenizer.end_token_id, *tokenizer.encode_reply(PROMPT, REPLY, ended=True)]


def test_plain_text_follows_as_it_is(tokenizer: Tokenizer) -> None:
    messages = ({"role": "user", "content": "=4,"}, {"role": "user", "content": " next"})
    assert tokenizer.encode_reply("2+2=", messages, ended=True) == tokenizer.encode("=4, next")


@pytest.mark.parametrize(
    "template, complaint",
    [
        ("{{ raise_exception('roles must alternate') }}", "user, assistant, user, 'Are you sure.': TemplateError: "),
        ("{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}", "0 times"),
        ("{% for m in messages %}{{ m['content'] }}{{ m['content'] }}{% endfor %}", "2 times"),
    ],
    ids=["refuses", "drops the model's turns", "repeats them"],
)
def test_templates_that_cannot_go_on(folder: Path, template: str, complaint: str) -> None:
    with pytest.raises(EnvironmentFault, match=complaint):
        with_template(folder, template).encode_reply(PROMPT, REPLY, ended=True)
