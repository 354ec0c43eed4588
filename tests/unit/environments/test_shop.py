"""The shop of examples/agent_tools, and the tokenizer that makes its conversations short."""

from __future__ import annotations

import contextlib
import json
import runpy
from itertools import islice

import pytest

from megatron_rl.environments.loader import find_environment
from megatron_rl.environments.sandbox import sandbox_problem
from megatron_rl.environments.selftest import always, run_checks, script_of, scripted_model
from megatron_rl.environments.workers import WorkerPool
from megatron_rl.errors import ConfigError
from megatron_rl.tokenizer import load_tokenizer
from megatron_rl.types import Task, Turn
from tests.support.ranks import REPOSITORY

TASK = Task(
    "12 fig+7 nut",
    ({"role": "user", "content": "12 fig+7 nut"},),
    {"prices": {"fig": 37, "nut": 45}, "sum": "12*37+7*45", "answer": "759"},
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """The example's, which renders what the shop's tools are."""
    path = tmp_path_factory.mktemp("tokenizer")
    runpy.run_path(str(REPOSITORY / "examples" / "agent_tools" / "make_tokenizer.py"))["main"](path)
    return load_tokenizer(str(path))


def shop(**options):
    return find_environment("shop").from_options(options)


def said(environment, *turns):
    """What the model reads after each of the turns, and the last step."""
    state, read = None, []
    for number, text in enumerate(turns):
        step = environment.step(TASK, state, Turn(text, "stop", 9, number=number))
        state = step.state
        read += [message["content"] for message in step.messages]
    return read, step


def test_a_conversation():
    read, last = said(shop(), *shop().gold_turns(TASK))
    assert read == ["37", "45", "759"]
    assert (last.reward.reward, last.reward.status) == (1.0, "correct")
    assert last.reward.metrics == {"tool_calls": 3, "bad_tool_calls": 0}


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (("search", {"query": "figs"}), "?"),
        (("search", {"query": "yam"}), "?"),
        (("python", {"code": "print(2*3-10)"}), "-4"),
        (("python", {"code": "import os"}), "?"),
        (("python", {"code": "print(2*)"}), "?"),
        (("buy", {"query": "fig"}), "Error: there is no function 'buy'"),
    ],
)
def test_what_a_tool_answers(call, answer):
    [text], step = said(shop(), shop().call(call[0], **call[1]))
    assert text.startswith(answer)
    assert step.reward.reward == 0.0


@pytest.mark.skipif(bool(sandbox_problem()), reason=sandbox_problem())
def test_code_in_a_sandbox_of_a_grading_worker():
    assert [shop(sandbox=wanted).needs_sandbox for wanted in (False, True)] == [False, True]  # which --check looks at
    call = shop().call("python", code="print(sum(n * n for n in (3, 4)))")
    with contextlib.closing(WorkerPool(1)) as pool:
        item = (TASK, None, Turn(call, "stop", 9))
        [plain] = pool.grade("shop", {}, [item], 30.0, 0.0)
        [result] = pool.grade("shop", {"sandbox": True}, [item], 30.0, 0.0)
    assert [each.continuation.messages[0]["content"] for each in (plain, result)] == ["?", "25"]


@pytest.mark.parametrize(("text", "status"), [("759", "correct"), (" 759 ", "correct"), ("76", "wrong"), ("", "wrong")])
def test_an_answer_ends_it(text, status):
    _, step = said(shop(), text)
    assert step.done
    assert (step.reward.reward, step.reward.status) == (float(status == "correct"), status)


def test_demonstrations_begin_right_and_then_guess():
    shown = list(islice(shop(practice=100, guess_share=0.5).demonstrations("train"), 300))
    ends = [(row.later[-1].completion if row.later else row.completion) == row.task.data["answer"] for row in shown]
    assert all(ends[:100])
    assert 60 < sum(ends[100:]) < 140
    lengths = [len(row.later) for row, right in zip(shown, ends, strict=True) if not right]
    assert set(lengths) == {0, 2}, "guesses come at once, or after the searches"


@pytest.mark.parametrize("options", [{"goods": 0}, {"goods": 13}, {"max_price": 1}, {"guess_share": 1.5}])
def test_options_that_make_no_sense(options):
    with pytest.raises(ConfigError, match="goods must be 1 to 12"):
        shop(**options)


def test_too_few_questions():
    with pytest.raises(ValueError, match="raise max_count"):
        list(shop(goods=1, max_count=2).tasks("test"))


def test_the_tokenizer_writes_a_conversation_in_few_tokens(tokenizer):
    environment = shop()
    named = tokenizer.formatting(by_environment={"shop": tokenizer.chat_format().__class__(tools=environment.tools)})
    prompt = named.encode_prompt(TASK.prompt, "shop")
    assert named.decode_raw(prompt) == "<|tool|>search<|tool|>python<|user|>12 fig+7 nut<|end|><|assistant|>"
    call, *_, compute, _ = environment.gold_turns(TASK)
    assert [len(tokenizer.encode(text)) for text in (call, compute)] == [5, 12]
    assert tokenizer.decode(tokenizer.encode(compute)) == compute
    reply = tokenizer.encode_reply(TASK.prompt, [{"role": "tool", "content": "37"}], True, "shop")
    assert tokenizer.decode_raw(reply) == "<|result|>37<|end|><|assistant|>"


def test_the_template_writes_calls_as_the_model_does(tokenizer):
    environment = shop()
    for said in environment.gold_turns(TASK)[:3]:
        function = json.loads(said.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
        function["arguments"] = json.dumps(function["arguments"])
        spoken = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}]}
        assert f"<|assistant|>{said}<|end|>" in tokenizer.render([*TASK.prompt, spoken])


def test_every_character_of_an_error_is_a_token(tokenizer):
    text = "Error: 'x' is {not} \"valid\" | ~\n"
    assert tokenizer.decode_raw(tokenizer.encode(text)) == text


def test_the_harness_takes_the_shops_options_and_passes_its_self_test():
    pytest.importorskip("openai", reason="the extra agents is not installed")
    environment = find_environment("megatron_rl_environments.shop.harness:ShopHarness").from_options({"max_price": 50})
    assert not environment.in_process
    assert environment.max_turns == 1
    assert len(environment.gold_turns(TASK)) == 4
    results = {check.name: check.passed for check in run_checks(environment, limit=2)}
    assert results["gold answers"]
    assert results["empty answers"]


def test_the_harness_ends_where_the_conversation_is_full_or_has_had_its_turns():
    openai = pytest.importorskip("openai", reason="the extra agents is not installed")
    environment = find_environment("megatron_rl_environments.shop.harness:ShopHarness")()
    call = environment.gold_turns(TASK)[0]
    for script, calls in ((script_of([call]), 2), (always(call), 6)):
        asked = []
        with scripted_model(lambda n, script=script, asked=asked: (asked.append(n), script(n))[1]) as url:
            grade = environment.run(TASK, openai.OpenAI(base_url=url, api_key="k", max_retries=0))
        assert (grade.reward, grade.status, len(asked)) == (0.0, "wrong", calls)
