"""Has a correction of whole sequences rejected most of what there was to learn from?"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_rl.algorithms.corrections.composition import correction_modules

MEAN_WEIGHT = "rollout_corr/rollout_is_mean"
EFFECTIVE_SAMPLE_SIZE = "rollout_corr/rollout_is_eff_sample_size"
CLIPPED = "rollout_corr/rollout_is_clipped"
COLLAPSED = 0.5
"""Of mean weight and effective sample size: below it, most of a rollout's tokens teach nothing."""


def collapse_warning(correction_name: str, metrics: Mapping[str, float]) -> str | None:
    """One line when a correction of whole sequences leaves little of the step's tokens, else None.

    Log ratios add up along a sequence: a gap that is harmless for a token empties long sequences of weight.

    Args:
        correction_name: as in ``--rl-correction``, composed ones included.
        metrics: of the step, under their logged names; without those of the correction there is no warning.
    """
    modules = correction_modules(correction_name)
    if MEAN_WEIGHT not in metrics or all(module.LEVEL == "token" for module in modules):
        return None
    weight, size = metrics[MEAN_WEIGHT], metrics[EFFECTIVE_SAMPLE_SIZE]
    no_tokens = not weight and not metrics[CLIPPED]
    if no_tokens or (weight >= COLLAPSED and size >= COLLAPSED):
        return None
    return (
        f"--rl-correction {correction_name} leaves a mean weight of {weight:.3f} and an effective sample size of "
        f"{size:.3f} of the tokens (below {COLLAPSED}): the log ratios of long sequences add up, and most of the "
        "rollout teaches nothing; use --rl-correction token_tis"
    )
