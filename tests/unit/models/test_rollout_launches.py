"""How many kernels a layer launches in a decode step: beside a few microseconds of work each costs about two."""

from __future__ import annotations

import importlib.util
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.inference.sampler import SamplingModes
from megatron_rl.models import rollout_ops
from megatron_rl.models.attention.backend import NewTokens
from megatron_rl.models.rollout import RolloutForward
from megatron_rl.models.rollout_ops import RolloutOps
from megatron_rl.platform import current_platform
from megatron_rl.platform.groups import initialize, shut_down
from megatron_rl.quantization.copies import QuantizedLinear, QuantizedStack, StackedLinear
from megatron_rl.quantization.linears import parallel_linears
from megatron_rl.quantization.recipe import Recipe
from megatron_rl.registry import RECIPES
from tests.support.launches_counted import counted
from tests.support.meta import META, meta_context, meta_runner
from tests.support.ranks import run_ranks
from tests.support.tiny import tiny_config, tiny_policy
from tools.benchmark.on_paper.decode import BESIDE, DENSE, EXPERTS

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")

MODELS = {
    "biased": {},  # Qwen2.5
    "normed": {"qk_layernorm": True, "add_qkv_bias": False},  # Qwen3
    "experts": {
        "qk_layernorm": True, "add_qkv_bias": False, "num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 32,
    },  # Qwen3-30B-A3B
}  # fmt: skip


def launches(
    layers: int, model: str, recipe: str, stored: torch.dtype | None, ops: RolloutOps, ranks: int = 1
) -> Counter[str]:
    policy = tiny_policy(tiny_config(ranks, bf16=True, num_layers=layers, **MODELS[model] | parallel(ranks)))
    context = meta_context(policy, "triton_paged", ops, stored)
    forward = RolloutForward(policy, context)
    token, positions = torch.zeros(6, dtype=torch.int64, device=META), torch.zeros(1, 6, dtype=torch.int64, device=META)
    if recipe != "none":
        install_copies(policy.gpt, RECIPES.get(recipe))
    with torch.inference_mode(), counted() as seen:
        context.begin_decode(positions, 48)
        context.next_step()
        forward.chunk(0, token, positions[0])
    return seen


def parallel(ranks: int) -> dict[str, int]:
    return {"tensor_model_parallel_size": ranks}


def install_copies(gpt: torch.nn.Module, recipe: Recipe) -> None:
    """Without numbers, which `QuantizedLinears` would look at."""
    names: dict[torch.nn.Module, list[str]] = {}
    for name, module in parallel_linears(gpt).items():
        names.setdefault(module, []).append(name)
    for module, (first, *others) in names.items():
        is_stack = isinstance(module, StackedLinear)
        copy = QuantizedStack([first, *others], module, recipe) if is_stack else QuantizedLinear(first, module, recipe)
        copy.install()


def of_a_layer(*case: object, ranks: int = 1) -> Counter[str]:
    """What a step launches once drops out."""
    more, less = (launches(layers, *case, ranks=ranks) for layers in (3, 2))
    return more - less


def on_ranks(size: int) -> dict[str, dict[str, int]]:
    """Of each recipe, in a process of `run_ranks`."""
    initialize(tiny_config(size, **parallel(size)).parallel, current_platform())
    found = {name: of_a_layer("biased", name, None, RolloutOps(fused=True), ranks=size) for name in RECIPES.names()}
    shut_down()
    return found


@pytest.mark.parametrize("model", ["biased", "normed"])
@pytest.mark.parametrize(
    ("recipe", "stored", "most"),
    [
        ("none", None, DENSE["bf16"]),
        ("fp8", None, DENSE["fp8"]),
        ("fp8_block", None, DENSE["fp8"]),
        ("int8", None, DENSE["fp8"]),
        ("int8_smooth", None, DENSE["fp8"]),
        ("fp8", torch.float8_e4m3fn, DENSE["fp8"]),
        ("none", torch.float8_e4m3fn, DENSE["bf16"]),
    ],
)
def test_a_layer_launches_few_kernels(
    one_rank: object, model: str, recipe: str, stored: torch.dtype | None, most: int
) -> None:
    seen = of_a_layer(model, recipe, stored, RolloutOps(fused=True))
    assert 8 <= seen.total() <= most, seen
    assert "add" not in seen, "the kernel behind the projection adds its bias"


@pytest.mark.parametrize(
    ("recipe", "most"), [("none", EXPERTS["bf16"]), ("fp8", EXPERTS["fp8"]), ("int8", EXPERTS["fp8"])]
)
def test_a_layer_of_experts_launches_few_kernels(one_rank: object, recipe: str, most: int) -> None:
    """Three of them choose experts, bring tokens there, and add up what comes back; codes are made on the way."""
    seen = of_a_layer("experts", recipe, None, RolloutOps(fused=True))
    assert 12 <= seen.total() <= most, seen
    assert [seen[f"{name}_kernel"] for name in ("route", "dispatch", "combine")] == [1, 1, 1]
    assert seen["rows_kernel"] == (recipe != "none"), "the projection's input is attention's; all others come quantised"
    eager = of_a_layer("experts", recipe, None, RolloutOps(fused=False))
    assert eager.total() >= 30, eager


def test_thin_products_of_bf16_are_switched_on(one_rank: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """All linears of the tiny model are narrow."""
    monkeypatch.setattr(rollout_ops, "THIN_PRODUCTS", True)
    seen = of_a_layer("biased", "none", None, RolloutOps(fused=True))
    assert seen["thin_kernel"] == 4 and not {"mm", "matmul"} & seen.keys()


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("model", ["biased", "normed"])
def test_a_prompt_has_norms_and_rotations_of_decode_steps(one_rank: object, model: str, cached: bool) -> None:
    """As training has them (`test_training_launches.py`): with other kernels the same token had other bits."""
    policy = tiny_policy(tiny_config(bf16=True, num_layers=2, **MODELS[model]))
    context = meta_context(policy, "triton_paged", RolloutOps(fused=True))
    places = torch.zeros(6, dtype=torch.int64, device=META)
    new = NewTokens(places[:2], (2, 4), torch.zeros(3, dtype=torch.int32, device=META), places, 48)
    with torch.inference_mode(), counted() as seen:
        context.begin_prompts(new, cached)
        seen.clear()
        RolloutForward(policy, context).chunk(0, places, places)
    assert (seen["add_norm_kernel"], seen["rotate_store_kernel"]) == (5, 2), seen
    assert not {"rms_norm", "addcmul", "cat"} & seen.keys(), seen


def test_the_mode_is_known_to_linears(one_rank: object) -> None:
    layer = tiny_policy(tiny_config(bf16=True, batch_invariant_mode=True)).layers[0]
    assert layer.mlp.linear_fc1.config.batch_invariant_mode, "thin products have other bits than training"


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, True),
        ({"rows": 65}, False),
        ({"columns": 8193}, False),
        ({"is_expert": True}, False),
        ({"batch_invariant_mode": True}, False),
        ({"dtype": torch.float32}, False),
        ({"shape": (8, 1, 32)}, False),
        ({"switched": False}, False),
        ({"gradients": True}, False),
    ],
)
def test_what_a_thin_product_is_for(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], wanted: bool
) -> None:
    """Few rows of a rollout and a narrow weight; never where rollouts need the bits of training."""
    monkeypatch.setattr(rollout_ops, "THIN_PRODUCTS", changes.get("switched", True))
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    config = SimpleNamespace(batch_invariant_mode=changes.get("batch_invariant_mode", False))
    weight = torch.empty(changes.get("columns", 8192), 32, device=META)
    linear = SimpleNamespace(weight=weight, config=config, is_expert=changes.get("is_expert", False))
    shape = changes.get("shape", (changes.get("rows", 64), 32))
    tokens = torch.empty(shape, dtype=changes.get("dtype", torch.bfloat16), device=META)
    with torch.set_grad_enabled(changes.get("gradients", False)):
        assert rollout_ops.is_thin(linear, tokens) is wanted


@pytest.mark.parametrize(
    ("switched", "in_rollout", "capability"), [(True, True, 9), (False, True, 9), (True, False, 9), (True, True, 8)]
)
def test_only_rollouts_on_hopper_launch_dependent_kernels(
    monkeypatch: pytest.MonkeyPatch, switched: bool, in_rollout: bool, capability: int
) -> None:
    from megatron_rl.quantization import dependent_launch

    monkeypatch.setattr(dependent_launch, "DEPENDENT_LAUNCHES", switched)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (capability, 0))
    with torch.inference_mode(in_rollout):
        given = dependent_launch.dependent()
    wanted = switched and in_rollout and capability == 9
    assert given == ({"PDL": True, "launch_pdl": True} if wanted else {})


def test_the_count_sees_what_is_fused(one_rank: object) -> None:
    fused, eager = (of_a_layer("normed", "fp8", None, ops) for ops in map(RolloutOps, (True, False)))
    assert eager.total() >= fused.total() + 10, (eager, fused)
    assert fused["rows_kernel"] == 1, "the projection's input is attention's; all others come quantised"
    assert eager["rows_kernel"] == 4
    assert not any(name in fused for name in ("cat", "index_copy_", "silu", "_fused_rms_norm", "rms_norm", "pow"))


def test_tensor_parallel_ranks_exchange_what_bf16_does() -> None:
    """All inputs but attention's output come quantised, with the rank's own scales, and two sums a layer follow."""
    found, other = run_ranks("tests.unit.models.test_rollout_launches:on_ranks", 2, size=2)
    assert found == other
    for recipe, seen in found.items():
        collectives = seen.pop("all_reduce")
        assert collectives == 2, (recipe, seen)
        assert sum(seen.values()) <= DENSE["bf16" if recipe == "none" else "fp8"], (recipe, seen)
        assert "add" not in seen, (recipe, seen)


def test_what_a_step_launches_beside_its_layers(one_rank: object) -> None:
    """Kernels before them for positions and numbers, and for places; one behind for all that is kept of the draw."""
    more, less = (whole_step(layers) for layers in (3, 2))
    layer = more - less
    beside = less - layer - layer
    assert beside["ahead_kernel"] == beside["cells_kernel"] == beside["record_kernel"] == 1
    assert beside.total() <= BESIDE, beside


def whole_step(layers: int) -> Counter[str]:
    runner = meta_runner(tiny_policy(tiny_config(bf16=True, num_layers=layers)), "triton_paged")
    with torch.inference_mode(), counted() as seen:
        list(runner.decode(6, 48, 1, SamplingModes(tempered=True)))
    return seen
