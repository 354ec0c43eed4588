"""What an advantage, a loss and a correction look like: their settings, results and signatures.

An extension is one file in ``advantages/``, ``losses/`` or ``corrections/`` with a function ``compute`` of
the signature below; ``megatron_rl.registry`` finds it by its file name.

Shapes: ``[T]`` packed tokens, ``[B]`` samples. Log-probs are fp32 and sit at their token's index.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from megatron_rl.errors import ConfigError

Baseline = Literal["group", "batch"]
"""What an advantage compares a reward with: the other samples of the task, or all samples of the step."""


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    """Settings of all advantages. Raises ``ConfigError`` for a broken bound."""

    epsilon: float = 1e-6
    """Added to a standard deviation before it divides; in units of reward."""

    def __post_init__(self) -> None:
        if not self.epsilon > 0:
            raise ConfigError(
                [f"epsilon is {self.epsilon}: it keeps a standard deviation of 0 from dividing; use 1e-6"]
            )


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Settings of all policy losses; ratios are probabilities over probabilities.

    Raises ``ConfigError`` with every broken bound.
    """

    clamp_eps_lower: float
    """The ratio is clipped below at ``1 - clamp_eps_lower``; 1 leaves that side open."""
    clamp_eps_upper: float
    """The ratio is clipped above at ``1 + clamp_eps_upper``."""
    dual_clip: float | None = None
    """For a negative advantage the loss is at most ``dual_clip * |A|``; None is off."""

    def __post_init__(self) -> None:
        problems = []
        if not 0 < self.clamp_eps_lower <= 1:
            problems.append(
                f"clamp_eps_lower is {self.clamp_eps_lower}: a ratio lies in (0, inf), so its lower bound "
                "1 - clamp_eps_lower must lie in [0, 1); use a value in (0, 1], for example 0.2"
            )
        if not self.clamp_eps_upper > 0:
            problems.append(
                f"clamp_eps_upper is {self.clamp_eps_upper}: the upper bound of the ratio must be above 1; "
                "use a positive value, for example 0.28"
            )
        if self.dual_clip is not None and not self.dual_clip > 1:
            problems.append(
                f"dual_clip is {self.dual_clip}: at 1 or below it would stop the gradient of unchanged "
                "tokens; use a value above 1, for example 3, or leave it out"
            )
        _raise_all(problems)


@dataclass(frozen=True, kw_only=True)
class CorrectionConfig:
    """Settings of all mismatch corrections; a ratio is ``pi_old / pi_inference``.

    Raises ``ConfigError`` with every broken bound.
    """

    cap: float = 2.0
    """``token_tis``, ``sequence_tis``: the largest weight."""
    lower: float | None = None
    """``masked_is``, ``geometric``: smaller ratios are rejected. None is the method's own: see ``ratio_bounds``."""
    upper: float | None = None
    """``masked_is``, ``geometric``: larger ratios are rejected. None is the method's own."""
    veto: float = 1e-4
    """``veto``: one smaller ratio rejects its sequence."""

    def __post_init__(self) -> None:
        problems = []
        if not self.cap > 0:
            problems.append(
                f"cap is {self.cap}: weights are ratios of probabilities; use a positive value, e.g. 2"
            )
        if self.lower is not None and not 0 <= self.lower < 1:
            problems.append(
                f"lower is {self.lower}: a token on which trainer and engine agree has the ratio 1 and must be "
                "accepted; use a value in [0, 1), e.g. 0.5"
            )
        if self.upper is not None and not self.upper > 1:
            problems.append(
                f"upper is {self.upper}: a token on which trainer and engine agree has the ratio 1 and must be "
                "accepted; use a value above 1, e.g. 2"
            )
        if not 1e-8 <= self.veto < 1:
            problems.append(
                f"veto is {self.veto}: ratios are told apart down to 2e-9, and at 1 every sequence would be "
                "rejected; use a value in [1e-8, 1), e.g. 1e-4"
            )
        _raise_all(problems)

    def ratio_bounds(self, default: tuple[float, float]) -> tuple[float, float]:
        """``(lower, upper)``, each from ``default`` where it was not set: the methods' ranges differ a lot."""
        lower, upper = default
        return (
            lower if self.lower is None else self.lower,
            upper if self.upper is None else self.upper,
        )


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss before reduction, with the numerators of its clip fractions.

    The fractions' denominator is the number of loss tokens of the call.
    """

    per_token: Tensor
    """[T] fp32, 0 at masked positions; carries the gradient."""
    num_clipped_lower: Tensor
    """[] fp32, detached: loss tokens held at ``1 - clamp_eps_lower``."""
    num_clipped_upper: Tensor
    """[] fp32, detached: loss tokens held at ``1 + clamp_eps_upper``."""
    num_dual_clipped: Tensor
    """[] fp32, detached: loss tokens held at ``dual_clip``."""


@dataclass(frozen=True)
class Correction:
    """What to multiply a per-token loss with because another program sampled the tokens."""

    weights: Tensor
    """[T] fp32, detached, 0 at masked positions."""
    clipped: Tensor
    """[T] bool: loss tokens that were capped or rejected."""


class AdvantageMethod(Protocol):
    """``advantages/<name>.py``: a module is one."""

    BASELINE: Baseline
    """It decides which groups carry a signal, see ``groups.groups_with_signal``, and whether a group may be of one
    sample. Read without importing the file too, so it is a literal."""

    def compute(
        self, rewards: Tensor, valid: Tensor, group_index: Tensor, config: AdvantageConfig
    ) -> Tensor:
        """Advantage of each sample of a step.

        Args:
            rewards: [B] fp32, finite where ``valid``.
            valid: [B] bool; False masks a sample (its grade failed) out of every mean.
            group_index: [B] int64, the group of each sample, counted from 0.
            config: the settings.

        Returns:
            [B] fp32, detached; 0 at masked samples, and with a baseline of the group where fewer than two samples of
            it are valid.
        """
        ...


class LossFunction(Protocol):
    """``losses/<name>.py: compute``.

    The file may also say what holds where no flag was given: ``DEFAULT_CLAMP = (lower, upper)``, else 0.2 and 0.2, and
    ``DEFAULT_AGGREGATION``, else ``token-mean``; and ``HAS_DUAL_CLIP = False`` if it does not read ``dual_clip``. They
    are read without importing it, so they are literals.
    """

    def __call__(
        self,
        current_logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        loss_mask: Tensor,
        sequence_index: Tensor,
        num_sequences: int,
        config: LossConfig,
    ) -> PolicyLoss:
        """Per-token loss to be minimised.

        Args:
            current_logprobs: [T] of the model being trained; the gradient flows into them.
            old_logprobs: [T] of the trainer's model before the step's updates.
            advantages: [T] fp32.
            loss_mask: [T] fp32, 1 at the policy's tokens; other positions may hold anything, NaN included.
            sequence_index: [T] int64, the sequence of each token; every sequence must be whole in the call.
            num_sequences: host count of sequences.
            config: the settings.
        """
        ...


class CorrectionFunction(Protocol):
    """``corrections/<name>.py: compute``.

    The file also says ``LEVEL = "token"`` or ``"sequence"``: whether tokens are weighed one by one or all
    tokens of a sequence alike. One that reads ``config.ratio_bounds`` states its range as ``DEFAULT_BOUNDS``.
    """

    def __call__(
        self,
        old_logprobs: Tensor,
        inference_logprobs: Tensor,
        loss_mask: Tensor,
        sequence_index: Tensor,
        num_sequences: int,
        config: CorrectionConfig,
    ) -> Correction:
        """Weights that undo the mismatch between the trainer's policy and the engine's.

        The loss keeps the denominator it had before: a rejected token counts as one with loss 0, otherwise
        rejecting half of the tokens would double the step size of the rest.

        Args:
            old_logprobs: [T] of the trainer's model before the step's updates.
            inference_logprobs: [T] of the engine that drew the tokens.
            loss_mask: [T] fp32, 1 at the policy's tokens; other positions may hold anything, NaN included.
            sequence_index: [T] int64, the sequence of each token; every sequence must be whole in the call.
            num_sequences: host count of sequences.
            config: the settings.
        """
        ...


def _raise_all(problems: list[str]) -> None:
    if problems:
        raise ConfigError(problems)
