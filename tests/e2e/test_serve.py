"""`megatron-rl serve` as OpenAI's own client sees it: what is drawn, what is batched, on one rank and on two."""

from __future__ import annotations

import json
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import openai
import pytest

from megatron_rl import cli
from megatron_rl.cli.model import model_config
from megatron_rl.endpoint.calls import Endpoint
from megatron_rl.families.family import SMALL
from megatron_rl.generation import Generator, open_generator, serve
from tests.support.endpoint import byte_tokenizer
from tests.support.hugging_face import write_model
from tests.support.launches import Launch, forked, launched

T = TypeVar("T")

ASK: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A Qwen2 of random weights that draws bytes."""
    directory = tmp_path_factory.mktemp("models") / "small"
    write_model(directory, "qwen2", {**SMALL, "vocab_size": 260})
    byte_tokenizer(directory)
    return directory


@pytest.mark.own_process
def test_what_is_drawn_and_what_is_batched(model):
    config = model_config(str(model), ["--seed", "5", "--rl-tool-call-parser", "hermes"], world_size=1, at_once=16)
    with open_generator(config) as generator:
        factory = generator.factory
        endpoint = Endpoint(
            generator.tokenizer, max_sequence_length=factory.max_sequence_length, max_new_tokens=64,
            sampling=factory.sampling,
        )  # fmt: skip
        endpoint.start()
        client = openai.OpenAI(base_url=endpoint.base_url(), api_key=endpoint.token, max_retries=0)
        try:
            _seeds(lambda do: _while_serving(generator, endpoint, do), client)
            _goes_on(generator, endpoint, client)
            _batches(generator, endpoint, client)
            _hangs_up(generator, endpoint, client)
            _keeps_to_grammars(generator, endpoint, client)
            _knows_how_likely_others_were(generator, endpoint, client)
        finally:
            endpoint.close()


def _while_serving(generator: Generator, endpoint: Endpoint, do: Callable[[], T]) -> T:
    """``do`` in another thread: the engine is this one's."""
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(do)
        serve(generator, endpoint, done.done)
        return done.result()


def _texts(answer: Any) -> list[str]:
    return [choice.message.content for choice in answer.choices]


def _streamed(client: openai.OpenAI, **asked: Any) -> list[str]:
    chunks = client.chat.completions.create(**ASK, stream=True, **asked)
    return [chunk.choices[0].delta.content or "" for chunk in chunks]


def _seeds(serving: Callable[[Callable[[], T]], T], client: openai.OpenAI) -> None:
    ask = client.chat.completions.create
    first, again, other = serving(lambda: [_texts(ask(**ASK, n=3, seed=seed)) for seed in (7, 7, 8)])
    assert first == again
    assert len({*first, *other}) == 6, "each choice and each seed has numbers of its own"
    alone, streamed = serving(lambda: (_texts(ask(**ASK, seed=7)), _streamed(client, seed=7)))
    assert alone == first[:1], "the first of several choices is what one alone would be"
    assert "".join(streamed) == first[0]
    assert len(streamed) > 2, "it comes while it is drawn"
    free = serving(lambda: [_texts(ask(**ASK))[0] for _ in range(3)])
    assert len({*free}) == 3, "without a seed no two are alike"
    greedy = serving(lambda: [ask(**ASK, temperature=0, seed=seed, logprobs=True).choices[0] for seed in (1, 2)])
    assert greedy[0].message.content == greedy[1].message.content
    assert [token.logprob for token in greedy[0].logprobs.content] == [t.logprob for t in greedy[1].logprobs.content]
    assert all(token.logprob < 0 for token in greedy[0].logprobs.content)


def _goes_on(generator: Generator, endpoint: Endpoint, client: openai.OpenAI) -> None:
    statistics = generator.engine.statistics
    messages = [{"role": "user", "content": "x" * 50}]

    def converse() -> None:
        for _ in range(2):
            answer = client.chat.completions.create(**ASK | {"messages": messages}, temperature=0)
            cached.append(answer.usage.prompt_tokens_details.cached_tokens)
            messages.extend([answer.choices[0].message, {"role": "user", "content": "more"}])

    before, cached = statistics.reused_tokens, []
    _while_serving(generator, endpoint, converse)
    assert statistics.reused_tokens - before == sum(cached)
    assert cached[1] >= 50, "a conversation goes on from its earlier turns' cache"


def _batches(generator: Generator, endpoint: Endpoint, client: openai.OpenAI) -> None:
    statistics = generator.engine.statistics

    def ask(number: int) -> str:
        return _texts(client.chat.completions.create(**ASK, seed=number))[0]

    before = statistics.decode_steps
    one_by_one = _while_serving(generator, endpoint, lambda: [ask(number) for number in range(16)])
    steps_alone = statistics.decode_steps - before
    with ThreadPoolExecutor(16) as pool:
        asked = [pool.submit(ask, number) for number in range(16)]
        while endpoint.num_waiting < 16:
            time.sleep(0.01)
        together = _while_serving(generator, endpoint, lambda: [each.result() for each in asked])
    steps_together = statistics.decode_steps - before - steps_alone
    assert together == one_by_one, "whoever else asks changes no answer"
    assert steps_together <= steps_alone / 8


def _knows_how_likely_others_were(generator: Generator, endpoint: Endpoint, client: openai.OpenAI) -> None:
    """As lm-eval asks: is a continuation the likeliest, and what is its log-prob; as chats do, of what was drawn."""
    ids = [72, 101, 108, 108, 111, 33]
    likelihood = {"model": "policy", "prompt": ids, "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0}
    asked = {"logprobs": True, "top_logprobs": 3, "temperature": 0, "max_tokens": 6}

    def converse() -> tuple[Any, ...]:
        chat = client.chat.completions.create(**ASK | asked).choices[0]
        echoed = client.completions.create(**likelihood).choices[0]
        shown = client.completions.create(model="policy", prompt=ids, max_tokens=1, extra_body={"prompt_logprobs": 2})
        return chat, echoed, shown.choices[0]

    chat, echoed, shown = _while_serving(generator, endpoint, converse)
    for token in chat.logprobs.content:
        assert token.logprob == pytest.approx(token.top_logprobs[0].logprob, abs=1e-6), "it is the likeliest"
        assert token.bytes == token.top_logprobs[0].bytes
        assert len(token.top_logprobs) == 3
    logprobs = echoed.logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == len(ids) + 1
    assert (logprobs.token_logprobs[0], logprobs.top_logprobs[0]) == (None, None)
    pairs = zip(logprobs.token_logprobs[1:], logprobs.top_logprobs[1:], strict=True)
    assert all(own <= max(top.values()) + 1e-6 for own, top in pairs)
    assert logprobs.token_logprobs[-1] == pytest.approx(max(logprobs.top_logprobs[-1].values()), abs=1e-6)
    assert echoed.text.startswith(generator.tokenizer.decode(ids))
    assert shown.prompt_logprobs[0] is None
    own = [entry[str(token)]["logprob"] for entry, token in zip(shown.prompt_logprobs[1:], ids[1:], strict=True)]
    assert own == pytest.approx(logprobs.token_logprobs[1:-1], abs=1e-6)


def _keeps_to_grammars(generator: Generator, endpoint: Endpoint, client: openai.OpenAI) -> None:
    """Random weights, so nothing but the grammar makes an answer one; who asks for none gets what it always gets."""
    schema = {
        "type": "object", "additionalProperties": False, "required": ["unit", "digits"],
        "properties": {"unit": {"enum": ["m", "km"]}, "digits": {"type": "string", "pattern": "^[0-9]{2}$"}},
    }  # fmt: skip
    tool = {"type": "function", "function": {"name": "add", "parameters": {
        "type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
    }}}  # fmt: skip
    ask = client.chat.completions.create
    call = ASK | {"tools": [tool], "max_tokens": 64}

    def converse() -> list[Any]:
        with ThreadPoolExecutor(8) as pool:
            free = pool.submit(ask, **ASK, seed=7)
            asked = [
                pool.submit(ask, **ASK | {"max_tokens": 64}, response_format={
                    "type": "json_schema", "json_schema": {"name": "length", "schema": schema},
                }),
                pool.submit(ask, **ASK, extra_body={"guided_choice": ["yes", "no"]}, stream=True),
                pool.submit(ask, **ASK, extra_body={"structured_outputs": {"regex": "[ab]{3}/\\d"}}),
                pool.submit(ask, **call, tool_choice={"type": "function", "function": {"name": "add"}}),
                pool.submit(ask, **call, tool_choice="required", parallel_tool_calls=False, temperature=0),
                pool.submit(ask, **ASK, extra_body={"ignore_eos": True, "min_p": 0.1}, frequency_penalty=1),
            ]  # fmt: skip
            answers = [each.result() for each in asked]
            answers[1] = "".join(chunk.choices[0].delta.content or "" for chunk in answers[1])
            return [free.result(), *answers]

    free, length, choice, matched, named, required, endless = _while_serving(generator, endpoint, converse)
    assert _texts(free) == _texts(_while_serving(generator, endpoint, lambda: ask(**ASK, seed=7)))
    assert re.fullmatch('\\{"unit": "k?m", "digits": "[0-9]{2}"\\}', _texts(length)[0])
    assert choice in ("yes", "no")
    assert re.fullmatch(r"[ab]{3}/\d", _texts(matched)[0])
    for answer in (named, required):
        (made,) = answer.choices[0].message.tool_calls
        assert (made.function.name, answer.choices[0].finish_reason) == ("add", "tool_calls")
        assert json.loads(made.function.arguments) in ({"a": 1}, {"a": 2})
    assert endless.usage.completion_tokens == ASK["max_tokens"]
    assert endless.choices[0].finish_reason == "length"
    with pytest.raises(openai.BadRequestError, match="cannot be made to hold"):
        _while_serving(generator, endpoint, lambda: ask(**ASK, extra_body={"guided_regex": "("}))


def _hangs_up(generator: Generator, endpoint: Endpoint, client: openai.OpenAI) -> None:
    """After a step of two streamed choices: once that is known no step more is made of them."""
    engine, drawing, steps = generator.engine, threading.Event(), [generator.engine.statistics.decode_steps]

    def ask() -> None:
        stream = client.chat.completions.create(**ASK | {"max_tokens": 64}, n=2, seed=1, stream=True)
        assert drawing.wait(60)
        stream.close()

    def ended() -> bool:  # asked before each step
        if engine.statistics.decode_steps > steps[0] and not drawing.is_set():
            drawing.set()
            asked.result(60)
            while endpoint.num_waiting:
                time.sleep(0.01)
            steps.append(engine.statistics.decode_steps)
        return drawing.is_set() and not engine.has_unfinished

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        serve(generator, endpoint, ended)
    before, seen = steps
    assert before < seen < before + 60
    assert engine.statistics.decode_steps == seen


def _address(launch: Launch, token_file: Path) -> openai.OpenAI:
    launch.wait_until(lambda: "the API key is in" in launch.output, "an address")
    (line,) = [line for line in launch.output.splitlines() if line.startswith("policy at ")]
    return openai.OpenAI(base_url=line.removeprefix("policy at "), api_key=token_file.read_text(), max_retries=0)


@pytest.mark.parametrize("flag", ["tensor", pytest.param("pipeline", marks=pytest.mark.long)])
def test_as_processes_until_ctrl_c(model, tmp_path, flag):
    token = tmp_path / "serve.token"
    words = [str(model), "--port", "0", "--token-file", str(token), "--served-model-name", "policy", "--seed", "5"]
    with forked(words, tmp_path / "alone", program=["-m", "megatron_rl.cli", "serve"]) as launch:
        client = _address(launch, token)
        alone = _texts(client.chat.completions.create(**ASK, seed=7, n=3))
        launch.signal_rank(0, signal.SIGINT)
        assert launch.wait() == 0, launch.output
    words.append(f"--{flag}-model-parallel-size=2")
    with launched(words, tmp_path / "serve", 2, by_itself=True, command="serve") as launch:
        client = _address(launch, token)
        assert _texts(client.chat.completions.create(**ASK, seed=7, n=3)) == alone, "a model over ranks says the same"
        chunks = _streamed(client, seed=7)
        assert "".join(chunks) == alone[0]
        assert len(chunks) > 2
        worked = _cpu_seconds(launch)
        time.sleep(2.0)
        assert _cpu_seconds(launch) - worked < 0.5, "who waits for calls does not compute"
        with ThreadPoolExecutor(1) as pool:
            unfinished = pool.submit(_expect_its_end, client)
            launch.signal_group(signal.SIGINT)
            time.sleep(0.05)
            launch.signal_group(signal.SIGINT)
            assert launch.wait() == 0, launch.output
            unfinished.result()
        assert "Traceback" not in launch.output
        assert launch.leftovers() == []
    assert token.stat().st_mode & 0o077 == 0


def _cpu_seconds(launch: Launch) -> float:
    times = [process.cpu_times() for process in launch.processes()]
    return sum(each.user + each.system for each in times)


def _expect_its_end(client: openai.OpenAI) -> None:
    """One that is asked for when the server ends."""
    with pytest.raises((openai.APIError, openai.APIConnectionError)):
        for _ in range(1000):
            client.chat.completions.create(**ASK | {"max_tokens": 1000})


def test_words_that_are_refused(model, tmp_path, capsys):
    def refused(*words: str) -> str:
        assert cli.main(["serve", str(model), *words]) == 2
        return capsys.readouterr().err

    assert "2 copies of the model, and serve has one" in refused("--nproc", "2")
    assert "--allow-remote" in refused("--host", "0.0.0.0")
    assert "--port" in refused("--port", "65536")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "choose another one" in refused("--port", str(taken.getsockname()[1]))
    short, folder = tmp_path / "short", tmp_path
    short.write_text("abc\n")
    assert "16 letters" in refused("--port", "0", "--token-file", str(short))
    assert "cannot be read" in refused("--port", "0", "--token-file", str(folder))
