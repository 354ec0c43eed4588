"""The kernels of a layer in training against autograd: in Triton's interpreter here, compiled in tests/gpu.

As in `test_rollout_kernels`, the interpreter truncates to bf16, so fp32 is the exact check there.
"""

from __future__ import annotations

import importlib.util
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as functional

from megatron_rl.models.gradients import rotate
from megatron_rl.trainer.packing import collate
from megatron_rl.trainer.scoring import Scorer
from tests.support.interpreter import INTERPRETED, run_interpreted
from tests.support.samples import make_sample
from tests.support.tiny import SHAPES, tiny_config, tiny_policy
from tests.unit.models.test_rollout_kernels import DTYPES, randn


def gradients(outputs, inputs) -> list[torch.Tensor]:
    """By one seed for all devices, on the CPU."""
    slopes = [randn(*each.shape, seed=9 + n, dtype=each.dtype).to(each.device) for n, each in enumerate(outputs)]
    return [each.cpu() for each in torch.autograd.grad(outputs, inputs, slopes)]


class TrainingChecks:
    """Subclasses name the device, and the tolerance in bf16, a share of the largest number."""

    device: str
    low: float

    def _leaves(self, *tensors):
        return [each.detach().to(self.device).requires_grad_() for each in tensors]

    def _near(self, actual, expected):
        for own, wanted in zip(actual, expected, strict=True):
            share = 2e-6 if own.dtype == torch.float32 else self.low
            largest = max(1.0, wanted.detach().abs().max().item())
            torch.testing.assert_close(own.cpu(), wanted, rtol=share, atol=share * largest)

    @DTYPES
    @pytest.mark.parametrize("rows", [2, 11], ids=["a row a program", "rows in turn"])
    @pytest.mark.parametrize("is_first", [True, False])
    def test_residual_and_norm(self, dtype, rows, is_first, monkeypatch):
        from megatron_rl.models import training_kernels as kernels

        monkeypatch.setattr(kernels, "PROGRAMS", 4)  # the interpreter takes a while for a row
        given = [randn(rows, 1, 100, seed=n, dtype=dtype) for n in (1, 2)][: 2 - is_first]
        given.append(1 + randn(100, seed=3, dtype=dtype) / 4)
        eager = [each.clone().requires_grad_() for each in given]
        summed = eager[0] if is_first else eager[1] + eager[0]
        expected = (summed * 1, functional.rms_norm(summed, (100,), eager[-1], 1e-5))
        own = self._leaves(*given)
        actual = kernels.SumAndNorm.apply(own[0], None if is_first else own[1], own[-1], 1e-5)
        assert is_first or torch.equal(actual[0].cpu(), expected[0]) or INTERPRETED, "the sum has eager's bits"
        self._near(actual, expected)
        self._near(gradients(actual, own), gradients(expected, eager))
        alike = [self._leaves(*given) for _ in range(2)]
        runs = [kernels.SumAndNorm.apply(one[0], None if is_first else one[1], one[-1], 1e-5) for one in alike]
        for first, second in zip(*(gradients(run, one) for run, one in zip(runs, alike, strict=True)), strict=True):
            assert torch.equal(first, second)

    @DTYPES
    @pytest.mark.parametrize(
        ("share", "width", "tokens"), [(4, 16, 2), (1, 64, 1), (7, 24, 2), (2, 16, 7)],
        ids=["grouped", "alone", "odd", "tokens in turn"],
    )  # fmt: skip
    @pytest.mark.parametrize("normed", [False, True], ids=["", "normed"])
    def test_heads(self, dtype, share, width, tokens, normed, monkeypatch):
        from megatron_rl.models import training_kernels as kernels

        monkeypatch.setattr(kernels, "PROGRAMS", 6)
        groups = 2
        mixed = randn(tokens, groups, share + 2, width, dtype=dtype)
        turn = [randn(tokens, 1, 1, width // 2, seed=seed, dtype=dtype).repeat(1, 1, 1, 2) for seed in (5, 6)]
        turn[1][..., : width // 2] *= -1
        weights = [1 + randn(width, seed=seed, dtype=dtype) / 4 for seed in (7, 8)][: 2 * normed]
        eager = [each.clone().requires_grad_() for each in (mixed, *weights)]
        query, key, value = eager[0][:, :, :share], eager[0][:, :, share], eager[0][:, :, share + 1]
        if normed:
            query = functional.rms_norm(query, (width,), eager[1], 1e-5)
            key = functional.rms_norm(key, (width,), eager[2], 1e-5)
        expected = (rotate(query.reshape(tokens, 1, -1, width), *turn), rotate(key[:, None], *turn), value[:, None])
        own = self._leaves(mixed, *weights)
        norms = [SimpleNamespace(weight=each, eps=1e-5) for each in own[1:]] or [None, None]
        places = torch.arange(tokens, device=self.device)
        turn = tuple(each.to(self.device) for each in turn)
        actual = kernels.RotatedHeads.apply(own[0], turn, places, norms, *(own[1:] or (None, None)))
        self._near(actual, expected)
        self._near(gradients(actual, own), gradients(expected, eager))


MODELS = {
    "biased": ({}, (3, 1)),
    "normed": ({"qk_layernorm": True, "add_qkv_bias": False, "num_layers": 2}, (5, 2)),
    "all biases": ({"disable_bias_linear": False}, (3, 1)),
    "experts": (SHAPES["experts"], (3, 1)),
    "half rotated": ({"rotary_percent": 0.5}, (3, 0)),
    "layer norms": (SHAPES["layer norms"], (0, 0)),
    "recomputed": (
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}, (5, 2)
    ),
    "MLP recomputed": ({"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}, (3, 1)),
}  # fmt: skip
"""Changes, and how often a forward pass of all layers calls each function with a gradient."""


@contextmanager
def pretending_cuda():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
        yield


def of_a_model(groups, changes) -> dict[str, torch.Tensor]:
    """Hidden states of a packed batch, and the gradients of all parameters."""
    policy = tiny_policy(tiny_config(**{"num_layers": 1} | changes))
    batch = collate([make_sample([3, 1]), make_sample([1, 5])], "cpu")
    output = Scorer(policy, groups, 1.0).forward(policy.gpt, batch)
    output.backward(randn(*output.shape, seed=3))
    return {"output": output.detach()} | {name: one.grad for name, one in policy.named_parameters()}


if INTERPRETED:

    @pytest.mark.each_value
    class TestInterpreted(TrainingChecks):
        device = "cpu"
        low = 2**-6

    @pytest.mark.parametrize("model", MODELS)
    def test_a_model(one_rank, model, monkeypatch):
        """Through the kernels and in eager torch."""
        from megatron_rl.models import training_kernels as kernels

        changes, wanted_calls = MODELS[model]
        calls = []
        for own in (kernels.SumAndNorm, kernels.RotatedHeads):
            monkeypatch.setattr(own, "apply", lambda *a, own=own: calls.append(own) or super(own, own).apply(*a))
        expected = of_a_model(one_rank, changes)
        assert not calls
        with pretending_cuda():
            actual = of_a_model(one_rank, changes)
        assert (calls.count(kernels.SumAndNorm), calls.count(kernels.RotatedHeads)) == wanted_calls
        for name, wanted in expected.items():
            scale = 0.0 if wanted is None else wanted.abs().max().item()
            assert (wanted is None) == (actual[name] is None), name
            if wanted is not None:
                torch.testing.assert_close(actual[name], wanted, rtol=1e-4, atol=2e-5 * max(scale, 1e-2), msg=name)

else:

    @pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
    def test_the_kernels_in_tritons_interpreter():
        run_interpreted(__file__)
