"""The whole policy loss on numbers worked out by hand.

Two sequences over a vocabulary of two tokens, ``P A0 A1`` and ``Q B0``::

    token               A0           A1           B0
    current probability 3/4          1/2          1/4
    old                 1/2          1/2          1/2
    engine              1/4          1/2          1/4
    reference           3/8          1/2          1/2
    advantage           1            1            -2

    ratio               1.5          1            0.5         current / old
    clipped loss        -1.28        -1           1.6         clip range [0.8, 1.28]
    correction          1.5          1            1.5         old / engine, at most 1.5
    product             -1.92        -1           2.4
    k3 KL               ln2 - 0.5    0            1 - ln2     x - 1 - ln x with x = reference / current
    entropy             0.562335     0.693147     0.562335    of (3/4, 1/4), (1/2, 1/2), (1/4, 3/4)
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.algorithms import TokenBatch
from megatron_rl.algorithms.losses import clip
from megatron_rl.algorithms.objective import MicroLoss, PolicyObjective, objective_metrics
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.trainer.packing import collate
from megatron_rl.trainer.scoring import Scorer
from megatron_rl.trainer.update import reduce_sums
from tests.support.samples import make_sample, own_reward, rewards_of
from tests.support.tokens import correction

LN2, LN3 = math.log(2), math.log(3)
OBJECTIVE = PolicyObjective(
    loss=clip.Loss(clamp_eps_lower=0.2, clamp_eps_upper=0.28),
    correction=correction("token_tis", cap=1.5),
    aggregation="token-mean",
    aggregation_constant=4.0,
    kl_beta=0.2,
    kl_estimator="k3",
    entropy_weight=0.1,
)
PLAIN = replace(OBJECTIVE, correction=correction("none"), kl_beta=0.0, entropy_weight=0.0)


def logits() -> torch.Tensor:
    """Row t predicts token t + 1: after P (3/4, 1/4), after A0 (1/2, 1/2), after Q (3/4, 1/4)."""
    rows = [[LN3, 0.0], [0.0, 0.0], [9.0, -9.0], [LN3, 0.0], [9.0, -9.0]]
    return torch.tensor(rows, requires_grad=True)


def scored() -> TokenBatch:
    """A0 is token 0, A1 token 1, B0 token 1; prompts are token 0."""
    engine = [torch.tensor([0.0, -2 * LN2, -LN2]), torch.tensor([0.0, -2 * LN2])]
    samples = [
        make_sample([0, 0, 1], sample_id=0, inference_logprobs=engine[0]),
        make_sample([0, 1], reward=-2.0, sample_id=1, inference_logprobs=engine[1]),
    ]
    old = torch.tensor([0.0, -LN2, -LN2, 0.0, -LN2])
    ref = torch.tensor([0.0, math.log(3 / 8), -LN2, 0.0, -LN2])
    batch = replace(collate(samples, "cpu"), old_logprobs=old, ref_logprobs=ref, step=rewards_of(samples))
    return replace(batch, advantages=own_reward(batch)[0])


def run(
    one_rank: ParallelGroups, objective: PolicyObjective, values: torch.Tensor | None = None,
    batch: TokenBatch | None = None,
) -> MicroLoss:
    """The objective of `scored`, from logits to the total."""
    policy, batch = SimpleNamespace(vocab_size=2, padded_vocab_size=2), batch or scored()
    scorer = Scorer(policy, one_rank, temperature=1.0)
    return objective(scorer.select(logits() if values is None else values, batch, "differentiable"))


@pytest.mark.parametrize(
    ("aggregation", "policy_loss", "kl", "entropy", "denominator"),
    [
        # -1.92 - 1 + 2.4;  (ln2 - 0.5) + (1 - ln2);  the sum of the entropies;  three tokens.
        ("token-mean", -0.52, 0.5, 1.817817, 3),
        # (-1.92 - 1) / 2 + 2.4;  (ln2 - 0.5) / 2 + 1 - ln2;  (0.562335 + 0.693147) / 2 + 0.562335.
        ("sequence-mean", 0.94, 0.75 - LN2 / 2, 1.190076, 2),
        # Each token over 4; the denominator is the number of sequences.
        ("constant", -0.13, 0.125, 0.454454, 2),
    ],
)
def test_the_three_terms(
    one_rank: ParallelGroups, aggregation: str, policy_loss: float, kl: float, entropy: float, denominator: int
) -> None:
    total, below, _ = run(one_rank, replace(OBJECTIVE, aggregation=aggregation))
    # For the token mean: -0.52 + 0.2 * 0.5 - 0.1 * 1.817817 = -0.601782.
    assert total.item() == pytest.approx(policy_loss + 0.2 * kl - 0.1 * entropy, abs=1e-5)
    assert below.item() == denominator


def test_each_term_alone(one_rank: ParallelGroups) -> None:
    """Sums of the terms, so that two wrong signs cannot cancel."""
    base = run(one_rank, PLAIN)[0].item()
    assert base == pytest.approx(-1.28 - 1 + 1.6, abs=1e-6)
    with_kl = run(one_rank, replace(PLAIN, kl_beta=1.0))[0].item()
    assert with_kl - base == pytest.approx(0.5, abs=1e-6)
    with_entropy = run(one_rank, replace(PLAIN, entropy_weight=1.0))[0].item()
    assert with_entropy - base == pytest.approx(-1.817817, abs=1e-5)


def test_a_rejected_token_stays_in_the_denominator(one_rank: ParallelGroups) -> None:
    """old / engine is 2, 1, 2: masked_is up to 1.5 leaves A1 alone, with -1, of three tokens."""
    total, denominator, _ = run(one_rank, replace(PLAIN, correction=correction("masked_is", upper=1.5)))
    assert total.item() == pytest.approx(-1.0)
    assert denominator.item() == 3


def test_a_correction_of_sequences_sees_the_sequences(one_rank: ParallelGroups) -> None:
    """old / engine over a whole sequence is 2 for ``A0 A1`` and 2 for ``B0``: (-1.28 - 1 + 1.6) * 2."""
    weighing = replace(PLAIN, correction=correction("sequence_tis", cap=9.0))
    assert run(one_rank, weighing)[0].item() == pytest.approx(-1.36, abs=1e-5)


def test_gradient_of_the_first_update(one_rank: ParallelGroups) -> None:
    """Without old log-probs the ratio is 1: ``-A (onehot - p)`` at the logits before each token."""
    values = logits()
    without_old = replace(scored(), old_logprobs=None)
    run(one_rank, PLAIN, values, without_old)[0].backward()
    expected = [
        [-0.25, 0.25],  # A0 = 0, A = 1: -(1 - 3/4), -(0 - 1/4)
        [0.5, -0.5],  # A1 = 1, A = 1: -(0 - 1/2), -(1 - 1/2)
        [0.0, 0.0],
        [-1.5, 1.5],  # B0 = 1, A = -2: 2 (0 - 3/4), 2 (1 - 1/4)
        [0.0, 0.0],
    ]
    torch.testing.assert_close(values.grad, torch.tensor(expected))


def test_gradients_of_kl_and_entropy(one_rank: ParallelGroups) -> None:
    """Descending the loss must bring the policy to the reference, and must flatten it."""

    def gradient(objective: PolicyObjective) -> torch.Tensor:
        values = logits()
        run(one_rank, objective, values)[0].backward()
        return values.grad

    base = gradient(PLAIN)
    # d k3 / d log pi = 1 - x: 1/2 at A0, 0 at A1, -1 at B0; times (onehot - p).
    kl = torch.tensor([[0.125, -0.125], [0.0, 0.0], [0.0, 0.0], [0.75, -0.75], [0.0, 0.0]])
    torch.testing.assert_close(gradient(replace(PLAIN, kl_beta=1.0)) - base, kl, atol=1e-6, rtol=0)
    # d (-H) / d logit = p (log p + H): at (3/4, 1/4) it is 3/4 (-0.287682 + 0.562335) = 0.205990.
    spread = [0.205990, -0.205990]
    entropy = torch.tensor([spread, [0.0, 0.0], [0.0, 0.0], spread, [0.0, 0.0]])
    torch.testing.assert_close(gradient(replace(PLAIN, entropy_weight=1.0)) - base, entropy, atol=1e-5, rtol=0)


def test_metrics(one_rank: ParallelGroups) -> None:
    sums = [run(one_rank, OBJECTIVE)[2] for _ in range(2)]
    metrics = objective_metrics(reduce_sums(sums, one_rank.data_group, torch.device("cpu")))
    expected = {
        "actor/pg_loss": -0.52 / 3,
        "actor/kl_loss": 0.5 / 3,
        "actor/entropy": 1.817817 / 3,
        # ln(1/2) - ln(3/4), 0, ln(1/2) - ln(1/4): the mean of old minus current.
        "actor/ppo_kl": (math.log(2 / 3) + LN2) / 3,
        "actor/pg_clipfrac": 2 / 3,  # A0 above, B0 below
        "actor/pg_clipfrac_lower": 0.0,
        "actor/dropped_tokens": 0.0,
        "training/rollout_logprob_gap_mean": 2 * LN2 / 3,  # old / engine is 2, 1, 2
        "training/rollout_logprob_gap_max": LN2,
        "rollout_corr/log_ratio_mean": 2 * LN2 / 3,
        "rollout_corr/log_ratio_std": LN2 * math.sqrt(2) / 3,  # ln2, 0, ln2: sqrt(2/3 - 4/9) ln2
        "rollout_corr/residual_gap": 0.0,  # of A1; A0 and B0 are capped
        "rollout_corr/k3_kl": 2 * (1 - LN2) / 3,
        "rollout_corr/rollout_is_mean": 4 / 3,
        "rollout_corr/rollout_is_clipped": 2 / 3,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-5)
    assert metrics["rollout_corr/abs_log_ratio_p95"] == pytest.approx(LN2, rel=0.1)


@pytest.mark.parametrize("broken", ["current", "old", "engine", "reference"])
def test_a_token_with_a_non_finite_logprob_leaves_the_denominator(one_rank: ParallelGroups, broken: str) -> None:
    """A0 leaves: what stays is A1 (-1, KL 0, entropy 0.693147) and B0 (2.4, 1 - ln2, 0.562335)."""
    batch, values = scored(), logits().detach()
    if broken == "current":
        values[0] = math.nan
    else:
        {"engine": batch.inference_logprobs, "old": batch.old_logprobs, "reference": batch.ref_logprobs}[broken][1] = (
            math.nan
        )
    total, denominator, sums = run(one_rank, OBJECTIVE, values, batch)
    assert denominator.item() == 2
    expected = 1.4 + 0.2 * (1 - LN2) - 0.1 * (0.693147 + 0.562335)
    assert total.item() == pytest.approx(expected, abs=1e-5)
    assert sums["actor/dropped_tokens"].item() == 1


def test_what_an_extension_counts_is_logged_under_its_names(one_rank: ParallelGroups) -> None:
    """A sum is divided by the loss tokens, of which there are three; under ``_max`` the largest counts."""

    def counting(batch: TokenBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        ones = batch.in_loss.float()
        return ones, {"mine/doubled": 2 * ones, "mine/reward_max": batch.rewards, "mine/sequences": torch.tensor(2)}

    counted = replace(PLAIN, loss=counting, correction=lambda b: (ones_of(b), {"theirs/weight": ones_of(b)}))
    sums = [run(one_rank, counted)[2] for _ in range(2)]
    metrics = objective_metrics(reduce_sums(sums, one_rank.data_group, torch.device("cpu")))
    expected = {"mine/doubled": 2.0, "mine/reward_max": 1.0, "mine/sequences": 2 / 3, "theirs/weight": 1.0}
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_weights_of_a_correction_carry_no_gradient(one_rank: ParallelGroups) -> None:
    """Even of one that reads the current log-probs: -1.28 - 1 + 1.6 weighs as it is, the gradient is the loss's."""
    values, plain = logits(), logits()
    moving = replace(PLAIN, correction=lambda batch: (ones_of(batch) + 0 * batch.current_logprobs.exp(), {}))
    run(one_rank, moving, values)[0].backward()
    run(one_rank, PLAIN, plain)[0].backward()
    assert torch.equal(values.grad, plain.grad)
    growing = replace(PLAIN, correction=lambda batch: (ones_of(batch) * batch.current_logprobs.exp(), {}))
    values = logits()
    total = run(one_rank, growing, values)[0]
    total.backward()
    weight = torch.tensor([0.75, 0.5, 1.0, 0.25, 1.0])[:, None]  # of the token that each row predicts
    torch.testing.assert_close(values.grad, plain.grad * weight)


def ones_of(batch: TokenBatch) -> torch.Tensor:
    return batch.in_loss.float()
