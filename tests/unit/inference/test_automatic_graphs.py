"""CUDA graphs that nobody asked for, with a tape in their place: after some eager steps, and for good."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.cli import first_run
from megatron_rl.cli.first_run import Machine, full_flags
from megatron_rl.config.arguments import read_config
from megatron_rl.inference.engine import GraphOptions
from megatron_rl.inference.rollout_engine import RolloutEngine
from megatron_rl.loop import rl_step
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.run import generation
from megatron_rl.run.training import record_updates
from tests.support.generation import generate, ragged_requests, request, rollout_engine, tokens
from tests.support.hugging_face import write_shape
from tests.support.tape import TapeRecorder, on_a_gpu
from tests.support.tiny import write_tokenizer
from tests.support.toy import toy_run


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[TapeRecorder]:
    """The recorders of all engines on a machine that has graphs."""
    return on_a_gpu(monkeypatch)


def test_the_first_steps_are_eager(either: PolicyModel, made: list[TapeRecorder]) -> None:
    wanted = ragged_requests(6, num_samples=2, max_new_tokens=30)
    engine = rollout_engine(either, graphs=GraphOptions(16, after=20), decode_steps_per_sync=3)
    eager = generate(either, rollout_engine(either, decode_steps_per_sync=3), wanted)
    (recorder,), shorter = made, request((4, 9), max_new_tokens=15)
    generate(either, engine, [shorter])
    steps = engine.statistics.decode_steps
    assert 0 < steps < 20 and recorder.recorded == 0, "a short job captures nothing"
    assert tokens(generate(either, engine, wanted)) == tokens(eager)
    steps += engine.statistics.decode_steps
    assert 20 <= steps - recorder.replayed < 23, "up to the end of a burst of three"
    generate(either, engine, [shorter])
    assert steps + engine.statistics.decode_steps - recorder.replayed < 23, "at once from then on"


def test_whoever_asks_has_them_in_the_first_step(policy: PolicyModel, made: list[TapeRecorder]) -> None:
    engine = rollout_engine(policy, graphs=GraphOptions(16))
    generate(policy, engine, [request((4, 9), max_new_tokens=3)])
    assert made[0].replayed == engine.statistics.decode_steps > 0


def test_a_first_run_in_one_line_has_them(
    one_rank: Any, made: list[TapeRecorder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`megatron-rl train --model M --data D --reward R` on a GPU: no flag says so, and its rollouts are replayed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(first_run, "find_machine", lambda ranks, _: (ranks, Machine(True, 10**10, False)))
    write_tokenizer(tmp_path / "model")
    write_shape(tmp_path / "model")
    rows = [{"question": f"{number}+1=", "answer": str(number + 1)} for number in range(8)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, flags = full_flags(["--model", "model", "--data", "sums.jsonl", "--reward", "exact", "--rl-max-new-tokens=90"])
    assert not [flag for flag in flags if "graph" in flag]
    config, problems = read_config([*flags, "--grpo-prompts-per-step=2", "--grpo-group-size=2"], 1)
    assert problems == []
    config = config.with_values(load_hf=None, save_interval=None, eval_interval=None)
    engines: list[RolloutEngine] = []

    def build(*given: Any, **options: Any) -> RolloutEngine:
        engines.append(RolloutEngine(*given, **options))
        return engines[-1]

    monkeypatch.setattr(generation, "RolloutEngine", build)
    run, steps, replayed = toy_run(config, one_rank), 0, list[int]()
    for step in (1, 2, 3):
        record_updates(run, rl_step(run, step))
        steps += engines[0].statistics.decode_steps
        replayed.append(made[0].replayed)
        assert (replayed[-1] > 0) == (steps > 128 + 8)
    assert replayed[0] == 0 < replayed[-1]
    run.closing.close()
