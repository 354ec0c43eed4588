"""The compiled decode step: eager tokens, log-probs within 1e-5, one graph for all batches, eager where it must be."""

from __future__ import annotations

import copy
import logging
import shutil
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from megatron_rl import build_engine
from megatron_rl.attention import choose
from megatron_rl.attention.backend import DeviceFacts
from megatron_rl.inference import RolloutEngine, compiled
from megatron_rl.inference.compiled import CompiledForward
from megatron_rl.models import PolicyModel, RolloutForward
from megatron_rl.types import GenerationRequest
from tests.support.generation import (
    generate,
    largest_gap,
    ragged_requests,
    randomise_vectors,
    request,
    rollout_engine,
    tokens,
)
from tests.support.quantized import disturb
from tests.support.tiny import tiny_config, tiny_policy

TOLERANCE = 1e-5
MIXED = [{}, {"greedy": True}, {"temperature": 0.7}, {"top_p": 0.8}, {"top_k": 4}]
WANTED = [
    request((4, 9, 17 - i)[: 1 + i % 3], 3, i, max_new_tokens=2 + 5 * i % 31, **MIXED[i % len(MIXED)])
    for i in range(9)
]


def traced(graph: torch.fx.GraphModule, inputs: object) -> Callable:
    """A backend without a compiler: the graph's own operations."""
    del inputs
    return graph.forward


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Graphs are held by function, whatever engine had them made."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def without_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced, not compiled: the same function in a second instead of many."""
    monkeypatch.setattr(compiled, "_inductor", traced)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")


def forward_of(engine: RolloutEngine) -> CompiledForward | RolloutForward:
    """What the engine's decode steps call."""
    return engine._decode._model


def compare(policy: PolicyModel, wanted: list[GenerationRequest], **options: object) -> RolloutEngine:
    """Eager and compiled draw the same tokens."""
    options = {"steps_per_host_read": 3} | options
    eager = generate(policy, rollout_engine(policy, **options), wanted)
    engine = rollout_engine(policy, compiled=True, **options)
    groups = generate(policy, engine, wanted)
    assert tokens(groups) == tokens(eager)
    assert largest_gap(groups, eager) < TOLERANCE
    return engine


@pytest.mark.skipif(compiled.compiler_problem() is not None, reason="no C++ compiler")
@pytest.mark.long
def test_compiled_steps_draw_the_tokens_of_eager_steps(
    policy: PolicyModel, caplog: pytest.LogCaptureFixture, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with caplog.at_level(logging.INFO, "megatron_rl"):
        engine = compare(policy, WANTED)
    assert forward_of(engine).variants == 1
    assert engine.statistics.compile_seconds > 0
    assert [r.message for r in caplog.records if "decode step compiled in" in r.message]
    generate(policy, engine, WANTED, seed=2)
    assert forward_of(engine).variants == 1
    assert engine.statistics.compile_seconds == 0


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("slots", [3, 8, 20])
def test_one_graph_serves_all_rows_and_lengths(policy: PolicyModel, slots: int) -> None:
    """More requests than slots; ragged limits, so rows end and the batch shrinks."""
    engine = compare(policy, WANTED, max_batch_size=slots)
    assert forward_of(engine).variants == 1


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize(
    "flags",
    [
        {"normalization": "LayerNorm", "swiglu": False, "disable_bias_linear": False},
        {"untie_embeddings_and_output_weights": False, "rotary_percent": 0.5},
        {"num_query_groups": 4, "add_qkv_bias": False},
    ],
    ids=["layer norm, gelu and biases", "tied, half rotated", "as many groups as heads"],
)
def test_kinds_of_model(one_rank: object, flags: dict[str, object]) -> None:
    other = tiny_policy(tiny_config(**flags))
    randomise_vectors(other)
    assert forward_of(compare(other, WANTED)).variants == 1


@pytest.mark.usefixtures("without_inductor")
def test_new_weights_are_seen_without_a_new_graph(one_rank: object) -> None:
    policy, wanted = tiny_policy(), ragged_requests(6, greedy=True, max_new_tokens=20)
    engine = rollout_engine(policy, compiled=True)
    before = generate(policy, engine, wanted)
    disturb(policy, 0.3)
    after = generate(policy, engine, wanted)
    assert tokens(after) == tokens(generate(policy, rollout_engine(policy), wanted)) != tokens(before)
    assert forward_of(engine).variants == 1


@pytest.mark.usefixtures("without_inductor")
def test_observed_and_replaced_linears_run_eager(policy: PolicyModel, caplog: pytest.LogCaptureFixture) -> None:
    """Audits hang hooks on linears, quantised rollouts replace their ``forward``: a graph would call neither."""
    caplog.set_level(logging.INFO, "megatron_rl")
    engine = rollout_engine(policy, compiled=True)
    wanted = ragged_requests(4, max_new_tokens=10)
    linear, calls = policy.gpt.decoder.layers[0].mlp.linear_fc2, []
    hook = linear.register_forward_hook(lambda *_: calls.append(1))
    generate(policy, engine, wanted)
    hook.remove()
    assert len(calls) > engine.statistics.decode_steps > 0
    calls.clear()

    def replaced(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        calls.append(1)
        return type(linear).forward(linear, tokens)

    linear.forward = replaced
    try:
        generate(policy, engine, wanted)
    finally:
        del linear.forward
    assert len(calls) > engine.statistics.decode_steps > 0
    assert forward_of(engine).variants == 0
    assert len([r for r in caplog.records if "decode runs eager" in r.message]) == 1
    generate(policy, engine, wanted)
    assert forward_of(engine).variants == 1


def test_a_compilation_that_fails_leaves_an_eager_run(
    policy: PolicyModel, caplog: pytest.LogCaptureFixture, without_inductor: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(graph: torch.fx.GraphModule, inputs: object) -> Callable:
        raise OSError("Python.h is missing")

    monkeypatch.setattr(compiled, "_inductor", broken)
    compare(policy, WANTED)
    assert [r.message for r in caplog.records if "Python.h is missing" in r.message and "eager" in r.message]
    assert len([r for r in caplog.records if "could not be compiled" in r.message]) == 1


def test_more_variants_than_torch_allows_leave_an_eager_run(
    policy: PolicyModel, caplog: pytest.LogCaptureFixture, without_inductor: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function of Python's numbers would be compiled for each of them; after some of them torch refuses."""
    monkeypatch.setattr(torch._dynamo, "mark_dynamic", torch._dynamo.mark_static)
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 2)
    monkeypatch.setattr(torch._dynamo.config, "automatic_dynamic_shapes", False)
    engine = compare(policy, WANTED)
    assert forward_of(engine).variants == 2
    assert len([r for r in caplog.records if "could not be compiled" in r.message]) == 1


def test_without_a_compiler_it_says_so_once(
    policy: PolicyModel, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    engine = compare(policy, ragged_requests(4, max_new_tokens=10))
    assert isinstance(forward_of(engine), RolloutForward)
    assert [r.message for r in caplog.records if "--rl-compile-rollout" in r.message] == [
        "--rl-compile-rollout has no effect: it needs a C++ compiler, and there is no no-such-compiler; install one, "
        "or set CXX"
    ]


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize(
    ("flags", "attention", "reason"),
    [
        ({"qk_layernorm": True}, "sdpa", "dense layers"),
        ({"num_experts": 4, "moe_router_topk": 2}, "sdpa", "dense layers"),
        ({"bf16": True}, "sdpa", "fp32"),
        ({}, "paged", "sdpa backend"),
    ],
)
def test_what_it_does_not_know_runs_eager(
    one_rank: object, flags: dict[str, object], attention: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    other = copy.copy(tiny_policy(tiny_config(**flags)))
    object.__setattr__(other, "attention", choose(attention, DeviceFacts("cpu")))
    engine = rollout_engine(other, compiled=True)
    assert isinstance(forward_of(engine), RolloutForward)
    said = [r.message for r in caplog.records if "--rl-compile-rollout has no effect" in r.message]
    assert len(said) == 1 and reason in said[0]


@pytest.mark.parametrize("wanted", [True, False])
def test_the_flag_reaches_the_engine(policy: PolicyModel, wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    monkeypatch.setattr(build_engine, "RolloutEngine", lambda _, options, *rest: built.append(options))
    tokenizer, groups = SimpleNamespace(end_token_ids=(3,), decode=None), SimpleNamespace(tensor_group=None)
    build_engine.build_engine(tiny_config(rl_compile_rollout=wanted), policy, tokenizer, groups)
    assert [options.compiled for options in built] == [wanted]
