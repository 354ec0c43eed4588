"""Fields and routes that vLLM has beside OpenAI's."""

from __future__ import annotations

import pytest

from megatron_rl.chat import ChatFormat
from megatron_rl.endpoint.calls import Call
from megatron_rl.types import Completion
from tests.support.endpoint import ADD, ASK, byte_tokenizer, client, completion, post, scripted

CALLED = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'


def test_variables_of_the_chat_template(tmp_path):
    template = "{{ 'T' if think else 'N' }}{% for m in messages %}{{ m['content'] }}|{% endfor %}"
    tokenizer = byte_tokenizer(tmp_path, template)
    with scripted(tokenizer, lambda call: completion(tokenizer, tokenizer.decode(call.ids))) as endpoint:
        session = endpoint.open_session("")
        for path in ("/v1", f"/sessions/{session}/v1"):
            answers = [
                post(endpoint, ASK | fields, f"{path}/chat/completions").json()["choices"][0]["message"]["content"]
                for fields in ({"chat_template_kwargs": {"think": True}}, {})
            ]
            assert answers == ["T1+2|", "N1+2|"]


@pytest.mark.parametrize(
    ("said", "fields"), [("aé E EN ENDx", {"stop": "END"}), (f"One {CALLED}", {"tools": [ADD]}), ("", {})]
)
def test_ids_of_a_chat(tokenizer, said, fields):
    tokenizer = tokenizer.formatting(ChatFormat(tool_call_parser="hermes"))
    drawn = completion(tokenizer, said, "stop_string" if "stop" in fields else "stop")
    asked = ASK | fields | {"extra_body": {"return_token_ids": True}}
    with scripted(tokenizer, lambda call: drawn) as endpoint:
        ask = client(endpoint).chat.completions.create
        whole, chunks = ask(**asked), [*ask(**asked, stream=True)]
        plain = ask(**ASK | fields)
    prompt = tokenizer.render(ASK["messages"], "", fields.get("tools"))
    assert whole.prompt_token_ids == tokenizer.encode(prompt)
    assert whole.choices[0].token_ids == list(drawn.token_ids)
    assert sum((chunk.choices[0].token_ids for chunk in chunks), []) == list(drawn.token_ids)
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids
    assert not any(hasattr(chunk, "prompt_token_ids") for chunk in chunks[1:])
    assert not hasattr(plain, "prompt_token_ids")
    assert not hasattr(plain.choices[0], "token_ids")


def test_ids_of_texts(endpoint, tokenizer):
    asked = {"model": "policy", "prompt": ["ab", "c"], "n": 2, "extra_body": {"return_token_ids": True}}
    whole = client(endpoint).completions.create(**asked)
    streamed: dict[int, list[int]] = {n: [] for n in range(4)}
    prompts: dict[int, list[int]] = {}
    for chunk in client(endpoint).completions.create(**asked, stream=True):
        (choice,) = chunk.choices
        streamed[choice.index] += choice.token_ids
        if hasattr(choice, "prompt_token_ids"):
            assert choice.index not in prompts, "the prompt comes once"
            prompts[choice.index] = choice.prompt_token_ids
    assert [tokenizer.decode(choice.prompt_token_ids) for choice in whole.choices] == ["ab", "ab", "c", "c"]
    assert prompts == {choice.index: choice.prompt_token_ids for choice in whole.choices}
    assert streamed == {choice.index: choice.token_ids for choice in whole.choices}
    assert tokenizer.decode(streamed[3]) == "éc1"


def test_ids_of_a_session_are_those_that_were_sampled(tmp_path):
    """The prompt of the second turn has the first turn's tokens, which no text encodes to."""
    tokenizer = byte_tokenizer(tmp_path)
    odd = [tokenizer.encode("é")[1]]  # half a character, that comes back as another
    answers: list[Completion] = []

    def answer(call: Call):
        answers.append(Completion((*odd, tokenizer.end_token_id), (-1.0, -1.0), "stop", 0))
        return answers[-1]

    with scripted(tokenizer, answer) as endpoint:
        ask = client(endpoint, endpoint.open_session("")).chat.completions.create
        messages, extra = [*ASK["messages"]], {"return_token_ids": True}
        first = ask(model="policy", messages=messages, extra_body=extra)
        messages += [first.choices[0].message, {"role": "user", "content": "more"}]
        second = ask(model="policy", messages=messages, extra_body=extra)
    before = first.prompt_token_ids + first.choices[0].token_ids
    assert second.prompt_token_ids == before + tokenizer.encode("more=")
    assert first.choices[0].token_ids == [*odd, tokenizer.end_token_id]
    assert second.usage.prompt_tokens == len(second.prompt_token_ids)
