"""`generate`, `chat`, `serve` and evaluations of a base with adapters say what peft and transformers say of them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
import torch
from transformers import AutoTokenizer

from megatron_rl import cli
from megatron_rl.cli import launch
from megatron_rl.families.family import SMALL
from tests.e2e.test_chat import TEMPLATE, in_forks
from tests.support.forks import Fork, run_python
from tests.support.hugging_face import write_model
from tests.support.runs import command, records_of, run, run_many

peft = pytest.importorskip("peft", reason="peft is not installed; it comes with bash tools/setup.sh test")

GREEDY = ["--temperature", "0", "--max-new-tokens", "8"]
PROMPTS = ("1+2", "3+4+1", "5-2")
END = 0


class Adapted(NamedTuple):
    """Adapters of a run of two steps, exported, and what peft makes of base and export."""

    base: Path
    adapters: Path
    run_dir: Path
    model: torch.nn.Module

    def logprobs(self, ids: Sequence[int]) -> torch.Tensor:
        """[T - 1]: of each token but the first."""
        with torch.no_grad():
            table = self.model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        return table.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]

    def greedy(self, ids: list[int], length: int = 8) -> list[int]:
        """The answer's tokens."""
        prompt = torch.tensor([ids])
        said = self.model.generate(
            input_ids=prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=length,
            eos_token_id=END,
        )  # fmt: skip
        return said[0, len(ids) :].tolist()

    def answers(self, prompts: Sequence[str] = PROMPTS) -> list[str]:
        """Each of a conversation of its own."""
        tokenizer = AutoTokenizer.from_pretrained(self.base)
        return [tokenizer.decode(self.greedy(tokenizer.encode(f"{p}=")), skip_special_tokens=True) for p in prompts]


@pytest.fixture(scope="module")
def adapted(workshop) -> Adapted:
    base, adapters = workshop.folder / "base", workshop.folder / "adapters"
    model = write_model(base, "qwen2", {**SMALL, "vocab_size": 17})
    shutil.copytree(workshop.tokenizer, base, dirs_exist_ok=True)
    (base / "chat_template.jinja").write_text(TEMPLATE)
    flags: dict[str, Any] = {
        "load-hf": base, "langrl-env-config": workshop.digits, "run-dir": workshop.run_dir("trained"), "lora-rank": 4,
        "perform-rl-step": True, "grpo-group-size": 4, "grpo-prompts-per-step": 4, "rl-max-new-tokens": 8,
        "micro-batch-size": 2, "seq-length": 48, "lr": 0.03, "train-iters": 2,
    }  # fmt: skip
    run(command(flags)).check()
    checkpoints = workshop.run_dir("trained") / "checkpoints"
    _ran("export", "--input-dir", checkpoints, "--output-dir", adapters, "--format", "peft")
    with torch.no_grad():
        before = model(torch.tensor([[1, 11, 2, 13]])).logits
        theirs = peft.PeftModel.from_pretrained(model, adapters).eval()
        assert (theirs(torch.tensor([[1, 11, 2, 13]])).logits - before).abs().max() > 0.5, "the adapters do something"
    return Adapted(base, adapters, workshop.run_dir("trained"), theirs)


def _ran(*words: object) -> str:
    ended = run_python("-m", "megatron_rl.cli", *words)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_generate_of_a_base_with_adapters_and_of_the_run(adapted, tmp_path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    for model in ([adapted.base, "--lora", adapted.adapters], [adapted.run_dir]):
        printed = _ran("generate", *model, "--prompts", prompts, *GREEDY)
        assert [json.loads(line)["completion"] for line in printed.splitlines()] == adapted.answers()


@pytest.mark.long
def test_generate_on_two_stages(adapted, tmp_path, monkeypatch) -> None:
    prompts, output = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    prompts.write_text("\n".join(PROMPTS))
    monkeypatch.setattr(launch, "launch", in_forks)
    words = [adapted.base, "--lora", adapted.adapters, "--prompts", prompts, "--output", output, *GREEDY]
    layout = ["--nproc", "2", "--pipeline-model-parallel-size", "2"]
    assert cli.main(["generate", *map(str, words), *layout]) == 0
    assert [json.loads(line)["completion"] for line in output.read_text().splitlines()] == adapted.answers()


def test_chat(adapted) -> None:
    program = (
        "import io, sys; from megatron_rl import cli; "
        f"sys.stdin = io.StringIO({PROMPTS[0]!r}); sys.exit(cli.main(sys.argv[1:]))"
    )
    ended = run_python("-c", program, "chat", adapted.base, "--lora", adapted.adapters, *GREEDY)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == f"> {adapted.answers()[0]}\n> "


@pytest.fixture
def client(adapted, tmp_path) -> Iterator[openai.OpenAI]:
    """Of `megatron-rl serve` on a base with adapters."""
    token, log = tmp_path / "token", tmp_path / "serve.log"
    words = ["serve", adapted.base, "--lora", adapted.adapters, "--port", 0, "--token-file", token]
    with log.open("wb") as written:
        server = Fork(["-m", "megatron_rl.cli", *map(str, words)], os.environ, written, written)
    try:
        deadline = time.monotonic() + 300
        while "the API key is in" not in log.read_text():
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        (line,) = [line for line in log.read_text().splitlines() if line.startswith("base at ")]
        yield openai.OpenAI(base_url=line.removeprefix("base at "), api_key=token.read_text(), max_retries=0)
        os.kill(server.pid, signal.SIGINT)
        assert server.wait(300) == 0, log.read_text()
    finally:
        server.kill()


def test_serve(adapted, client) -> None:
    tokenizer = AutoTokenizer.from_pretrained(adapted.base)
    for prompt in PROMPTS:
        (choice,) = client.chat.completions.create(
            model="base", messages=[{"role": "user", "content": prompt}], max_tokens=8, temperature=0, logprobs=True
        ).choices
        asked = tokenizer.encode(f"{prompt}=")
        said = adapted.greedy(asked)
        assert choice.message.content == tokenizer.decode(said, skip_special_tokens=True)
        found = torch.tensor([token.logprob for token in choice.logprobs.content])
        expected = adapted.logprobs([*asked, *said])[len(asked) - 1 :][: len(found)]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_evaluations(adapted, workshop) -> None:
    """`megatron-rl eval` and ``train_rl.py --eval-only`` record the same: drawn and greedy answers, log-probs."""
    shared: dict[str, Any] = {
        "langrl-env-config": workshop.digits, "seq-length": 48, "rl-max-new-tokens": 8, "rl-prompts-per-eval": 4,
        "rl-samples-per-eval-prompt": 2,
    }  # fmt: skip
    of_base = {"load-hf": adapted.base, "load-lora": adapted.adapters}
    ways = {"script": {"eval-only": True, **of_base}, "of_the_run": {"eval-only": True, "load": adapted.run_dir}}
    for outcome in run_many([command(shared | way | {"run-dir": workshop.run_dir(n)}) for n, way in ways.items()]):
        outcome.check()
    words = command(shared | of_base | {"run-dir": workshop.run_dir("command")})
    _ran("eval", *(word if word != "--load-lora" else "--lora" for word in words))
    text = (workshop.run_dir("command") / "rollouts" / "eval_000000.jsonl").read_text()
    for name in ways:
        assert (workshop.run_dir(name) / "rollouts" / "eval_000000.jsonl").read_text() == text
    rows = records_of(workshop.run_dir("command") / "rollouts" / "eval_000000.jsonl")
    assert [row["greedy"] for row in rows] == [False, False, True] * 4
    for row in rows:
        asked, said = row["prompt_ids"], row["token_ids"]
        expected = adapted.logprobs([*asked, *said])[len(asked) - 1 :]
        torch.testing.assert_close(torch.tensor(row["inference_logprobs"]), expected, rtol=0, atol=1e-5)
        assert not row["greedy"] or said == adapted.greedy(asked)
