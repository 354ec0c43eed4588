"""--deterministic-mode: strict algorithms around the trainer alone, and no operation there that a GPU refuses in it."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core.optimizer import ChainedOptimizer
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl import loop, supervised
from megatron_rl.config.rl_config import RLConfig
from megatron_rl.models import gpt
from megatron_rl.models.attention.backends import sdpa
from megatron_rl.models.delta_rule import Chunks, DeltaInputs, delta_rule
from megatron_rl.models.expert_ops import ordered_dispatch
from megatron_rl.platform import Platform, current_platform
from megatron_rl.platform.cuda import strict_algorithms
from megatron_rl.platform.groups import ParallelGroups, initialize, shut_down
from megatron_rl.registry import ADVANTAGES, CORRECTIONS, LOSSES
from megatron_rl.run.memory import phases
from megatron_rl.run.preflight.trial import call_once
from tests.support.launches_counted import KERNELS, Kernel
from tests.support.ranks import run_ranks
from tests.support.tiny import DELTA_EXPERTS, LATENT_EXPERTS, MIXED, SINKS, WINDOWS, tiny_config
from tests.support.toy import toy_run

REFUSED = {
    "AvgPool3d": ["avg_pool3d_backward"],
    "AdaptiveAvgPool2d": ["_adaptive_avg_pool2d_backward"],
    "AdaptiveAvgPool3d": ["_adaptive_avg_pool3d_backward"],
    "AdaptiveMaxPool2d": ["adaptive_max_pool2d_backward"],
    "FractionalMaxPool2d": ["fractional_max_pool2d_backward"],
    "FractionalMaxPool3d": ["fractional_max_pool3d_backward"],
    "MaxUnpool1d": ["max_unpool2d"],
    "MaxUnpool2d": ["max_unpool2d"],
    "MaxUnpool3d": ["max_unpool3d"],
    "interpolate": [f"upsample_{kind}_backward" for kind in ("linear1d", "bilinear2d", "bicubic2d", "trilinear3d")],
    "ReflectionPad1d": ["reflection_pad1d_backward"],
    "ReflectionPad2d": ["reflection_pad2d_backward"],
    "ReflectionPad3d": ["reflection_pad3d_backward"],
    "NLLLoss": ["nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward"],
    "CTCLoss": ["_ctc_loss_backward", "_cudnn_ctc_loss"],
    "EmbeddingBag": ["_embedding_bag_dense_backward"],
    "put_": ["put", "put_"],
    "histc": ["histc"],
    "bincount": ["bincount"],
    "median": ["median", "nanmedian"],
    "grid_sample": ["grid_sampler_2d_backward", "grid_sampler_3d_backward"],
    "cumsum": ["cumsum", "cumsum_"],
    "scatter_reduce": ["scatter_reduce", "scatter_reduce_"],
    "resize_": [],  # of quantised tensors
}
"""What torch's documentation says to raise in strict mode on CUDA, and the operators that it becomes."""
UNSAFE = {
    "kthvalue",  # raises too, though the list has it not
    "embedding_dense_backward",  # megatron-core: "F.embedding currently has a non-deterministic backward function"
    "_scaled_dot_product_cudnn_attention_backward", "_cudnn_attention_backward",
    *(name for names in REFUSED.values() for name in names),
}  # fmt: skip


def test_the_table_has_all_that_torch_refuses() -> None:
    text = torch.use_deterministic_algorithms.__doc__.split("operations will throw a")[1].split("In addition")[0]
    assert {name.split(".")[-1] for name in re.findall(r":(?:class|func):`([\w.]+)`", text)} - {"RuntimeError"} == {
        *REFUSED
    }


class Recorder(TorchDispatchMode):
    """Counts operators in strict mode and outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.strict, self.free = Counter(), Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen = self.strict if torch.are_deterministic_algorithms_enabled() else self.free
        name = function.overloadpacket.__name__
        if name in ("cumsum", "cumsum_") and not args[0].is_floating_point():
            name = "cumsum of whole numbers"
        elif name.startswith("scatter_reduce") and args[4] != "prod":
            name = "scatter_reduce that is not a product"
        seen[name] += 1
        return function(*args, **kwargs or {})

    def refused(self) -> set[str]:
        return UNSAFE & self.strict.keys()


FEW = {"grpo_prompts_per_step": 2, "grpo_group_size": 2, "rl_max_new_tokens": 4}
CASES = {
    "dense, reference, two updates": {"grpo_kl_beta": 0.1, "grpo_iterations": 2, "grpo_entropy_term_weight": 0.01},
    "windows, supervised": WINDOWS | {"perform_rl_step": False, "global_batch_size": 4},
    "sinks and experts, bf16": SINKS | {"bf16": True},
    "experts, router replay": MIXED | {"rl_router_replay": True},
    "latent attention": LATENT_EXPERTS,
    "DeltaNet": DELTA_EXPERTS,
    "critic": {"rl_advantage": "gae", "rl_critic_lr": 1e-2, "grpo_kl_beta": 0.1, "rl_kl_in_reward": True},
    "LoRA, shared prompts": {"lora_rank": 4, "rl_share_prompts": True},
    "fused output layer, clipped": {"rl_fused_output_layer": True, "clip_grad": 0.1, "bf16": True},
    "recomputed, LayerNorm": {
        "normalization": "LayerNorm", "recompute_granularity": "full", "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "aligned": {"rl_rollout_quantization": "int8", "rl_train_forward": "quantized", "rl_train_backward": "quantized"},
}  # fmt: skip


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    return claim_cuda(monkeypatch)


def claim_cuda(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Build models for a GPU, and let all tensors say in updates that they lie on one: our kernels are counted."""
    from triton.runtime.jit import KernelInterface

    launched: Counter[str] = Counter()
    build, strict, norm = gpt.build_transformer_config, phases.strict_algorithms, ChainedOptimizer.get_grad_norm

    def build_for_a_gpu(config: RLConfig, own: Platform) -> Any:
        settings = build(config, own)
        settings.deterministic_mode = config.kernels.is_deterministic
        return settings

    @contextlib.contextmanager
    def strict_on_a_gpu() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch, strict():
            for module in [importlib.import_module(name) for name in KERNELS]:  # all before the first is patched
                for name, value in vars(module).items():
                    if isinstance(value, KernelInterface):
                        patch.setattr(module, name, Kernel(name, launched))
            patch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
            patch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
            yield

    def measured(optimizer: ChainedOptimizer) -> float:
        norm(optimizer)
        return 1.0  # what kernels would have written is any number, and the update must not be skipped for it

    monkeypatch.setattr(ChainedOptimizer, "get_grad_norm", measured)
    monkeypatch.setattr(gpt, "build_transformer_config", build_for_a_gpu)
    monkeypatch.setattr(phases, "strict_algorithms", strict_on_a_gpu)
    monkeypatch.setattr(sdpa, "EXPLICIT_LENGTH", 0)  # torch's own kernels, as on a GPU
    return launched


def recorded(groups: ParallelGroups, **flags: object) -> Recorder:
    """A step of a run."""
    run = toy_run(tiny_config(groups.world_size, **FEW | flags), groups)
    with Recorder() as recorder:
        (loop.rl_step if run.config.training.perform_rl_step else supervised.supervised_step)(run, 1)
    run.closing.close()
    return recorder


@pytest.mark.parametrize("case", CASES)
def test_no_operator_of_a_step_is_refused(one_rank: ParallelGroups, on_cuda: Counter[str], case: str) -> None:
    recorder = recorded(one_rank, deterministic_mode=True, **CASES[case])
    assert not recorder.refused()
    assert recorder.strict["mm"] and recorder.strict["_fused_adamw_"]
    assert on_cuda["gradient_kernel"], "the backward pass of the log-probs is in strict mode"
    if "num_experts" in CASES[case]:
        assert on_cuda["combine_kernel"], "megatron's dispatcher adds up by our kernel"
    if "perform_rl_step" not in CASES[case]:
        assert recorder.free["mm"], "the rollouts are not"


LAYOUTS = {
    "tensor and sequence parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "context parallel": {"context_parallel_size": 2},
    "expert parallel": {"expert_model_parallel_size": 2, "num_experts": 4, "moe_ffn_hidden_size": 24},
    "stages": {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2, "num_layers": 4},
    "replicas, overlapped": {
        "use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True, "bf16": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_operator_of_two_ranks_is_refused(layout: str) -> None:
    reports = run_ranks("tests.unit.trainer.test_deterministic:a_step_of_a_rank", 2, flags=LAYOUTS[layout])
    assert reports == [{"refused": [], "products": True}] * 2


def a_step_of_a_rank(flags: dict[str, Any]) -> dict[str, Any]:
    config = tiny_config(2, **FEW | flags | {"deterministic_mode": True})
    groups = initialize(config.parallel, current_platform())
    with pytest.MonkeyPatch.context() as patch:
        claim_cuda(patch)
        recorder = recorded(groups, deterministic_mode=True, **flags)
    shut_down()
    return {"refused": sorted(recorder.refused()), "products": recorder.strict["mm"] > 0}


def test_without_the_mode_a_gpu_would_refuse_some(one_rank: ParallelGroups, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the mode replaces is there otherwise: the recorder sees it."""
    recorder = recorded(one_rank, **DELTA_EXPERTS)
    assert not recorder.strict
    assert {"cumsum", "embedding_dense_backward"} <= recorder.free.keys()


@pytest.mark.parametrize(
    ("field", "name"),
    [
        *(("rl_policy_loss", name) for name in LOSSES.names()),
        *(("rl_correction", name) for name in CORRECTIONS.names()),
        *(("rl_advantage", name) for name in ADVANTAGES.names()),
    ],
)
def test_no_operator_of_an_algorithm_is_refused(field: str, name: str) -> None:
    with strict_algorithms(), Recorder() as recorder:
        call_once(tiny_config(**{field: name}), field)
    assert recorder.strict and not recorder.refused()


# -- the context ---------------------------------------------------------------------------------


def test_strict_mode_ends_with_its_block() -> None:
    memory = torch.utils.deterministic
    for before in ("default", "warn"):
        torch.set_deterministic_debug_mode(before)
        was = torch.get_deterministic_debug_mode(), memory.fill_uninitialized_memory
        try:
            with pytest.raises(KeyError), strict_algorithms():
                assert torch.get_deterministic_debug_mode() == 2
                assert not memory.fill_uninitialized_memory
                raise KeyError
            assert (torch.get_deterministic_debug_mode(), memory.fill_uninitialized_memory) == was
        finally:
            torch.set_deterministic_debug_mode("default")


@pytest.mark.parametrize("flags", [{}, {"deterministic_mode": True}])
def test_only_updates_are_strict(one_rank: ParallelGroups, request: pytest.FixtureRequest, flags: dict) -> None:
    is_strict = torch.are_deterministic_algorithms_enabled
    on_cpu = toy_run(tiny_config(**FEW | flags), one_rank)
    with on_cpu.phases.update():
        assert not is_strict(), "a CPU repeats its bits anyway"
    on_cpu.closing.close()
    request.getfixturevalue("on_cuda")
    run = toy_run(tiny_config(**FEW | flags), one_rank)
    for enter in (run.phases.rollouts, run.phases.save):
        with enter():
            assert not is_strict()
    with run.phases.update():
        assert is_strict() is bool(flags)
    assert not is_strict()
    run.closing.close()


def test_megatron_hears_of_it_on_a_gpu_alone() -> None:
    on_gpu = Platform(torch.device("cuda", 0), "nccl")
    for flags in ({}, {"deterministic_mode": True}, {"batch_invariant_mode": True, "bf16": True}):
        config = tiny_config(**flags)
        assert gpt.build_transformer_config(config, on_gpu).deterministic_mode is bool(flags)
        assert not gpt.build_transformer_config(config, current_platform()).deterministic_mode


def test_decays_add_up_alike() -> None:
    """In strict mode as a product with a triangle of ones: outputs, states and gradients of fp64, up to rounding."""
    lengths, draw = (70, 3), torch.Generator().manual_seed(1)
    chunks, found = Chunks.of(lengths, 3, torch.device("cpu")), []
    heads = [torch.randn(sum(lengths), 2, 4, generator=draw, dtype=torch.float64) for _ in range(3)]
    strength, decay = torch.rand(2, sum(lengths), 2, generator=draw, dtype=torch.float64)
    for block in (contextlib.nullcontext(), strict_algorithms()):
        given = [each.clone().requires_grad_() for each in (*(0.3 * each for each in heads), strength, -decay)]
        with block:
            results = delta_rule(DeltaInputs(*given), chunks)
            sum(each.square().sum() for each in results).backward()
        found.append([*results, *(each.grad for each in given)])
    for own, wanted in zip(*found, strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-9, atol=1e-12)


# -- experts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_add_up_as_megatrons_dispatcher(dtype: torch.dtype) -> None:
    """Values and gradients to the bit, where a CPU adds in the experts' order, too; bf16 gradients are rounded once."""
    from megatron.core.transformer.moe import token_dispatcher

    tokens, experts, top_k, width = 9, 5, 3, 16
    draw = torch.Generator().manual_seed(1)
    chosen = torch.rand(tokens, experts, generator=draw).argsort(1)[:, :top_k]
    routing = torch.zeros(tokens, experts, dtype=torch.bool).scatter(1, chosen, True)
    values = torch.randn(tokens, width, generator=draw).to(dtype)
    weights = torch.randn(tokens * top_k, width, generator=draw).to(dtype)
    towards = torch.randn(tokens, width, generator=draw).to(dtype)
    megatrons = token_dispatcher.permute, token_dispatcher.unpermute

    def through(into: torch.Tensor) -> list[torch.Tensor]:
        shares = torch.where(routing, 0.5, 0.0).requires_grad_()
        rows, own, order, *_ = token_dispatcher.permute(into, routing, shares, num_out_tokens=len(weights))
        summed = token_dispatcher.unpermute(rows * weights, order, into.shape, routing_map=routing)
        (summed * towards).sum().backward()
        assert own.shape == order.shape == (tokens * top_k,)
        return [rows, summed, into.grad]

    theirs = through(values.clone().requires_grad_())
    with ordered_dispatch():
        ours = through(values.clone().requires_grad_())
    assert (token_dispatcher.permute, token_dispatcher.unpermute) == megatrons
    near = {"rtol": 0, "atol": 0} if dtype == torch.float32 else {"rtol": 2**-6, "atol": 2**-6}
    for own, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, wanted, **near)
    assert torch.equal(ours[1], theirs[1])
