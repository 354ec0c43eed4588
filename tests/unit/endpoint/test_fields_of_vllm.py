"""Fields and routes that vLLM has beside OpenAI's."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import httpx
import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from megatron_rl import __version__
from megatron_rl.chat import ChatFormat
from megatron_rl.endpoint.calls import Call, Endpoint
from megatron_rl.inference.engine import EngineLoad
from megatron_rl.tokenizer import load_tokenizer
from megatron_rl.types import Completion
from tests.support.endpoint import ADD, ASK, byte_tokenizer, client, completion, listening, post, scripted

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


# -- /tokenize, /detokenize, /version ----------------------------------------------------------------


def test_tokens_of_a_text(tmp_path):
    """With a token at the beginning of texts, as Llama's tokenizers have."""
    plain = byte_tokenizer(tmp_path)
    backend = PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    backend.add_special_tokens({"bos_token": "<|bos|>"})
    begin = TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", backend.bos_token_id)])
    backend.backend_tokenizer.post_processor = begin
    backend.save_pretrained(str(tmp_path))
    tokenizer, ids = load_tokenizer(str(tmp_path)), plain.encode("aé")
    bos = tokenizer.special_tokens["<|bos|>"]
    with listening(tokenizer) as endpoint:
        shown = post(endpoint, {"model": "policy", "prompt": "aé", "return_token_strs": True}, "/tokenize").json()
        assert shown == {
            "count": 4, "max_model_len": 200, "tokens": [bos, *ids], "token_strs": ["<|bos|>", "a", "Ã", "©"]
        }  # fmt: skip
        bare = post(endpoint, {"prompt": "aé", "add_special_tokens": False}, "/tokenize").json()
        assert (bare["tokens"], bare["token_strs"]) == (ids, None)
        text = post(endpoint, {"tokens": shown["tokens"]}, "/detokenize").json()
        assert text == {"prompt": "<|bos|>aé"}


def test_tokens_of_a_chat_are_those_of_its_call(tmp_path):
    template = "{% for m in messages %}{{ m['content'] }};{% endfor %}{{ tools[0]['function']['name'] if tools }}"
    template += "{{ think }}{% if add_generation_prompt %}>{% endif %}"
    tokenizer = byte_tokenizer(tmp_path, template)
    own = {"games": ChatFormat(template_kwargs={"think": "own"})}
    with listening(tokenizer.formatting(by_environment=own)) as endpoint:
        session = endpoint.open_session("games")

        def tokenized(path: str = "/tokenize", **fields: object) -> str:
            answer = post(endpoint, {"messages": ASK["messages"], **fields}, path).json()
            assert answer["count"] == len(answer["tokens"])
            return tokenizer.decode(answer["tokens"])

        assert tokenized() == "1+2;>"
        assert tokenized(add_generation_prompt=False, add_special_tokens=False) == "1+2;"
        assert tokenized(tools=[ADD], chat_template_kwargs={"think": "T"}) == "1+2;addT>"
        assert tokenized(f"/sessions/{session}/tokenize") == "1+2;own>"


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("/tokenize", {}, "prompt", "missing_required_parameter"),
        ("/tokenize", {"prompt": ["a"]}, "prompt", "invalid_type"),
        ("/tokenize", {"prompt": "a" * 100_000}, "prompt", "context_length_exceeded"),
        ("/tokenize", {"prompt": "a", "model": "gpt"}, "model", "model_not_found"),
        ("/tokenize", {"prompt": "a", "messages": []}, "messages", "invalid_value"),
        ("/tokenize", {"messages": [{"role": "bot", "content": ""}]}, "messages[0].role", "invalid_value"),
        ("/tokenize", ASK | {"add_special_tokens": True}, "add_special_tokens", "invalid_value"),
        ("/tokenize", ASK | {"continue_final_message": True}, "continue_final_message", "unsupported_parameter"),
        ("/tokenize", ASK | {"chat_template": "x"}, "chat_template", "unknown_parameter"),
        ("/detokenize", {}, "tokens", "missing_required_parameter"),
        ("/detokenize", {"tokens": [1, 257]}, "tokens", "invalid_value"),
        ("/detokenize", {"tokens": [None]}, "tokens", "invalid_value"),
        ("/detokenize", {"tokens": [1, None, -7]}, "tokens", "invalid_value"),
        ("/detokenize", {"tokens": "a"}, "tokens", "invalid_type"),
        ("/sessions/none/tokenize", {"prompt": "a"}, None, "session_over"),
    ],
)
def test_what_cannot_be_tokenized(tokenizer, path, body, param, code):
    with listening(tokenizer) as endpoint:
        answer = post(endpoint, body, path)
    assert (answer.json()["error"]["param"], answer.json()["error"]["code"]) == (param, code)


def test_who_may_see_tokens_and_the_version(tokenizer):
    with listening(tokenizer) as endpoint:
        for path in ("/tokenize", "/detokenize"):
            assert post(endpoint, {"prompt": "a"}, path, token=b"Bearer wrong").status_code == 401
        assert httpx.get(f"{endpoint.url}/version").status_code == 401
        authorization = {"Authorization": f"Bearer {endpoint.token}"}
        assert httpx.get(f"{endpoint.url}/version", headers=authorization).json() == {"version": __version__}


# -- /metrics ----------------------------------------------------------------------------------------


def metrics(endpoint: Endpoint) -> dict[str, float]:
    """As Prometheus reads them: a help and a type stand before the samples of a name."""
    headers = {"Authorization": f"Bearer {endpoint.token}"}
    answer = httpx.get(f"{endpoint.url}/metrics", headers=headers)
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found, name = {}, ""
    for line in answer.text.splitlines():
        if line.startswith("# HELP "):
            name = line.split()[2]
        elif line.startswith("#"):
            assert line == f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}"
        else:
            labels = r'\{model_name="policy"(?:,finished_reason="([a-z]+)")?\}'
            sample = re.fullmatch(rf"([a-z_:]+){labels} ([0-9.e-]+)", line)
            assert sample[1] == name
            found[name.removeprefix("megatron_rl:") + (f" {sample[2]}" if sample[2] else "")] = float(sample[3])
    return found


def test_metrics_count_answers(tokenizer):
    def answer(call: Call):
        said = completion(tokenizer, "xyz", "length" if call.branch else "stop")
        return replace(said, cached_tokens=3)

    with scripted(tokenizer, answer) as endpoint:
        assert not any(metrics(endpoint).values())
        client(endpoint).completions.create(model="policy", prompt="abcdef", n=2)
        post(endpoint, ASK)
        refused = post(endpoint, ASK | {"n": 0})
        found = metrics(endpoint)
        assert httpx.get(f"{endpoint.url}/metrics").status_code == 401
    assert refused.status_code == 400
    prompts = 2 * 6 + len("1+2=")
    assert found == {
        "prompt_tokens_total": prompts, "generation_tokens_total": 4 + 3 + 4, "prefix_cache_queries_total": prompts,
        "prefix_cache_hits_total": 9, "request_success_total stop": 2, "request_success_total length": 1,
    }  # fmt: skip


def test_metrics_show_the_load_of_the_engine(tokenizer):
    loads = iter([EngineLoad(3, 2, 5, 20), EngineLoad(0, 0)])
    engine = SimpleNamespace(unfinished_tokens=lambda wanted: [], load=lambda: next(loads))
    with listening(tokenizer) as endpoint:
        endpoint.show(engine)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(post, endpoint, ASK)
            endpoint.wait_blocking(60)
            busy = metrics(endpoint)
            (call,) = endpoint.take()
            endpoint.deliver(call.number, completion(tokenizer, "3"))
            assert asked.result(60).status_code == 200
        idle = metrics(endpoint)
    shown = {name: value for name, value in busy.items() if "_total" not in name}
    assert shown == {
        "num_requests_running": 3, "num_requests_waiting": 3, "kv_cache_blocks_in_use": 5, "kv_cache_usage_perc": 0.25
    }  # fmt: skip
    assert (idle["num_requests_running"], idle["num_requests_waiting"]) == (0, 0)
    assert "kv_cache_blocks_in_use" not in idle, "a cache of rows has none"
