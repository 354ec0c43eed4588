"""Where answers end, and what of a prompt comes back, where special tokens have a part in it. The model is biased."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from megatron_rl.endpoint.calls import Endpoint
from megatron_rl.tokenizer import Tokenizer, load_tokenizer
from tests.support.endpoint import ASK, byte_tokenizer, post
from tests.support.serving import served


@pytest.fixture(scope="module")
def marked(tmp_path_factory) -> Tokenizer:
    """With special tokens that end nothing, one of which stands before texts."""
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer(folder)
    backend = PreTrainedTokenizerFast.from_pretrained(str(folder))
    backend.add_special_tokens({"bos_token": "<|bos|>", "additional_special_tokens": ["<|x|>"]})
    begin = TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", backend.bos_token_id)])
    backend.backend_tokenizer.post_processor = begin
    backend.save_pretrained(str(folder))
    return load_tokenizer(str(folder))


@pytest.fixture(scope="module")
def endpoint(marked: Tokenizer, one_rank) -> Iterator[Endpoint]:
    with served(marked) as (endpoint, _):
        yield endpoint


@pytest.mark.parametrize(
    ("drawn", "fields", "length", "text"),
    [
        ("<|x|>", {"stop": "<|x|>"}, 1, ""),
        ("<|x|>", {"stop": ["b", "<|x|><|x|>"]}, 2, ""),
        ("<|x|>", {"stop": "<|x|>a"}, 9, ""),
        ("<|x|>", {"stop": ["|"]}, 9, ""),
        ("<|x|>", {"stop": "<|x|>", "min_tokens": 4}, 5, ""),
        ("a", {"stop": "<|x|>"}, 9, "a" * 9),
        ("a", {"stop": "a"}, 1, ""),
        ("a", {"stop": "a", "min_tokens": 4}, 5, "aaaa"),
        ("a", {"stop": "aaa", "min_tokens": 4}, 5, "aa"),
        ("a", {"stop": ["b", "aaaaaa"], "min_tokens": 4}, 6, ""),
        ("a", {"stop": "a", "min_tokens": 9}, 9, "a" * 9),
        ("a", {"stop": "a", "min_tokens": 0}, 1, ""),
    ],
)
def test_stops(endpoint: Endpoint, marked: Tokenizer, drawn: str, fields: dict, length: int, text: str) -> None:
    (token,) = marked.encode(drawn)
    asked = ASK | {"logit_bias": {str(token): 100}, "max_tokens": 9, "temperature": 0} | fields
    whole = post(endpoint, asked).json()
    assert (whole["usage"]["completion_tokens"], whole["choices"][0]["message"]["content"]) == (length, text)
    assert whole["choices"][0]["finish_reason"] == ("length" if length == 9 else "stop")
    events = post(endpoint, asked | {"stream": True}).text.split("\n\n")[:-2]
    deltas = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content") or "" for delta in deltas) == text


@pytest.mark.parametrize("prompt", ["ab", "<|x|>user\nab<|x|>", "<|bos|>ab", "<|bos|><|x|>a", "a<|end|>b"])
@pytest.mark.parametrize("drawn", ["a", "<|x|>"])
def test_an_echo_is_the_prompt(endpoint: Endpoint, marked: Tokenizer, prompt: str, drawn: str) -> None:
    """All of it but the token that stands before every text; offsets are places in the text."""
    (token,) = marked.encode(drawn)
    asked = {"model": "policy", "max_tokens": 3, "echo": True, "logprobs": 1, "logit_bias": {str(token): 100}}
    for given in (prompt, marked.encode_prompt(prompt)):
        (choice,) = post(endpoint, asked | {"prompt": given}, "/v1/completions").json()["choices"]
        answer = "aaa" if drawn == "a" else ""
        assert choice["text"] == prompt.removeprefix("<|bos|>") + answer
        tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
        assert tokens[0] == "<|bos|>"
        ends = [*offsets[1:], len(choice["text"])]
        shown = [choice["text"][start:end] for start, end in zip(offsets, ends, strict=True)]
        assert shown == ["", *tokens[1:-3], *(tokens[-3:] if answer else [""] * 3)]
