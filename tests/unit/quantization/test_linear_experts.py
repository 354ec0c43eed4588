"""Quantised copies of a mixture of experts, as megatron-core builds it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as functional
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.platform.megatron import VERSION
from megatron_rl.quantization.audit import audit, observe_linears
from megatron_rl.quantization.copies import QuantizedLinear
from megatron_rl.quantization.linears import QuantizedLinears, parallel_linears
from megatron_rl.registry import RECIPES

pytestmark = pytest.mark.usefixtures("one_rank")


class TestExperts:
    """A mixture of experts as megatron-core builds it, in as much of a model as is looked at."""

    @pytest.fixture
    def mixture(self) -> MoELayer:
        config = TransformerConfig(
            num_layers=1, hidden_size=32, num_attention_heads=4, ffn_hidden_size=48, moe_ffn_hidden_size=48,
            num_moe_experts=4, moe_grouped_gemm=False, moe_router_topk=2, moe_token_dispatcher_type="allgather",
            moe_router_load_balancing_type="none", gated_linear_unit=True, activation_func=functional.silu,
            add_bias_linear=False, use_cpu_initialization=True, init_method_std=0.2, bias_activation_fusion=False,
            gradient_accumulation_fusion=False,
        )  # fmt: skip
        spec = get_moe_module_spec(use_te=False, num_experts=4, moe_grouped_gemm=False)
        torch.manual_seed(0)
        # A `ModuleSpec`, or from 0.17 on a partial.
        mixture = build_module(spec, config=config) if VERSION < (0, 17) else spec(config=config)
        return mixture.eval()

    @pytest.fixture
    def model(self, mixture: MoELayer) -> torch.nn.Module:
        layer = torch.nn.Module()
        layer.layer_number, layer.mlp = 1, mixture
        model = torch.nn.Module()
        model.decoder = torch.nn.Module()
        model.decoder.layers = torch.nn.ModuleList([layer])
        model.config = mixture.config
        return model

    def forward(self, mixture: MoELayer) -> torch.Tensor:
        x = torch.randn(12, 2, 32, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            return mixture(x)[0]

    def test_every_expert_is_found_and_the_router_is_not(self, model: torch.nn.Module) -> None:
        wanted = [
            f"layers.0.mlp.experts.local_experts.{expert}.linear_fc{number}" for expert in range(4) for number in (1, 2)
        ]
        assert list(parallel_linears(model)) == wanted

    @pytest.mark.parametrize("recipe", ["int8", "fp8"])
    def test_they_run_quantised(self, model: torch.nn.Module, mixture: MoELayer, recipe: str) -> None:
        plain = self.forward(mixture)
        linears = QuantizedLinears(model, RECIPES.get(recipe))
        with linears.installed():
            quantised = self.forward(mixture)
        assert all(layer.calls for layer in linears.layers), "an expert ran by itself"
        assert torch.equal(self.forward(mixture), plain)
        assert 0.001 < (quantised - plain).norm() / plain.norm() < 0.1

        with written_out(linears):
            assert torch.allclose(self.forward(mixture), quantised, atol=1e-5)

    def test_an_expert_that_saw_zeros_alone_is_not_judged(self, model: torch.nn.Module, mixture: MoELayer) -> None:
        """They are what ranks without tokens join in with; full precision and quantised give zeros."""
        linears = QuantizedLinears(model, RECIPES.get("int8"))
        with linears.installed(), observe_linears(model, channels=False) as seen, torch.no_grad():
            mixture(torch.zeros(12, 2, 32))
        rows = audit(model, linears, seen)
        assert len(rows) == 8
        assert all(row.agrees and row.calls == 0 for row in rows)

    def test_an_expert_nobody_is_sent_to_keeps_its_smoothing(self, model: torch.nn.Module, mixture: MoELayer) -> None:
        with torch.no_grad():  # everybody to experts 0 and 1
            mixture.router.weight.zero_()
        linears = QuantizedLinears(model, RECIPES.get("int8_smooth"))
        with observe_linears(model, channels=True) as seen:
            self.forward(mixture)
        unused = [name for name, one in seen.items() if not one.calls]
        linears.calibrate({name: one.channel_amax for name, one in seen.items()})
        assert len(unused) == 4
        for layer in linears.layers:
            assert layer.weight.smoothing.isfinite().all()
            assert (layer.name in unused) == bool((layer.weight.smoothing == 1).all())
        with linears.installed():
            assert self.forward(mixture).isfinite().all()


@contextlib.contextmanager
def written_out(linears: QuantizedLinears) -> Iterator[None]:
    """Inside, every layer is the product of its dequantised numbers, spelt out."""

    def spelt_out(layer: QuantizedLinear) -> Callable:
        weight = linears.recipe.dequantize(layer.weight)
        return lambda x, *_: (linears.recipe.round_trip(x, layer.weight) @ weight.t(), None)

    for layer in linears.layers:
        layer.module.forward = spelt_out(layer)
    yield
    for layer in linears.layers:
        del layer.module.forward
