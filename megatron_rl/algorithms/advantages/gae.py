"""Generalised advantage estimation against a critic: PPO (arXiv 1506.02438; 1707.06347)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.algorithms import Extension, Terms, TokenBatch, option
from megatron_rl.algorithms.batch import TurnRewards
from megatron_rl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Advantage(Extension):
    """``A_t = d_t + gamma lambda A_next``, with ``d_t = r_t + gamma V_next - V_t``.

    ``next`` is the sequence's next token written by the policy: tokens of an environment belong to the state, so
    neither gamma nor lambda counts them. After the last token V is 0, or with ``bootstrap_truncated`` the critic's
    value if the answer was truncated.

    With --rl-turn-discount rewards are at the last tokens of turns, and gamma is multiplied by it there.

    Each sequence of a sample ends with the sample's reward, as if it were the only one: a value predicts the sample's
    reward from that position. So gamma counts the written tokens to the end of the token's own sequence, and a branch
    does not affect the sequence that it left.
    """

    BASELINE = "critic"

    gamma: float = option(1.0, ge=0, le=1)
    """Discount of rewards per written token."""
    gae_lambda: float | None = option(None, ge=0, le=1)
    """0: only the critic's values; 1 (the default): only rewards. Not together with length_alpha."""
    length_alpha: float | None = option(None, gt=0)
    """VAPO's lambda, 1 - 1 / (length_alpha x written tokens of the sequence), not below 0 (arXiv 2504.05118: 0.05)."""
    critic_lambda: float | None = option(None, ge=0, le=1)
    """Lambda of the critic's targets (VAPO: 1). Default: that of the advantages."""
    bootstrap_truncated: bool = option(False)
    """Use the critic's value as the return after a truncated answer."""
    whiten: bool = option(True)
    """Normalise to mean 0 and std 1 over the loss tokens of the step, on all ranks; done by the trainer."""
    epsilon: float = option(1e-6, gt=0)
    """Added to the std."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gae_lambda is not None and self.length_alpha is not None:
            raise ConfigError(["length_alpha and gae_lambda both say what lambda is; leave one of them out"])

    @property
    def whitening_epsilon(self) -> float | None:
        return self.epsilon if self.whiten else None

    def __call__(self, batch: TokenBatch) -> Terms:
        return self._estimate(batch, self._lambda(batch)), {}

    def returns(self, batch: TokenBatch, advantages: Tensor) -> Tensor:
        """Return ``V + A``, with A computed by ``critic_lambda`` if set."""
        if self.critic_lambda is None:
            return super().returns(batch, advantages)
        return batch.values + self._estimate(batch, self.critic_lambda)

    def _lambda(self, batch: TokenBatch) -> Tensor | float:
        """Return lambda, a scalar or one per token [T]."""
        if self.length_alpha is None:
            return 1.0 if self.gae_lambda is None else self.gae_lambda
        of_sequences = 1 - 1 / (self.length_alpha * batch.loss_tokens().clamp_min(1).double())
        return of_sequences.clamp_min(0)[batch.sequence_index]

    def _estimate(self, batch: TokenBatch, decay: Tensor | float) -> Tensor:
        following, has_next = next_written(batch)
        values = batch.values.double()
        gamma = values.new_full(values.shape, self.gamma)
        if isinstance(batch.step, TurnRewards) and batch.samples.turn is not None:
            ends_turn = has_next & (batch.samples.turn[following] != batch.samples.turn)
            gamma = torch.where(ends_turn, gamma * batch.step.discount, gamma)
        ahead = torch.where(has_next, values[following], 0.0)
        if self.bootstrap_truncated:
            cut = batch.samples.truncated[batch.sequence_index]
            ahead = torch.where(cut & ~has_next, batch.critic.end_values.double()[batch.sequence_index], ahead)
        deltas = torch.where(batch.in_loss, batch.rewards + gamma * ahead - values, 0.0)
        factors = torch.where(batch.in_loss, gamma * decay, 1.0)  # others pass it on
        factors = torch.where(has_next, factors, 0.0)
        sums = reverse_scan(deltas, factors, max(batch.packing.lengths))
        return torch.where(batch.in_loss, sums, 0.0).float()


def next_written(batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Return the index of each token's next loss token in its sequence (arbitrary without one), and whether it exists:
    [T].
    """
    size, index = batch.in_loss.numel(), torch.arange(batch.in_loss.numel(), device=batch.in_loss.device)
    written = torch.where(batch.in_loss, index, size)
    # The first written token among the following ones.
    following = written.roll(-1).index_fill(0, index[-1:], size).flip(0).cummin(0).values.flip(0)
    has_next = following < size
    following = following.clamp_max(size - 1)
    return following, has_next & (batch.sequence_index[following] == batch.sequence_index)


def reverse_scan(terms: Tensor, factors: Tensor, longest: int) -> Tensor:
    """Return ``s_t = terms_t + factors_t s_(t+1)``, [T] fp64, in log2(``longest``) parallel steps.

    A step doubles the reach of each token: ``(a, f)`` before ``(b, g)`` is ``(a + f b, f g)``. At most ``longest``
    consecutive factors are nonzero. A single pass that divides by cumulative products would underflow: 0.95 to the
    power 16,384 is 1e-365.
    """
    reach = 1
    while reach < longest:
        ahead = torch.nn.functional.pad(terms[reach:], (0, reach))
        terms = terms + factors * ahead
        factors = factors * torch.nn.functional.pad(factors[reach:], (0, reach))
        reach *= 2
    return terms
