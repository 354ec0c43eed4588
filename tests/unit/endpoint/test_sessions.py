"""Which answer a call goes on from, and which of its tokens are new."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from megatron_rl.chat import ChatFormat
from megatron_rl.endpoint.sessions import PlannedCall, Session
from megatron_rl.errors import EnvironmentFault
from megatron_rl.tokenizer import Tokenizer, load_tokenizer
from megatron_rl.types import Completion, Message
from tests.support.chat_templates import CHATML, HARMONY, QWEN3
from tests.support.endpoint import byte_tokenizer

WORDS = "It is 4. Very sure. <think> hm </think> look up X Result: four, Yes 5! <tool_call> <tool_response>"
SYSTEM = {"role": "system", "content": "Be short."}
USER = {"role": "user", "content": "What is 2+2?"}
AGAIN = {"role": "user", "content": "Are you sure?"}
TOOLS = ({"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}},)


@pytest.fixture(scope="module", params=[CHATML, QWEN3], ids=["chatml", "qwen3"])
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    """With words for tokens, so that a text has several spellings."""
    backend = tokenizers.Tokenizer(BPE())
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    trainer = BpeTrainer(
        special_tokens=["<|im_start|>", "<|im_end|>"], initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([WORDS] * 9, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", chat_template=request.param)
    folder = str(tmp_path_factory.mktemp("tokenizer"))
    fast.save_pretrained(folder)
    return load_tokenizer(folder)


def ask_chat(session: Session, number: int, messages: tuple[Message, ...], tools: tuple[Any, ...] = ()) -> PlannedCall:
    (planned,) = session.begin_chat([number], messages, tools)
    return planned


def ask_text(session: Session, number: int, prompt: str | tuple[int, ...]) -> PlannedCall:
    (planned,) = session.begin_text([number], prompt)
    return planned


@pytest.fixture
def session(tokenizer: Tokenizer) -> Session:
    return Session("", tokenizer)


def said(content: str | None, *calls: tuple[str, str]) -> Message:
    """The assistant's message as the endpoint returns it; ``calls`` are names and arguments."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        made = enumerate(calls)
        message["tool_calls"] = [
            {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in made
        ]
    return message


def spelled(tokenizer: Tokenizer, text: str, ended: bool = True) -> Completion:
    """Letter by letter: tokens that the tokenizer would never make of ``text``."""
    ids = [token for letter in text for token in tokenizer.encode(letter)]
    assert len(text) < 3 or ids != tokenizer.encode(text)
    ids += [tokenizer.end_token_id] * ended
    return Completion(tuple(ids), (-1.0,) * len(ids), "stop" if ended else "length", 0)


def tokens(planned: dict[int, PlannedCall], answers: dict[int, Completion], number: int) -> list[int]:
    """The whole prompt of a call."""
    own = planned[number]
    before = [] if own.after is None else [*tokens(planned, answers, own.after), *answers[own.after].token_ids]
    assert own.num_prompt_tokens == len(before) + len(own.ids)
    return before + list(own.ids)


def test_what_was_sampled_is_not_encoded_again(session: Session, tokenizer: Tokenizer) -> None:
    """Three turns: around the sampled tokens stands what the template would have written, to the letter."""
    history, planned, answers = [SYSTEM, USER], {}, {}
    for number, text in enumerate(["It is 4.", "Very sure."]):
        planned[number] = ask_chat(session, number, tuple(history))
        answers[number] = spelled(tokenizer, text)
        session.add_answer(number, said(text), answers[number])
        history += [said(text), AGAIN]
    planned[2] = ask_chat(session, 2, tuple(history))
    assert [p.after for p in planned.values()] == [None, 0, 1]
    assert [p.branch for p in planned.values()] == [0, 0, 0]
    prompt = tokens(planned, answers, 2)
    assert tokenizer.decode_raw(prompt) == tokenizer.render(history)
    for completion in answers.values():
        assert str(list(completion.token_ids))[1:-1] in str(prompt)
    assert session.end().calls == (0, 1)
    assert session.end().edited == 0


def test_thoughts_stay_as_they_were_sampled(session: Session, tokenizer: Tokenizer) -> None:
    """Qwen3's template would leave them out of earlier turns; what was sampled then would not be what is trained on."""
    text = "<think>\nhm\n</think>\n\n4"
    ask_chat(session, 0, (USER,))
    session.add_answer(0, said(text), spelled(tokenizer, text))
    later = ask_chat(session, 1, (USER, said(text), AGAIN))
    end = tokenizer.decode_raw([tokenizer.end_token_id])
    expected = f"\n<|im_start|>user\n{AGAIN['content']}{end}\n<|im_start|>assistant\n"
    assert (later.after, tokenizer.decode_raw(later.ids)) == (0, expected)


def test_variables_of_the_template_are_part_of_a_history(tmp_path_factory) -> None:
    """As Qwen3's `enable_thinking`: a reply is what the template writes with it, and another value begins anew."""
    template = CHATML.removesuffix("\n") + "{% if short %}{{ 'Short: ' }}{% endif %}"
    tokenizer = byte_tokenizer(tmp_path_factory.mktemp("variables"), template)
    session, asked = Session("", tokenizer), {"short": True}

    def ask(number: int, messages: tuple[Message, ...], **template_kwargs: Any) -> PlannedCall:
        (planned,) = session.begin_chat([number], messages, (), template_kwargs)
        return planned

    history = (USER, said("4"), AGAIN)
    first = ask(0, (USER,), **asked)
    assert tokenizer.decode(first.ids) == tokenizer.render([USER]) + "Short: "
    ids = (*tokenizer.encode("4"), tokenizer.end_token_id)
    session.add_answer(0, said("4"), Completion(ids, (-1.0, -1.0), "stop", 0))
    same, other, none = ask(1, history, **asked), ask(2, history, short=False), ask(3, history)
    assert [planned.after for planned in (same, other, none)] == [0, None, None]
    with_variable = tokenizer.with_variables("", asked).render(history)
    assert with_variable.endswith(tokenizer.decode_raw(same.ids))
    assert tokenizer.decode_raw(same.ids).endswith("Short: ")
    assert tokenizer.decode(none.ids) == tokenizer.render(history)
    for number in (1, 2, 3):
        session.add_answer(number, said("Yes"), Completion((tokenizer.end_token_id,), (-1.0,), "stop", 0))
    assert session.end().edited == 0, "its answers are still those that were sampled"


def test_a_turn_that_was_cut_is_closed(session: Session, tokenizer: Tokenizer) -> None:
    ask_chat(session, 0, (USER,))
    session.add_answer(0, said("It is"), spelled(tokenizer, "It is", ended=False))
    later = ask_chat(session, 1, (USER, said("It is"), AGAIN))
    assert later.ids[0] == tokenizer.end_token_id


@pytest.mark.parametrize(
    "echo",
    [
        said("4"),
        said("4") | {"tool_calls": None},
        said("4") | {"refusal": None, "annotations": [], "audio": None, "function_call": None},
        said("4") | {"provider_specific_fields": {"a": 1}, "reasoning_content": "hm"},
        said(" 4\n"),
    ],
    ids=["as it was", "null calls", "all fields of the client", "fields of other clients", "white space"],
)
def test_fields_that_clients_echo_do_not_count(session: Session, tokenizer: Tokenizer, echo: Message) -> None:
    ask_chat(session, 0, (USER,))
    session.add_answer(0, said("4"), spelled(tokenizer, "4"))
    assert ask_chat(session, 1, (USER, echo, AGAIN)).after == 0


@pytest.mark.parametrize("ended", [True, False])
def test_a_stop_string_that_the_client_puts_back(session: Session, tokenizer: Tokenizer, ended: bool) -> None:
    """smolagents' CodeAgent strips an answer and writes its closing tag behind it, whether the model had or not."""
    answers, planned = {}, {0: ask_chat(session, 0, (USER,))}
    answers[0] = spelled(tokenizer, "x = 4\n" if ended else "x = 4\n</code>", ended)
    session.add_answer(0, said("x = 4\n"), answers[0], ("Observation:", "</code>"))
    echoed = (USER, said("x = 4\n</code>"), AGAIN)
    planned[1] = ask_chat(session, 1, echoed)
    answers[1] = spelled(tokenizer, "Yes")
    session.add_answer(1, said("Yes"), answers[1], ("</code>",))
    planned[2] = ask_chat(session, 2, (USER, said("x = 4"), AGAIN, said("Yes</code>"), USER))
    assert [p.after for p in planned.values()] == [None, 0, 1]
    assert tokens(planned, answers, 2)[: planned[1].num_prompt_tokens] == tokens(planned, answers, 1)
    assert ask_chat(session, 3, (USER, said("x = 5</code>"), AGAIN)).after is None
    session.add_answer(3, said("No"), spelled(tokenizer, "No"))
    assert session.end().edited == 1


def test_results_of_calls_are_shown_with_the_name_of_the_function_where_the_template_does(tokenizer: Tokenizer) -> None:
    """gpt-oss's needs it, and clients send only the id."""
    session = Session("", tokenizer.formatting(ChatFormat(HARMONY)))
    ask_chat(session, 0, (USER,), TOOLS)
    call, said_before = said(None, ("add", "{}")), spelled(tokenizer, "<tool_call>")
    session.add_answer(0, call, said_before)
    result = {"role": "tool", "tool_call_id": "call_0", "content": "4"}
    later = ask_chat(session, 1, (USER, call, result), TOOLS)
    shown = "<|start|>functions.add to=assistant<|channel|>commentary<|message|>"
    assert later.after == 0 and shown + '"4"<|end|><|start|>assistant' in tokenizer.decode_raw(later.ids)


def test_calls_of_tools(session: Session, tokenizer: Tokenizer) -> None:
    """Their ids and the spaces in their arguments are the client's affair; no content is the empty one."""
    if tokenizer.render((USER,)) == tokenizer.render((USER,), tools=TOOLS):
        pytest.skip("this template knows no tools")
    call = said(None, ("add", '{"a": 2, "b": [1]}'))
    result = {"role": "tool", "tool_call_id": "call_0", "content": "4"}
    root = ask_chat(session, 0, (USER,), TOOLS)
    assert '"name": "add"' in tokenizer.decode_raw(root.ids)
    session.add_answer(0, call, spelled(tokenizer, "<tool_call>"))
    echo = said("", ("add", '{"b":[1],"a":2}')) | {"tool_calls": [
        {"id": "other", "function": {"name": "add", "arguments": '{"b":[1],"a":2}'}}
    ]}  # fmt: skip
    later = ask_chat(session, 1, (USER, echo, result, result), TOOLS)
    shown = "<tool_response>\n4\n</tool_response>"
    end = tokenizer.decode_raw([tokenizer.end_token_id])
    expected = f"\n<|im_start|>user\n{shown}\n{shown}{end}\n<|im_start|>assistant\n"
    assert (later.after, tokenizer.decode_raw(later.ids)) == (0, expected)
    session.add_answer(1, said("4"), spelled(tokenizer, "4"))
    assert ask_chat(session, 4, (USER, call, result, result, said("4"), AGAIN), TOOLS).after == 1
    assert ask_chat(session, 2, (USER, echo, result)).after is None, "with other tools it is another prompt"
    changed = said(None, ("add", '{"a": 3, "b": [1]}'))
    assert ask_chat(session, 3, (USER, changed, result), TOOLS).after is None
    session.add_answer(3, said("4"), spelled(tokenizer, "4"))
    assert session.end().edited == 1


def test_histories_that_were_edited(session: Session, tokenizer: Tokenizer) -> None:
    ask_chat(session, 0, (SYSTEM, USER))
    session.add_answer(0, said("4"), spelled(tokenizer, "4"))
    mine = said("five")
    edited = ask_chat(session, 1, (SYSTEM, USER, mine, AGAIN))
    assert (edited.after, session.end().edited) == (None, 0), "it has no answer yet"
    assert list(edited.ids) == tokenizer.encode_prompt((SYSTEM, USER, mine, AGAIN))
    session.add_answer(1, said("5!"), spelled(tokenizer, "5!"))
    assert session.end().edited == 1
    later = ask_chat(session, 2, (SYSTEM, USER, mine, AGAIN, said("5!"), AGAIN))
    assert later.after == 1
    repeated = ask_chat(session, 3, (USER, mine, USER))
    assert repeated.after is None
    session.add_answer(3, said("7"), spelled(tokenizer, "7"))
    assert session.end().edited == 1, "it was counted when it came"
    both = ask_chat(session, 4, (SYSTEM, USER, said("4"), AGAIN, said("six"), USER))
    assert both.after == 0, "what was not edited stays as it was sampled"
    session.add_answer(4, said("8"), spelled(tokenizer, "8"))
    assert session.end().edited == 2


def test_what_is_no_edit(session: Session, tokenizer: Tokenizer) -> None:
    """Examples in the first call, a summary in place of the history, an answer that moves to another place."""
    shot = (USER, said("4"), AGAIN)
    ask_chat(session, 0, shot)
    session.add_answer(0, said("Yes"), spelled(tokenizer, "Yes"))
    assert ask_chat(session, 1, (*shot, said("Yes"), USER)).after == 0
    assert ask_chat(session, 2, (SYSTEM, {"role": "user", "content": "So far: 4."})).after is None
    assert ask_chat(session, 3, (SYSTEM, AGAIN, said("Yes"), AGAIN)).after is None
    assert ask_chat(session, 4, (SYSTEM, USER, said("4"), USER)).after is None
    assert session.end().edited == 0


def test_equal_prompts_are_told_apart_and_others_are_not(session: Session, tokenizer: Tokenizer) -> None:
    """The branch is part of the seed: two samples of one prompt differ, and no call's seed tells when it came."""
    assert [ask_chat(session, number, (USER,)).branch for number in (0, 1, 2)] == [0, 1, 2]
    assert ask_chat(session, 7, (AGAIN,)).branch == 0
    session.add_answer(0, said("4"), spelled(tokenizer, "4"))
    session.add_answer(1, said("4"), spelled(tokenizer, "4"))
    session.add_answer(2, said("4"), spelled(tokenizer, "4", ended=False))
    later = [ask_chat(session, number, (USER, said("4"), AGAIN)) for number in (3, 4, 5, 6)]
    assert [p.after for p in later] == [0, 1, 2, 0], "equal answers keep their own"
    assert [p.branch for p in later] == [0, 1, 2, 3], "the same tokens, whichever answer they go on from"
    assert later[0].ids == later[1].ids != later[2].ids, "one of them had not ended"
    session.forget([4])
    anew = [ask_chat(session, number, (USER, said("4"), AGAIN)).branch for number in (8, 9)]
    assert anew == [1, 4], "never that of another"


def test_a_refused_call_leaves_nothing(session: Session, tokenizer: Tokenizer) -> None:
    ask_chat(session, 0, (USER,))
    session.add_answer(0, said("4"), spelled(tokenizer, "4"))
    assert ask_chat(session, 1, (USER, said("4"), AGAIN)).branch == 0
    session.forget([1])
    assert ask_chat(session, 2, (USER, said("4"), USER)).branch == 0
    assert session.end().calls == (0,)


def test_a_template_that_refuses(tokenizer: Tokenizer) -> None:
    session = Session("", tokenizer.formatting(ChatFormat("{{ raise_exception('roles must alternate') }}")))
    with pytest.raises(EnvironmentFault, match="template refuses user, .*: TemplateError: roles must alternate"):
        ask_chat(session, 0, (USER,))
    assert session.end().calls == ()


def test_a_prompt_asked_again_after_an_answer_without_text_is_a_prompt(session: Session, tokenizer: Tokenizer) -> None:
    first = ask_text(session, 0, "2+2=")
    session.add_answer(0, said(""), spelled(tokenizer, "", ended=True))
    again = ask_text(session, 1, "2+2=")
    assert (again.after, again.ids, again.branch) == (None, first.ids, 1)
    assert ask_text(session, 2, "2+2=four").after == 0


def test_texts_go_on(session: Session, tokenizer: Tokenizer) -> None:
    first = ask_text(session, 0, "2+2=")
    assert list(first.ids) == tokenizer.encode_prompt("2+2=")
    session.add_answer(0, said("four, "), spelled(tokenizer, "four, "))
    later = ask_text(session, 1, "2+2=four, next")
    assert (later.after, list(later.ids), later.branch) == (0, tokenizer.encode("next"), 0)
    end = tokenizer.decode_raw([tokenizer.end_token_id])
    closed = ask_text(session, 2, f"2+2=four, {end}next")
    assert closed.ids == later.ids, "the end token is there once, whoever writes it"
    assert ask_text(session, 3, "2+2=five").after is None


def test_a_stop_string_is_not_read_twice(session: Session, tokenizer: Tokenizer) -> None:
    """The text is returned without it, and callers write it again before they go on."""
    ask_text(session, 0, "Q")
    session.add_answer(0, said("look up X\n"), spelled(tokenizer, "look up X\nResult:", ended=False))
    again = ask_text(session, 1, "Qlook up X\nResult: 42")
    assert (again.after, list(again.ids)) == (0, tokenizer.encode(" 42"))
    other = ask_text(session, 2, "Qlook up X\nDone")
    assert (other.after, list(other.ids)) == (0, tokenizer.encode("Done"))


def test_ids_go_on(session: Session, tokenizer: Tokenizer) -> None:
    answer = spelled(tokenizer, "four")
    assert ask_text(session, 0, (5, 6, 7)).ids == (5, 6, 7)
    session.add_answer(0, said("four"), answer)
    later = ask_text(session, 1, (5, 6, 7, *answer.token_ids, 8, 9))
    assert (later.after, later.ids, later.num_prompt_tokens) == (0, (8, 9), 5 + len(answer.token_ids))
    assert ask_text(session, 2, (5, 6, 7, 8)).after is None
    chat = ask_chat(session, 3, (USER,))
    session.add_answer(3, said("4"), spelled(tokenizer, "4"))
    after_chat = ask_text(session, 4, (*chat.ids, *spelled(tokenizer, "4").token_ids, 9))
    assert (after_chat.after, after_chat.ids) == (3, (9,))
