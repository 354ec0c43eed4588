"""Graphs of the decode step, with a tape in CUDA's place: the same tokens, recorded once, dropped when they must be."""

from __future__ import annotations

import copy
import logging
import re
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.inference.batch_state import BatchState
from megatron_rl.inference.engine import GraphOptions
from megatron_rl.inference.graphs import graph_key_lengths, graph_sizes
from megatron_rl.inference.sampler import SamplingModes
from megatron_rl.models.attention.backend import DeviceFacts
from megatron_rl.models.attention.selection import choose
from megatron_rl.models.gpt import PolicyModel, rollout_mode
from megatron_rl.quantization.audit import observe_linears
from megatron_rl.run import generation
from tests.support.generation import generate, largest_gap, ragged_requests, request, rollout_engine, tokens
from tests.support.tape import TapeRecorder, taped
from tests.support.tiny import tiny_config

# -- sizes, worked out by hand -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slots", "most", "sizes"),
    [
        (1, 16, (1,)),
        (4, 16, (4,)),
        (5, 16, (4, 5)),
        (16, 16, (4, 8, 16)),
        (20, 16, (4, 8, 16, 20)),
        (64, 16, (4, 8, 16, 24, 32, 40, 48, 56, 64)),
        # 9 sizes are left beside the powers of two: 128 .. 256 is halved first, then what is 64 wide, then 32
        (256, 16, (4, 8, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256)),
        (512, 16, (4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 384, 448, 512)),
        (256, 4, (32, 64, 128, 256)),
        (256, 3, (64, 128, 256)),
        (256, 2, (128, 256)),
        (256, 1, (256,)),
        (100, 3, (32, 64, 100)),
    ],
)
def test_sizes(slots: int, most: int, sizes: tuple[int, ...]) -> None:
    assert graph_sizes(slots, most) == sizes


def test_sizes_ascend_end_at_the_slots_and_are_no_more_than_allowed() -> None:
    for slots in range(1, 300, 7):
        for most in range(1, 20):
            sizes = graph_sizes(slots, most)
            assert list(sizes) == sorted(set(sizes))
            assert sizes[-1] == slots
            assert len(sizes) <= most


@pytest.mark.parametrize(
    ("longest", "reaches"),
    [(48, (48,)), (256, (256,)), (257, (256, 257)), (4096, (256, 512, 1024, 2048, 4096)), (600, (256, 512, 600))],
)
def test_reaches(longest: int, reaches: tuple[int, ...]) -> None:
    assert graph_key_lengths(longest) == reaches


# -- an engine whose decode step is on tape ------------------------------------------------------


@pytest.fixture(params=["sdpa", "paged"])
def either(request: pytest.FixtureRequest, policy: PolicyModel) -> PolicyModel:
    """The model over slots and over pages."""
    attention = choose(request.param, DeviceFacts("cpu"))
    changed = copy.copy(policy)
    object.__setattr__(changed, "attention", attention)
    return changed


MIXED = [{}, {"greedy": True}, {"temperature": 0.7}, {"top_p": 0.8}, {"top_k": 4}]


@pytest.mark.each_value
@pytest.mark.parametrize("slots", [3, 8, 20])
def test_replays_draw_the_tokens_of_eager_steps(either: PolicyModel, slots: int) -> None:
    """More requests than slots, so slots are refilled; ragged limits, so rows end, wait and are moved together."""
    wanted = [
        request((4, 9, 17 - i)[: 1 + i % 3], 3, i, max_new_tokens=2 + 5 * i % 31, **MIXED[i % 2 * (i % 5)])
        for i in range(9)
    ]
    options = {"max_batch_size": slots, "decode_steps_per_sync": 3}
    eager = generate(either, rollout_engine(either, **options), wanted)
    engine = rollout_engine(either, **options)
    sizes = tuple(size for size in (4, 8, 20) if size < slots) + (slots,)
    recorder = taped(engine, either, sizes)
    steps = 0
    for seed in (1, 2, 1):
        groups = generate(either, engine, wanted, seed)
        steps += engine.statistics.decode_steps
    assert tokens(groups) == tokens(eager)
    assert largest_gap(groups, eager) < 1e-5
    assert recorder.replayed == steps > 0


def test_the_tape_would_show_a_step_that_reads_python() -> None:
    """What the comparison with eager steps rests on: a number that Python has is the same in every replay."""
    buffer = torch.zeros(3)
    count = 0

    def leaky() -> None:
        nonlocal count
        count += 1
        buffer.add_(count)

    with torch.inference_mode():
        replay = TapeRecorder().record(leaky)
        replay()
        leaky()
        replay()
    assert buffer.tolist() == [1 + 2 + 1] * 3


def test_each_kind_and_reach_is_recorded_once_the_largest_size_first(
    policy: PolicyModel, caplog: pytest.LogCaptureFixture
) -> None:
    engine = rollout_engine(policy, stop_ids=())
    recorder = taped(engine, policy)
    sizes = []
    graphs = engine.runner.graphs
    (original,) = graphs.parts
    graphs.parts = [lambda rows, *rest: (sizes.append(rows), original(rows, *rest))]
    with caplog.at_level(logging.INFO):
        generate(policy, engine, [request((4, 9), 8, max_new_tokens=12)])  # up to 13 keys
    assert sizes == [8, 8, 4, 4], "a warm-up and a capture each, and nothing else"
    (line,) = [r.message for r in caplog.records]
    assert re.fullmatch(r"decode graphs: 2 batch sizes up to 8, captured in \S+ s, 2.0 MiB \(up to 24 keys\)", line)
    generate(policy, engine, [request((4, 9), 3, max_new_tokens=12)])
    assert recorder.recorded == 2
    generate(policy, engine, [request((4, 9), 3, max_new_tokens=30)])  # 24 keys are too few
    assert recorder.recorded == 4
    generate(policy, engine, [request((4, 9), 3, max_new_tokens=12, greedy=True)])
    assert recorder.recorded == 6
    generate(policy, engine, [request((4, 9), 3, max_new_tokens=30)])
    assert recorder.recorded == 6


def test_a_capture_in_the_middle_changes_nothing(policy: PolicyModel) -> None:
    """Recording for a longer reach comes while rows are alive: state and cache must not notice."""
    wanted = [request((4, 9), 8, max_new_tokens=40)]
    eager = generate(policy, rollout_engine(policy, stop_ids=()), wanted)
    engine = rollout_engine(policy, stop_ids=())
    recorder = taped(engine, policy, key_lengths=(16, 20, 24, 32, 48))
    assert tokens(generate(policy, engine, wanted)) == tokens(eager)
    assert recorder.recorded == 10


def test_recording_writes_at_most_the_next_cell_of_each_row(either: PolicyModel) -> None:
    engine = rollout_engine(either, stop_ids=(), decode_steps_per_sync=1)
    taped(engine, either)
    with rollout_mode(either), torch.inference_mode():
        engine.begin(1, 0)
        engine.submit(request((4, 9, 2), 5, max_new_tokens=20))
        engine.step()
        engine.runner.graphs.forget()
        state, cache = copy.deepcopy(vars(engine.runner.state)), engine.cache
        before = [keys.clone() for keys in cache.keys]
        next_slots = cache.slot_mapping(cache.rows, engine.runner.state.position).tolist()
        engine.runner.graphs.record(48, SamplingModes())
        for was, now in zip(before, cache.keys, strict=True):
            rows = -1, (now.shape[-1] if not hasattr(cache, "table") else now.shape[-2] * now.shape[-1])
            changed = (was.view(rows) != now.view(rows)).any(-1).nonzero()[:, 0].tolist()
            assert set(changed) <= set(next_slots)
    for name, was in state.items():
        now = getattr(engine.runner.state, name)
        assert torch.equal(was, now) if isinstance(was, torch.Tensor) else was == now


# -- what the graphs do not cover ----------------------------------------------------------------


def test_observed_layers_run_eager(policy: PolicyModel, caplog: pytest.LogCaptureFixture) -> None:
    """The audit counts calls and keeps inputs in Python hooks: a replay would show it nothing."""
    wanted = ragged_requests(4, max_new_tokens=10)
    engine = rollout_engine(policy)
    recorder = taped(engine, policy)
    with caplog.at_level(logging.INFO), observe_linears(policy.gpt, channels=True) as seen:
        generate(policy, engine, wanted)
    assert recorder.recorded == 0
    assert all(one.calls > engine.statistics.decode_steps for one in seen.values())
    assert len([r for r in caplog.records if "observed" in r.message]) == 1
    generate(policy, engine, wanted)
    assert recorder.replayed > 0


def test_a_capture_that_fails_leaves_an_eager_run(policy: PolicyModel, caplog: pytest.LogCaptureFixture) -> None:
    wanted = ragged_requests(6, max_new_tokens=20)
    eager = generate(policy, rollout_engine(policy), wanted)
    engine = rollout_engine(policy)
    recorder = taped(engine, policy)
    (original,) = engine.runner.graphs.parts

    def reads(rows: int, key_length: int, kinds: SamplingModes) -> None:
        original(rows, key_length, kinds)
        torch.nonzero(engine.runner.state.alive)

    engine.runner.graphs.parts = [reads]
    groups = generate(policy, engine, wanted)
    assert tokens(groups) == tokens(eager)
    assert recorder.replayed == 0
    (line,) = [r.message for r in caplog.records]
    assert line.startswith("decode runs eager from here on: no CUDA graph could be captured (operation not permitted")


def test_a_cpu_has_no_graphs_and_says_so(policy: PolicyModel, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        engine = rollout_engine(policy, graphs=GraphOptions(16))
    assert engine.runner.graphs is None
    assert [r.message for r in caplog.records] == [
        "--enable-cuda-graph has no effect: it needs a CUDA device, and this run is on cpu"
    ]
    caplog.clear()
    with caplog.at_level(logging.INFO):
        automatic = [rollout_engine(policy, graphs=graphs) for graphs in (None, GraphOptions(16, after=128))]
    assert [engine.runner.graphs for engine in automatic] == [None, None]
    assert not caplog.records, "nobody asked for any"


# -- rows that nobody runs in --------------------------------------------------------------------


@torch.inference_mode()
def test_a_row_that_is_not_alive_only_writes_to_the_trash_column() -> None:
    """A batch is rounded up, so rows are computed that belong to nobody."""
    state = BatchState(4, max_new_tokens=5, is_stop=torch.zeros(7, dtype=torch.bool))
    state.alive[1:3] = True
    for field in ("token", "position", "count"):
        getattr(state, field).copy_(torch.tensor([3, 1, 2, 2]))
    state.limit.fill_(4)
    state.tokens.copy_(torch.arange(24).view(4, 6))
    before = copy.deepcopy(vars(state))
    state.record(slice(0, 4), torch.tensor([[1, 2, 3, 4]]), -torch.rand(1, 4))
    for name in ("position", "count", "alive", "limit", "seed"):
        assert getattr(state, name)[[0, 3]].tolist() == before[name][[0, 3]].tolist(), name
    for name in ("tokens", "logprobs"):
        assert torch.equal(getattr(state, name)[[0, 3], :5], before[name][[0, 3], :5]), name
    assert state.count.tolist() == [3, 2, 3, 2]


def test_recording_happens_in_rollout_mode_only_by_the_engine(policy: PolicyModel) -> None:
    """An engine without requests records nothing."""
    engine = rollout_engine(policy)
    recorder = taped(engine, policy)
    with rollout_mode(policy):
        engine.begin(1, 0)
        assert engine.step() == []
    assert recorder.recorded == 0


FP8_LAYERS = {
    "transformer_impl": "transformer_engine", "bf16": True, "fp8_format": "e4m3", "fp8_recipe": "blockwise",
    "disable_bias_linear": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ({}, (16, 128)),
        ({"enable_cuda_graph": True}, (16, 0)),
        ({"no_enable_cuda_graph": True}, None),
        ({"cuda_graph_impl": "local", "inference_num_cuda_graphs": 3}, (3, 0)),
        ({"cuda_graph_impl": "none"}, None),
        ({"cuda_graph_impl": "none", "enable_cuda_graph": True}, (16, 0)),
        ({"cuda_graph_impl": "local", "no_enable_cuda_graph": True}, None),
        ({"cuda_graph_impl": "transformer_engine"}, (16, 128)),
        ({"num_experts": 4, "add_qkv_bias": False}, (16, 128)),
        ({"num_experts": 4, "add_qkv_bias": False, "no_moe_grouped_gemm": True}, None),
        ({"num_experts": 4, "add_qkv_bias": False, **FP8_LAYERS}, None),
        ({"num_experts": 4, "add_qkv_bias": False, **FP8_LAYERS, "rl_rollout_quantization": "fp8"}, (16, 128)),
    ],
)
def test_the_flags_reach_the_engine(
    policy: PolicyModel, flags: dict[str, object], found: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []
    monkeypatch.setattr(generation, "RolloutEngine", lambda _, options, *rest, **more: built.append(options))
    tokenizer = SimpleNamespace(end_token_ids=(3,), decode=None)
    groups = SimpleNamespace(shares_experts=False, tensor_group=None)
    generation.build_engine(tiny_config(**flags), policy, tokenizer, groups)
    assert [options.graphs for options in built] == [found]
