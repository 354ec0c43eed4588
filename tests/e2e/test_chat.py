"""`megatron-rl chat` and `generate` say what transformers says, token by token, over turns and on two ranks."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from megatron_rl import cli
from megatron_rl.cli import launch
from megatron_rl.cli.model import model_config
from megatron_rl.cli.options import Ranks
from megatron_rl.families.family import SMALL
from megatron_rl.generation import Chat, as_prompt, open_generator
from tests.support.forks import run_python
from tests.support.hugging_face import write_model
from tests.support.ranks import run_ranks
from tests.support.tape import on_a_gpu

TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{{ '=' if m['role'] == 'user' else '<|end|>' }}{% endfor %}"
)
GREEDY = ["--temperature", "0", "--max-new-tokens", "8"]
TURNS = ("1+2", "3+4+1", "5-2")


@pytest.fixture(scope="module")
def reference(workshop) -> torch.nn.Module:
    """A Qwen2 of random weights, which `model` holds."""
    return write_model(workshop.folder / "chatty", "qwen2", {**SMALL, "vocab_size": 17})


@pytest.fixture(scope="module")
def model(workshop, reference) -> Path:
    """Its directory, with a tokenizer and a chat template."""
    directory = workshop.folder / "chatty"
    shutil.copytree(workshop.tokenizer, directory, dirs_exist_ok=True)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def _by_transformers(reference: torch.nn.Module, ids: list[int]) -> list[int]:
    prompt = torch.tensor([ids])
    said = reference.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=8, eos_token_id=0
    )
    return said[0, len(ids) :].tolist()


@pytest.fixture(scope="module")
def expected(model, reference) -> list[str]:
    """The answers of a conversation of `TURNS`, decoded greedily by transformers from all tokens so far."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids: list[int] = []
    answers = []
    for turn in TURNS:
        if ids and ids[-1] != 0:
            ids.append(0)  # the template closes a turn that was cut
        ids += tokenizer.encode(turn + "=", add_special_tokens=False)
        said = _by_transformers(reference, ids)
        ids += said
        answers.append(tokenizer.decode(said, skip_special_tokens=True))
    return answers


@pytest.mark.own_process
def test_a_conversation(model, expected, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join([TURNS[0], "", *TURNS[1:], "/exit", "never said"])))
    assert cli.main(["chat", str(model), *GREEDY]) == 0
    first, *more = expected
    assert capsys.readouterr().out == f"> {first}\n> > " + "\n> ".join(more) + "\n> "


@pytest.mark.own_process
def test_later_turns_go_on_from_the_cache(model):
    with open_generator(model_config(str(model), GREEDY, world_size=1, at_once=1)) as generator:
        chat, statistics = Chat(generator), generator.engine.statistics
        long = "1+2+3+4+5+6+7+8+9+1+2+3"
        for _ in chat.say(long, lambda: False):
            pass
        assert statistics.reused_tokens == 0
        for _ in chat.say("1", lambda: False):
            pass
        assert statistics.reused_tokens > len(long)


@pytest.mark.own_process
def test_a_short_job_on_a_gpu_captures_no_graphs(model, monkeypatch):
    """Nobody asked for them, so they come after 128 decode steps; an answer here takes seven or fewer."""
    made = on_a_gpu(monkeypatch)
    with open_generator(model_config(str(model), GREEDY, world_size=1, at_once=1)) as generator:
        first, steps = generator.answers(["1+2="]), generator.engine.statistics
        while steps.decode_steps < 128:
            assert made[0].recorded == 0
            assert generator.answers(["1+2="]) == first
        assert generator.answers(["1+2="]) == first
        assert made[0].replayed > 0


@pytest.mark.own_process
def test_a_stopped_answer_stays_in_the_conversation(model, monkeypatch):
    config = model_config(str(model), ["--temperature", "0", "--max-new-tokens", "64"], world_size=1, at_once=1)
    asked = [False]
    with open_generator(config) as generator:
        whole = list(Chat(generator).say("1+2", lambda: False))[-1]
        chat, texts, prompts, submit = Chat(generator), [], [], generator.engine.submit
        monkeypatch.setattr(generator.engine, "submit", lambda one: (prompts.append(one.prompt_ids), submit(one)))
        for text in chat.say("1+2", lambda: asked[0]):
            texts.append(text)
            asked[0] = bool(text)
        assert 0 < len(texts[-1]) < len(whole)
        assert whole.startswith(texts[-1])
        assert list(chat.say("3", lambda: False))[-1]
        tokenizer, (first, second) = generator.tokenizer, prompts
        reply = tokenizer.encode_reply(as_prompt(tokenizer, "1+2"), [{"role": "user", "content": "3"}], False)
        assert reply[0] == 0, "the template closes a turn that was cut"
        assert second[: len(first)] == first and second[-len(reply) :] == tuple(reply)
        assert tokenizer.decode(second[len(first) : -len(reply)]) == texts[-1]


def _generate(*words: object) -> str:
    ended = run_python("-m", "megatron_rl.cli", "generate", *words, *GREEDY)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_answers_of_a_file_on_one_rank_and_on_two(model, expected, tmp_path, monkeypatch):
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    lines = ["1+2", {"prompt": "3"}, {"messages": [{"role": "user", "content": "1+2"}]}, "7-1"]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = [str(model), "--prompts", str(prompts)]
    printed = _generate(*words)
    rows = [json.loads(line) for line in printed.splitlines()]
    assert [row["prompt"] for row in rows[:2]] == ["1+2", "3"]
    assert rows[0]["completion"] == rows[2]["completion"] == expected[0]
    assert len({row["completion"] for row in rows}) > 1
    monkeypatch.setattr(launch, "launch", in_forks)
    words = ["generate", *words, *GREEDY, "--output", str(output), "--nproc", "2"]
    for layout in ([], ["--tensor-model-parallel-size", "2"], ["--pipeline-model-parallel-size", "2"]):
        output.unlink(missing_ok=True)
        assert cli.main([*words, *layout]) == 0
        assert output.read_text() == printed


def in_forks(ranks: Ranks, entry: str, words: Sequence[str], command: Sequence[str]) -> int:
    """In the place of the launcher, which test_serve.py has."""
    assert run_ranks(entry, ranks.nproc, words=list(words)) == [0] * ranks.nproc
    return 0


def test_a_run_of_ours_is_found_by_its_directory(warm_start, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("1+2=\n\n3+4=\n")
    places = warm_start.parent, warm_start, max(warm_start.glob("step_*"))
    found = [_generate(place, "--prompts", prompts, "--raw") for place in places]
    assert len(found[0].splitlines()) == 2
    assert found[0] == found[1] == found[2]
