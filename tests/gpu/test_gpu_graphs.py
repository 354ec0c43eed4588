"""CUDA graphs of the decode step on one GPU. Run with: bash tests/run.sh tests/gpu/test_gpu_graphs.py

The twin of every engine rounds its batches to the same sizes and runs them eager: the same kernels on the same
shapes, so tokens and log-probs have to agree to the bit. A CPU shows the rest (tests/unit/inference/test_graphs.py).
"""

from __future__ import annotations

import logging

import pytest
import torch

from megatron_rl.inference.engine import EngineOptions, GraphOptions
from megatron_rl.inference.graphs import DecodeGraphs, graph_key_lengths, graph_sizes
from megatron_rl.inference.rollout_engine import RolloutEngine
from megatron_rl.models import rollout_ops
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.platform.groups import current_groups
from megatron_rl.quantization import dependent_launch
from megatron_rl.quantization.linears import QuantizedLinears
from megatron_rl.registry import RECIPES
from tests.support.generation import END, generate, letters, ragged_requests, tokens
from tests.support.ranks import run_ranks
from tests.support.tape import EagerRecorder
from tests.support.tiny import tiny_config, tiny_policy

pytestmark = pytest.mark.gpu

SLOTS, LONGEST = 24, 48
ON_GPU = [name for name in RECIPES.names() if name != "none"]
SAMPLINGS = {"plain": {}, "greedy": {"greedy": True}, "filtered": {"top_k": 5, "top_p": 0.9, "temperature": 0.7}}


def _engine(policy: PolicyModel, graphs: int | None) -> RolloutEngine:
    options = EngineOptions(SLOTS, LONGEST, graphs=graphs and GraphOptions(graphs))
    return RolloutEngine(policy, options, [END], letters, current_groups())


def _pair(policy: PolicyModel) -> tuple[RolloutEngine, RolloutEngine]:
    """With graphs, and its eager twin."""
    graphed, eager = _engine(policy, 16), _engine(policy, None)
    assert isinstance(graphed.runner.graphs, DecodeGraphs)
    sizes = graph_sizes(SLOTS, 16), graph_key_lengths(LONGEST)
    eager.runner.graphs = DecodeGraphs(eager.runner, policy, EagerRecorder(), *sizes)
    return graphed, eager


def _captures(caplog: pytest.LogCaptureFixture) -> int:
    assert "no CUDA graph could be captured" not in caplog.text
    return len([r for r in caplog.records if r.message.startswith("decode graphs:")])


def _requests(**sampling: object):
    """Twice as many samples as slots, of ragged lengths."""
    return ragged_requests(16, num_samples=3, **{"max_new_tokens": 30} | sampling)


@torch.no_grad()
def _update(policy: PolicyModel) -> None:
    """An AdamW step on random gradients, in place as the run's own."""
    optimizer = torch.optim.AdamW(policy.gpt.parameters(), lr=0.02)
    generator = torch.Generator(policy.device).manual_seed(1)
    for parameter in policy.gpt.parameters():
        parameter.grad = torch.randn(
            parameter.shape, generator=generator, device=parameter.device, dtype=parameter.dtype
        )
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("bf16", [False, True])
def test_a_replay_is_the_eager_step(one_rank, bf16, sampling, caplog):
    policy = tiny_policy(tiny_config(bf16=bf16))
    graphed, eager = _pair(policy)
    with caplog.at_level(logging.INFO):
        for seed in (1, 2):
            wanted = _requests(**SAMPLINGS[sampling])
            assert generate(policy, graphed, wanted, seed) == generate(policy, eager, wanted, seed)
    assert _captures(caplog) == 2, "one for each engine: graphs are kept between rollouts"


@pytest.mark.parametrize("recipe", ["none", "fp8", "int8"])
def test_grouped_experts_replayed_are_the_eager_step(one_rank, recipe, caplog):
    """bf16 from compute capability 9.0: torch's other grouped products read the sizes of the groups on the host."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("grouped products without a read by the host need compute capability 9.0")
    experts = {"num_experts": 4, "moe_router_topk": 3, "moe_ffn_hidden_size": 24, "add_qkv_bias": False}
    policy = tiny_policy(tiny_config(**experts, bf16=True))
    graphed, eager = _pair(policy)
    linears = QuantizedLinears(policy.gpt, RECIPES.get(recipe))
    for seed in (1, 2):
        with caplog.at_level(logging.INFO), linears.installed():
            assert generate(policy, graphed, _requests(), seed) == generate(policy, eager, _requests(), seed)
        _update(policy)
        linears.weights_changed()
    assert _captures(caplog) == 2


@pytest.mark.parametrize("recipe", ON_GPU)
def test_quantised_replays_see_a_requantisation(one_rank, recipe, caplog):
    chosen = RECIPES.get(recipe)
    problem = chosen.device_problem(torch.cuda.get_device_capability())
    if problem is not None:
        pytest.skip(problem)
    policy = tiny_policy(tiny_config(bf16=True))
    linears = QuantizedLinears(policy.gpt, chosen)
    graphed, eager = _pair(policy)
    with caplog.at_level(logging.INFO), linears.installed():
        before = generate(policy, graphed, _requests())
        assert before == generate(policy, eager, _requests())
        _update(policy)
        linears.refresh()
        after = generate(policy, graphed, _requests())
        assert after == generate(policy, eager, _requests())
    assert tokens(after) != tokens(before)
    assert _captures(caplog) == 2


@pytest.mark.parametrize("thin", [False, True])
@pytest.mark.parametrize("recipe", ["none", "fp8", "int8", "fp8_block"])
def test_dependent_launches_change_no_token(one_rank, recipe, thin, monkeypatch, caplog):
    """Captured steps whose kernels start while the one before ends, against steps whose kernels do not."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("programmatic dependent launch needs compute capability 9.0")
    monkeypatch.setattr(rollout_ops, "THIN_PRODUCTS", thin)
    policy, found = tiny_policy(tiny_config(bf16=True, hidden_size=256, ffn_hidden_size=512)), []
    linears = QuantizedLinears(policy.gpt, RECIPES.get(recipe))
    for is_on in (False, True):
        monkeypatch.setattr(dependent_launch, "DEPENDENT_LAUNCHES", is_on)
        engine = _engine(policy, 16)
        with caplog.at_level(logging.INFO), linears.installed():
            found.append([generate(policy, engine, _requests(), seed) for seed in range(1, 6)])
    assert found[0] == found[1]
    assert _captures(caplog) == 2


@pytest.mark.parametrize("bf16", [False, True])
def test_a_replay_after_an_optimizer_step_is_the_eager_step(one_rank, bf16, caplog):
    policy = tiny_policy(tiny_config(bf16=bf16))
    graphed, eager = _pair(policy)
    with caplog.at_level(logging.INFO):
        before = generate(policy, graphed, _requests())
        for _ in range(3):
            _update(policy)
            after = generate(policy, graphed, _requests())
            assert after == generate(policy, eager, _requests())
            assert tokens(after) != tokens(before)
            before = after
    assert _captures(caplog) == 2


def test_plain_and_quantised_rollouts_take_turns(one_rank, caplog):
    policy = tiny_policy(tiny_config(bf16=True))
    linears = QuantizedLinears(policy.gpt, RECIPES.get("int8"))
    graphed, eager = _pair(policy)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            with linears.installed():
                assert generate(policy, graphed, _requests()) == generate(policy, eager, _requests())
            assert generate(policy, graphed, _requests()) == generate(policy, eager, _requests())
    assert _captures(caplog) == 4


def test_memory_does_not_grow_over_rollouts(one_rank):
    policy = tiny_policy(tiny_config(bf16=True))
    engine = _engine(policy, 16)

    def cycle(seed: int) -> None:
        _update(policy)
        generate(policy, engine, _requests(), seed)

    def taken() -> tuple[int, int, int]:
        policy.gpt.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), total - free

    for seed in range(2):  # an update loads kernels of its own
        cycle(seed)
    allocated, reserved, used = taken()
    for seed in range(20):
        cycle(seed)
    after = taken()
    assert after[0] <= allocated + (1 << 20)
    assert after[1] <= reserved + (8 << 20)
    assert after[2] <= used + (16 << 20)


def test_graphs_dropped_give_their_memory_back_and_new_ones_can_be_captured(one_rank, caplog):
    policy = tiny_policy(tiny_config(bf16=True))
    graphed, eager = _pair(policy)
    with caplog.at_level(logging.INFO):
        generate(policy, graphed, _requests())
        parameter = policy.gpt.decoder.layers[0].mlp.linear_fc2.weight
        parameter.data = parameter.data * 1.5
        assert generate(policy, graphed, _requests()) == generate(policy, eager, _requests())
    assert "moved in memory" in caplog.text
    assert _captures(caplog) == 3


def test_a_capture_that_fails_leaves_an_engine_that_works(one_rank, caplog):
    """The host reads in the middle of a step: the run goes on eager, the allocator is in order, new graphs work."""
    policy = tiny_policy(tiny_config(bf16=True))
    graphed, eager = _pair(policy)
    (step,) = graphed.runner.graphs.parts

    def reads(*args: object) -> None:
        step(*args)
        graphed.runner.state.alive.any().item()

    graphed.runner.graphs.parts = [reads]
    assert generate(policy, graphed, _requests()) == generate(policy, eager, _requests())
    assert "no CUDA graph could be captured" in caplog.text
    torch.cuda.empty_cache()
    caplog.clear()
    another = _engine(policy, 16)
    assert generate(policy, another, _requests()) == generate(policy, eager, _requests())
    assert "no CUDA graph could be captured" not in caplog.text


@pytest.mark.parametrize("recipe", ["none", "fp8"])
def test_graphs_stay_over_memory_that_comes_back_at_the_same_addresses(one_rank, recipe):
    from megatron_rl.platform.reserved import CudaDriver, reserved_memory

    policy = tiny_policy(tiny_config(bf16=True))
    driver = CudaDriver(policy.device)
    if not driver.can_reserve:
        pytest.skip("this GPU has no virtual memory management")
    linears = QuantizedLinears(policy.gpt, RECIPES.get(recipe), offloadable=reserved_memory(driver))
    graphed, eager = _pair(policy)
    cache = graphed.cache_tensors
    held = reserved_memory(driver)(cache)
    addresses = [tensor.data_ptr() for tensor in cache]
    with linears.installed():
        assert generate(policy, graphed, _requests()) == generate(policy, eager, _requests())
        replays = list(graphed.runner.graphs.recorded.values())
        for _ in range(3):
            torch.cuda.synchronize()
            free = torch.cuda.mem_get_info()[0]
            held.release()
            linears.release()
            assert torch.cuda.mem_get_info()[0] >= free + held.size
            torch.full((2 * held.size,), 255, dtype=torch.uint8, device="cuda")  # others have it meanwhile
            torch.cuda.empty_cache()
            _update(policy)
            held.restore()
            linears.refresh()
            assert not any(tensor.view(torch.uint8).any() for tensor in cache)
            assert generate(policy, graphed, _requests()) == generate(policy, eager, _requests())
    assert [tensor.data_ptr() for tensor in cache] == addresses
    assert all(a is b for a, b in zip(replays, graphed.runner.graphs.recorded.values(), strict=True))


@pytest.mark.parametrize("recipe", ["none", "fp8"])
@pytest.mark.parametrize("chunks", [None, 2])
def test_stages_replayed_are_the_eager_steps(recipe, chunks):
    """A graph for each chunk of layers; the other lane's messages are under way while one captures."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    case = {"flags": {"bf16": True}, "recipe": recipe}
    cases = {"graphs": case | {"captures": 16}, "eager": case | {"twin": True}}
    stages = {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": chunks}
    for rank in run_ranks("tests.distributed.stage_programs:roll_out", 2, parallel=stages, cases=cases):
        for what in ("tokens 1", "logprobs 1", "tokens 2", "logprobs 2"):
            assert rank["graphs"][what] == rank["eager"][what]
        assert rank["graphs"]["recorded"] > 0
