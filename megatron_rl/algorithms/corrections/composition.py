"""Several corrections as one: ``token_tis+veto``."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

from torch import Tensor

from megatron_rl.algorithms.interfaces import Correction, CorrectionConfig, CorrectionFunction
from megatron_rl.errors import ConfigError
from megatron_rl.registry import CORRECTIONS


def get_correction(name: str) -> CorrectionFunction:
    """The function of a correction, or of several, joined by +.

    Raises:
        ConfigError: as ``correction_modules``.
    """
    correction_modules(name)
    return compose([CORRECTIONS.get(part.strip()) for part in name.split("+")])


def correction_modules(name: str) -> tuple[ModuleType, ...]:
    """The files that ``token_tis+veto`` is composed of, in that order.

    Raises:
        ConfigError: a name that is not there, one line for each, or one that is there twice.
    """
    modules, problems = [], []
    for part in name.split("+"):
        try:
            modules.append(CORRECTIONS.module(part.strip()))
        except ConfigError as error:
            problems += error.lines
    if len(set(modules)) < len(modules):
        problems.append(f"'{name}' has a correction twice, which would square its weights; name each once")
    if problems:
        raise ConfigError(problems)
    return tuple(modules)


def compose(parts: Sequence[CorrectionFunction]) -> CorrectionFunction:
    """Each part sees the same log-probs; weights multiply, and ``clipped`` is what any part clipped.

    Args:
        parts: one or more; a single one is returned as it is.
    """
    if len(parts) == 1:
        return parts[0]

    def composed(
        old_logprobs: Tensor,
        inference_logprobs: Tensor,
        loss_mask: Tensor,
        sequence_index: Tensor,
        num_sequences: int,
        config: CorrectionConfig,
    ) -> Correction:
        """Args and result as in ``interfaces.CorrectionFunction``."""
        results = [
            part(old_logprobs, inference_logprobs, loss_mask, sequence_index, num_sequences, config)
            for part in parts
        ]
        weights, clipped = results[0].weights, results[0].clipped
        for result in results[1:]:
            weights, clipped = weights * result.weights, clipped | result.clipped
        return Correction(weights=weights, clipped=clipped)

    return composed
