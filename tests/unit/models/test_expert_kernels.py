"""The kernels that send tokens to experts and back: in Triton's interpreter here, compiled in tests/gpu.

The interpreter must be switched on before Triton's import, so a process of its own runs `ExpertChecks`. It truncates
to bf16 where a GPU rounds, so sums in bf16 may be a unit in the last place off there.
"""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as functional
from megatron.core.transformer.moe.moe_utils import unpermute

from megatron_rl.models.expert_ops import Dispatched, ExpertOps, PermutedRows, activated
from megatron_rl.quantization import formats
from megatron_rl.quantization.recipe import Packing
from tests.support.interpreter import INTERPRETED, mend, run_interpreted
from tests.unit.models.test_rollout_kernels import check_packed, near, randn

EXACT = {"rtol": 1e-6, "atol": 1e-6}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
SHAPES = {"tiny": (3, 4, 2), "Qwen3-30B-A3B": (5, 128, 8), "odd": (7, 60, 6), "one token, all experts": (1, 8, 8)}
"""Tokens, experts, experts a token."""


def router_of(experts: int, top_k: int, over_all: bool = False, bias: torch.Tensor | None = None) -> SimpleNamespace:
    """Its logits are the tokens."""
    settings = SimpleNamespace(
        moe_router_pre_softmax=over_all, moe_router_score_function="softmax", moe_router_topk_scaling_factor=None
    )
    eye, plain = torch.eye(experts), 0.0 if bias is None else bias
    return SimpleNamespace(topk=top_k, config=settings, weight=eye, bias=bias, gating=lambda x: x.float() + plain)


def dispatched(ops: ExpertOps, chosen: torch.Tensor, experts: int, tokens: torch.Tensor) -> tuple[Dispatched, int]:
    """And how many rows are written."""
    shares = 1 / (1 + torch.arange(chosen.numel(), dtype=torch.float32)).view(chosen.shape)
    # As halves of one tensor, which ranks exchange.
    halves = torch.cat((shares, chosen.float()), 1).to(tokens.device).chunk(2, 1)
    given = halves[0], halves[1].to(chosen.dtype)
    made = ops.dispatch(tokens, *given, experts, torch.nn.Identity())
    return made, int(made.ends[-1])


class ExpertChecks:
    """Subclasses name the device."""

    device: str
    low: dict[str, float]
    """Tolerance of sums in bf16."""
    paged: str
    """The attention backend of whole rollouts."""

    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("over_all", [False, True])
    @pytest.mark.parametrize("biased", [False, True])
    def test_the_choice(self, shape: str, over_all: bool, biased: bool):
        tokens, experts, top_k = SHAPES[shape]
        logits, bias = 3 * randn(tokens, experts), randn(experts, seed=1) if biased else None
        shares, chosen = ExpertOps(fused=False).route(logits, router_of(experts, top_k, over_all, bias))
        there = router_of(experts, top_k, over_all, None if bias is None else bias.to(self.device))
        there.weight = there.weight.to(self.device)
        own_shares, own = ExpertOps(fused=True).route(logits.to(self.device), there)
        assert torch.equal(own.cpu().long(), chosen)
        near(own_shares, shares, EXACT)

    def test_of_equal_logits_the_first(self):
        from megatron_rl.models.expert_kernels import route

        logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0], [-1.0, -2.0, -1.0, -1.0, -3.0]], device=self.device)
        assert route(logits, None, 3, False)[1].tolist() == [[1, 3, 2], [0, 2, 3]]

    def test_logits_that_are_no_numbers_choose_experts_that_there_are(self):
        from megatron_rl.models.expert_kernels import route

        logits = torch.full((4, 6), float("nan"), device=self.device)
        logits[1], logits[2], logits[3, 4] = float("inf"), float("-inf"), 1.0
        chosen = route(logits, None, 3, False)[1].cpu()
        assert ((chosen >= 0) & (chosen < 6)).all()
        assert all(len(set(row)) == 3 for row in chosen.tolist())

    @DTYPES
    @pytest.mark.parametrize("sorted_by_torch", [False, True])
    @pytest.mark.parametrize(("shape", "here"), [("tiny", 4), ("odd", 60), ("odd", 13), ("Qwen3-30B-A3B", 4)])
    def test_there_and_back(self, monkeypatch, shape, here, sorted_by_torch, dtype):
        """The eager rows to the bit, and sums in the same order; ``here``: the others are another rank's experts."""
        from megatron_rl.models import expert_kernels

        monkeypatch.setattr(expert_kernels, "MOST_COUNTED", 0 if sorted_by_torch else 4096)
        count, experts, top_k = SHAPES[shape]
        tokens, chosen = randn(count, 100, dtype=dtype), randn(count, experts, seed=2).topk(top_k, 1).indices
        chosen = chosen.where(chosen < here, here)
        eager, fused = ExpertOps(fused=False), ExpertOps(fused=True)
        wanted, rows = dispatched(eager, chosen, here, tokens)
        found, written = dispatched(fused, chosen, here, tokens.to(self.device))
        assert (written, found.ends.tolist()) == (rows, wanted.ends.tolist())
        assert found.rows.shape == wanted.rows.shape
        assert torch.equal(found.rows[:rows].cpu(), wanted.rows[:rows])
        assert torch.equal(found.shares[:rows].cpu(), wanted.shares[:rows])
        output = randn(len(wanted.rows), 1100, seed=3, dtype=dtype)
        output[rows:] = float("nan")  # what no token has is read by none
        summed = fused.combine(output.to(self.device), found, count)
        wanted_sum = eager.combine(output, wanted, count)
        if dtype == torch.float32:
            assert torch.equal(summed.cpu(), wanted_sum)
        near(summed, wanted_sum, self.low)

    @DTYPES
    @pytest.mark.parametrize("shape", ["tiny", "odd", "one token, all experts"])
    def test_in_training_sums_and_their_gradients(self, monkeypatch, shape, dtype):
        """--deterministic-mode: rows to sums of tokens and back, as megatron's dispatcher does it on a CPU."""
        count, experts, top_k = SHAPES[shape]
        chosen = randn(count, experts, seed=2).topk(top_k, 1).indices
        token = chosen.flatten().sort(stable=True).indices // top_k
        rows, sums = randn(len(token), 100, dtype=dtype), randn(count, 100, seed=1, dtype=dtype)
        wanted = unpermute(rows, token, sums.shape)
        there = [each.to(self.device).requires_grad_() for each in (rows, sums)]
        monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
        summed = PermutedRows.apply(there[0], token.to(self.device), count)
        summed.backward(sums.to(self.device))
        moved = PermutedRows.apply(there[1], token.to(self.device), None)
        moved.backward(rows.to(self.device))
        monkeypatch.undo()
        assert torch.equal(moved.detach().cpu(), sums[token]) and torch.equal(there[0].grad.cpu(), sums[token])
        for found in (summed.detach(), there[1].grad):
            near(found, wanted, EXACT if dtype == torch.float32 else self.low)

    @pytest.mark.parametrize(
        "packing", [Packing(formats.FP8, 112), Packing(torch.int8, 112), Packing(formats.FP8, 128, in_segments=True)]
    )
    def test_rows_that_are_codes(self, packing):
        from megatron_rl.models.expert_kernels import dispatch

        tokens, chosen = randn(5, 100), randn(5, 6, seed=1).topk(3, 1).indices
        shares = torch.ones(5, 3, device=self.device)
        packed, *_ = dispatch(tokens.to(self.device), shares, chosen.to(self.device), 6, packing)
        check_packed(packed, tokens[chosen.flatten().sort(stable=True).indices // 3], packing)

    @DTYPES
    @pytest.mark.parametrize("packing", [None, Packing(torch.int8, 112)])
    def test_a_gate_with_shares(self, dtype, packing):
        from megatron_rl.models.kernels import gate_up

        inner, shares = 3 * randn(4, 200, dtype=dtype), randn(4, seed=1).abs()
        config = SimpleNamespace(
            activation_func=functional.silu,
            activation_func_clamp_value=None,
            glu_linear_offset=0.0,
            gated_linear_unit=True,
        )
        wanted = activated(inner, shares, config)
        found = gate_up(inner.to(self.device), packing, shares.to(self.device))
        if packing is None:
            near(found, wanted, EXACT if dtype == torch.float32 else self.low)
        elif dtype == torch.float32:
            check_packed(found, wanted, packing)

    @pytest.mark.parametrize("recipe", ["none", "int8"])
    def test_a_rollout(self, one_rank, monkeypatch, recipe):
        """The same greedy tokens as eager torch, and log-probs within 1e-5; int8 codes may round another way."""
        from megatron_rl.inference import rollout_engine as module
        from megatron_rl.models.rollout_ops import RolloutOps
        from tests.support.generation import largest_gap, rollout_engine, tokens
        from tests.support.quantized import complete, quantizable_policy, rollout_quantization, short_requests

        experts = {"num_experts": 4, "moe_ffn_hidden_size": 32, "qk_layernorm": True, "add_qkv_bias": False}
        policy = quantizable_policy(attention_backend=self.paged, **experts)
        requests, results = short_requests(2, greedy=True, max_new_tokens=3), []
        for kernels in (False, True):
            monkeypatch.setattr(module, "RolloutOps", lambda fused, kernels=kernels: RolloutOps(fused=kernels))
            quantization = rollout_quantization(policy, recipe)
            results.append(complete(policy, rollout_engine(policy), quantization, requests))
        assert tokens(results[0]) == tokens(results[1])
        assert largest_gap(*results) < (1e-5 if recipe == "none" else 2e-2)


if INTERPRETED:
    mend()

    @pytest.mark.each_value
    class TestInterpreted(ExpertChecks):
        device, paged = "cpu", "paged"
        low = {"rtol": 2**-6, "atol": 2**-6}

else:

    @pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
    def test_the_kernels_in_tritons_interpreter():
        run_interpreted(__file__)
