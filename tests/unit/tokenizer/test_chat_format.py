"""Chats with a template, its variables and a system prompt from flags and from an environment's entry."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from megatron_rl.chat import ChatFormat
from megatron_rl.errors import CheckpointError
from megatron_rl.run.resume import PromptFormats
from megatron_rl.tokenizer import Tokenizer, load_tokenizer
from megatron_rl.trainer.supervised import DemonstrationSource
from megatron_rl.types import Demonstration, Task

ROOT = Path(__file__).parents[3]
ASKED = ({"role": "user", "content": "2+2?"},)
PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
THINKING = PLAIN + "{% if enable_thinking is not defined or enable_thinking %}<t>{% else %}<t></t>{% endif %}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token a byte, and a template of its own."""
    folder = tmp_path_factory.mktemp("tokenizer")
    runpy.run_path(str(ROOT / "examples" / "dapo_pipeline_check" / "make_tokenizer.py"))["main"](folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": THINKING}))
    return load_tokenizer(str(folder))


def test_what_a_level_leaves_open_the_one_below_decides(tokenizer: Tokenizer) -> None:
    assert tokenizer.render(ASKED) == "user:2+2?;<t>"
    run = tokenizer.formatting(
        ChatFormat(template_kwargs={"enable_thinking": False}, system_prompt="Short."),
        {"own": ChatFormat(PLAIN, system_prompt=""), "other": ChatFormat(system_prompt="Long.")},
    )
    assert run.render(ASKED) == run.render(ASKED, "unlisted") == "system:Short.;user:2+2?;<t></t>"
    assert run.render(ASKED, "own") == "user:2+2?;"
    assert run.render(ASKED, "other") == "system:Long.;user:2+2?;<t></t>"
    assert tokenizer.render(ASKED) == "user:2+2?;<t>", "the first is as it was"


def test_variables_are_added_to_those_of_the_run(tokenizer: Tokenizer) -> None:
    template = "{{ messages[0].content }}|{{ a }}|{{ b }}"
    run = tokenizer.formatting(ChatFormat(template, {"a": 1, "b": 2}), {"own": ChatFormat(template_kwargs={"b": [3]})})
    assert run.render(ASKED, "own") == "2+2?|1|[3]"


def test_a_chat_keeps_a_system_message_of_its_own(tokenizer: Tokenizer) -> None:
    own = ({"role": "system", "content": "Mine."}, *ASKED)
    assert tokenizer.formatting(ChatFormat(PLAIN, system_prompt="Yours.")).render(own) == "system:Mine.;user:2+2?;"


def test_end_tokens_of_a_checkpoint_change_no_chat(tokenizer: Tokenizer) -> None:
    run = tokenizer.formatting(ChatFormat(PLAIN), {"own": ChatFormat(system_prompt="S")}).ending_also_at([1])
    assert run.render(ASKED, "own") == "system:S;user:2+2?;"


def test_replies_and_demonstrations_have_the_environments_template(tokenizer: Tokenizer) -> None:
    """Prompt, turn and reply in tokens are the tokens of the whole chat, system prompt included."""
    run = tokenizer.formatting(by_environment={"own": ChatFormat(PLAIN, system_prompt="S")})
    reply = run.encode_reply(ASKED, ASKED, False, "own")
    assert run.decode(reply) == ";user:2+2?;"
    assert run.decode(run.encode_reply(ASKED, ASKED, False)) == ";user:2+2?;<t>"
    taught = [("own", Demonstration(Task("1", ASKED), "4")), ("else", Demonstration(Task("1", ASKED), "4"))]
    texts = [run.decode(sample.token_ids.tolist()) for sample in DemonstrationSource(taught, run, 100).draw(2)]
    assert texts == ["system:S;user:2+2?;4", "user:2+2?;<t>4"]


@pytest.mark.parametrize(
    ("template", "stop", "warned"),
    [
        (PLAIN.replace(";", "<|user|>"), (), ["chat: the chat template closes a turn with <|user|>, which ends no"]),
        (PLAIN.replace(";", "\n<|user|>"), ("<|user|>",), []),
        (PLAIN.replace(";", "<|end|>"), (), []),
        (PLAIN, (), []),
        ("{{ messages[1].content if messages | length == 1 }}" + PLAIN, (), []),
    ],
    ids=["another token", "a stop string", "the end token", "none", "of single questions"],
)
def test_a_turn_that_closes_with_no_end_token(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, template: str, stop: tuple[str, ...], warned: list[str]
) -> None:
    formats = PromptFormats(tokenizer.formatting(ChatFormat(template)), [("chat", ASKED), ("plain", "a")])
    special = tokenizer.special_tokens
    formats.warn_of_open_ends([*tokenizer.end_token_ids, *(special[text] for text in stop)])
    assert [record.getMessage()[: len(warned[0]) if warned else None] for record in caplog.records] == warned


def test_a_resume_compares_the_chats_that_are_trained_on(tokenizer: Tokenizer) -> None:
    prompts = [("chat", ASKED), ("plain", "2+2=")]
    began = PromptFormats(tokenizer, prompts).state_dict()
    assert list(began) == ["chat"]
    spelled_out = tokenizer.formatting(ChatFormat(THINKING), {"plain": ChatFormat(system_prompt="S")})
    PromptFormats(spelled_out, prompts).load_state_dict(json.loads(json.dumps(began)))
    PromptFormats(tokenizer, [("new", ASKED)]).load_state_dict(began)
    for other, what in (
        (ChatFormat(PLAIN), "another chat template than"),
        (ChatFormat(template_kwargs={"enable_thinking": False}), "another chat template kwargs than"),
        (ChatFormat(system_prompt="S"), "another system prompt than"),
    ):
        with pytest.raises(CheckpointError, match=f"the chats of 'chat' have {what} when the run began"):
            PromptFormats(tokenizer.formatting(other), prompts).load_state_dict(began)
