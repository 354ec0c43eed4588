"""Policy losses and their gradients on numbers worked out by hand; the clip range is [0.8, 1.28]."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_rl.algorithms.aggregation import token_weights
from megatron_rl.algorithms.interfaces import LossConfig, PolicyLoss
from megatron_rl.algorithms.losses import cispo, clip, gspo
from megatron_rl.errors import ConfigError

CONFIG = LossConfig(clamp_eps_lower=0.2, clamp_eps_upper=0.28)
DUAL = LossConfig(clamp_eps_lower=0.2, clamp_eps_upper=0.28, dual_clip=3.0)
NAN = float("nan")


def run_clip(ratio: float, advantage: float, config: LossConfig = CONFIG) -> tuple[float, float, PolicyLoss]:
    """Loss and gradient of one token at log-prob -1 before the update."""
    old = torch.tensor([-1.0])
    current = (old + math.log(ratio)).requires_grad_()
    one_sequence = torch.zeros(1, dtype=torch.int64)
    loss = clip.compute(current, old, torch.tensor([advantage]), torch.ones(1), one_sequence, 1, config)
    loss.per_token.sum().backward()
    return loss.per_token.item(), current.grad.item(), loss


def clip_counts(loss: PolicyLoss) -> tuple[float, float, float]:
    return loss.num_clipped_lower.item(), loss.num_clipped_upper.item(), loss.num_dual_clipped.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected_loss", "expected_gradient", "counts"),
    [
        # A > 0: a ratio above the range is held at 1.28 * 1 and has no gradient left.
        (1.5, 1.0, -1.28, 0.0, (0, 1, 0)),
        # A > 0 below the range: max(-0.5, -0.8) is the unclipped side; d(-rho A)/d log pi = -rho A.
        (0.5, 1.0, -0.5, -0.5, (0, 0, 0)),
        # A < 0 below the range: max(0.5 * 2, 0.8 * 2) is the clipped side.
        (0.5, -2.0, 1.6, 0.0, (1, 0, 0)),
        # A < 0 above the range: max(1.5 * 2, 1.28 * 2) is the unclipped side.
        (1.5, -2.0, 3.0, 3.0, (0, 0, 0)),
        # Inside the range both sides agree: the plain policy gradient.
        (1.1, 1.0, -1.1, -1.1, (0, 0, 0)),
        (0.9, -1.0, 0.9, 0.9, (0, 0, 0)),
    ],
)
def test_clip(
    ratio: float,
    advantage: float,
    expected_loss: float,
    expected_gradient: float,
    counts: tuple[float, float, float],
) -> None:
    value, gradient, loss = run_clip(ratio, advantage)
    assert value == pytest.approx(expected_loss, rel=1e-5)
    assert gradient == pytest.approx(expected_gradient, rel=1e-5)
    assert clip_counts(loss) == counts


def test_dual_clip_bounds_the_loss_of_a_negative_advantage() -> None:
    # Without: max(4 * 2, 1.28 * 2) = 8. With c = 3: min(8, 3 * 2) = 6 and no gradient.
    assert run_clip(4.0, -2.0)[:2] == pytest.approx((8.0, 8.0), rel=1e-5)
    value, gradient, loss = run_clip(4.0, -2.0, DUAL)
    assert (value, gradient) == pytest.approx((6.0, 0.0), rel=1e-5)
    assert clip_counts(loss) == (0, 0, 1)


def test_dual_clip_leaves_other_tokens_alone() -> None:
    assert run_clip(4.0, 2.0, DUAL)[:2] == pytest.approx((-2.56, 0.0), rel=1e-5)
    assert run_clip(2.0, -2.0, DUAL)[:2] == pytest.approx((4.0, 4.0), rel=1e-5)


def test_a_ratio_of_100_nats_stays_finite() -> None:
    value, _, _ = run_clip(math.exp(100.0), -1.0)
    assert value == pytest.approx(math.exp(20.0), rel=1e-5)


def test_masked_tokens_have_neither_loss_nor_gradient_nor_a_clip_count() -> None:
    current = torch.tensor([NAN, -1.0, -torch.inf]).requires_grad_()
    old = torch.tensor([0.0, -1.0, NAN])
    advantages = torch.tensor([NAN, 1.0, -5.0])
    mask = torch.tensor([0.0, 1.0, 0.0])
    for loss_module in (clip, gspo, cispo):
        current.grad = None
        loss = loss_module.compute(current, old, advantages, mask, torch.tensor([0, 0, 1]), 2, DUAL)
        loss.per_token.sum().backward()
        # The one loss token has ratio 1 and advantage 1: gradient -1 for every loss.
        assert current.grad.tolist() == [0.0, -1.0, 0.0]
        assert loss.per_token[[0, 2]].tolist() == [0.0, 0.0]
        assert clip_counts(loss) == (0, 0, 0)


def gspo_batch() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Sequence 0: masked, 0.1, 0.3 (log-ratios; mean 0.2). Sequence 1: masked, -0.4, -0.2 (mean -0.3)."""
    log_ratio = torch.tensor([5.0, 0.1, 0.3, -5.0, -0.4, -0.2])
    old = torch.tensor([-1.0, -2.0, -0.5, -1.5, -0.7, -3.0])
    mask = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0, 1.0])
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    return (old + log_ratio).requires_grad_(), old, advantages, mask, torch.tensor([0, 0, 0, 1, 1, 1])


def test_gspo_has_one_ratio_for_a_sequence() -> None:
    current, old, advantages, mask, sequence = gspo_batch()
    loss = gspo.compute(current, old, advantages, mask, sequence, 2, CONFIG)
    loss.per_token.sum().backward()
    # Sequence 0: s = exp(0.2) = 1.221403 inside the range: loss and gradient -s at both tokens.
    # Sequence 1: s = exp(-0.3) = 0.740818 below 0.8 with A < 0: loss 0.8, no gradient.
    expected_loss = [0.0, -1.221403, -1.221403, 0.0, 0.8, 0.8]
    expected_gradient = [0.0, -1.221403, -1.221403, 0.0, 0.0, 0.0]
    torch.testing.assert_close(loss.per_token.detach(), torch.tensor(expected_loss), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(current.grad, torch.tensor(expected_gradient), rtol=1e-5, atol=1e-6)
    assert clip_counts(loss) == (2, 0, 0)


def test_gspo_with_sequence_mean_is_the_gradient_of_the_sequence_objective() -> None:
    current, old, advantages, mask, sequence = gspo_batch()
    wide = LossConfig(clamp_eps_lower=0.9, clamp_eps_upper=9.0)
    loss = gspo.compute(current, old, advantages, mask, sequence, 2, wide)
    weights, denominator = token_weights("sequence-mean", mask, sequence, 2, 1.0)
    ((loss.per_token * weights).sum() / denominator).backward()

    direct = current.detach().clone().requires_grad_()
    ratios = [((direct - old)[part]).mean().exp() for part in (slice(1, 3), slice(4, 6))]
    (-(ratios[0] * 1.0 + ratios[1] * -1.0) / 2).backward()
    torch.testing.assert_close(current.grad, direct.grad)


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    # Ratios 1.5, 0.5, 1.1 are held at 1.28, 0.8, 1.1; log-probs are -1, -2, -0.5; advantages 2, -1, 1.
    # Loss -1.28 * 2 * -1 = 2.56;  -0.8 * -1 * -2 = -1.6;  -1.1 * 1 * -0.5 = 0.55.
    # Gradient -1.28 * 2 = -2.56;  -0.8 * -1 = 0.8;  -1.1.
    current = torch.tensor([-1.0, -2.0, -0.5]).requires_grad_()
    old = current.detach() - torch.tensor([1.5, 0.5, 1.1]).log()
    advantages = torch.tensor([2.0, -1.0, 1.0])
    loss = cispo.compute(
        current, old, advantages, torch.ones(3), torch.zeros(3, dtype=torch.int64), 1, CONFIG
    )
    loss.per_token.sum().backward()
    torch.testing.assert_close(loss.per_token.detach(), torch.tensor([2.56, -1.6, 0.55]))
    torch.testing.assert_close(current.grad, torch.tensor([-2.56, 0.8, -1.1]))
    assert clip_counts(loss) == (1, 1, 0)


def test_a_clip_range_that_cannot_work_is_refused_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        LossConfig(clamp_eps_lower=1.5, clamp_eps_upper=0.0, dual_clip=1.0)
    names = [problem.split(" is ")[0] for problem in refused.value.lines]
    assert names == ["clamp_eps_lower", "clamp_eps_upper", "dual_clip"]
