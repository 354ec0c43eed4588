"""KL estimators on numbers worked out by hand, and what their gradients are in expectation."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_rl.algorithms.kl import Estimator, kl_per_token

LOG2 = math.log(2.0)


@pytest.mark.parametrize(
    ("kind", "expected", "expected_gradient"),
    [
        # d = log 2 (the current policy gives its token twice the reference's probability), then d = -log 2.
        ("k1", (0.693147, -0.693147), (1.0, 1.0)),
        # 0.693147^2 / 2 = 0.240227; gradient d.
        ("k2", (0.240227, 0.240227), (0.693147, -0.693147)),
        # 1/2 - 1 + 0.693147 and 2 - 1 - 0.693147; gradient 1 - exp(-d): 1 - 1/2 and 1 - 2.
        ("k3", (0.193147, 0.306853), (0.5, -1.0)),
    ],
)
def test_estimators(
    kind: Estimator, expected: tuple[float, float], expected_gradient: tuple[float, float]
) -> None:
    current = torch.tensor([-1.0, -1.0]).requires_grad_()
    reference = torch.tensor([-1.0 - LOG2, -1.0 + LOG2])
    estimate = kl_per_token(kind, current, reference, torch.ones(2))
    estimate.sum().backward()
    torch.testing.assert_close(estimate.detach(), torch.tensor(expected), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(current.grad, torch.tensor(expected_gradient), rtol=1e-5, atol=1e-6)


def test_k3_keeps_its_digits_near_zero() -> None:
    # d^2 / 2 = 5e-9 for d = 1e-4; exp(-d) - 1 + d in fp32 would give 0 or 6e-8.
    estimate = kl_per_token("k3", torch.tensor([1e-4]), torch.tensor([0.0]), torch.ones(1))
    assert estimate.item() == pytest.approx(5e-9, rel=0.2)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_masked_and_extreme_positions(kind: Estimator) -> None:
    current = torch.tensor([torch.nan, -200.0, 0.0]).requires_grad_()
    reference = torch.tensor([0.0, 0.0, torch.nan])
    estimate = kl_per_token(kind, current, reference, torch.tensor([0.0, 1.0, 0.0]))
    estimate.sum().backward()
    assert estimate.isfinite().all()
    assert estimate[[0, 2]].tolist() == [0.0, 0.0]
    assert current.grad.isfinite().all()


@pytest.mark.parametrize(("kind", "direction"), [("k1", "none"), ("k2", "reverse"), ("k3", "forward")])
def test_expected_gradients_are_those_the_module_states(kind: Estimator, direction: str) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(7, generator=generator).requires_grad_()
    reference = torch.randn(7, generator=generator).log_softmax(0)

    # The expectation over the vocabulary, with the sampling probabilities held fixed as they are in training.
    current = logits.log_softmax(0)
    estimate = kl_per_token(kind, current, reference, torch.ones(7))
    (gradient,) = torch.autograd.grad((current.detach().exp() * estimate).sum(), logits)

    current = logits.log_softmax(0)
    exact = {
        "none": (current * 0).sum(),
        "reverse": (current.exp() * (current - reference)).sum(),
        "forward": (reference.exp() * (reference - current)).sum(),
    }
    (expected,) = torch.autograd.grad(exact[direction], logits)
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)
