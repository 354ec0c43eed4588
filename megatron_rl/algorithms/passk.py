"""pass@k: the chance that at least one of k answers to a task is right, estimated from n >= k answers."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_rl.errors import ConfigError


def pass_at_k(num_samples: ArrayLike, num_correct: ArrayLike, k: int) -> NDArray[np.float64]:
    """``1 - C(n - c, k) / C(n, k)``, the unbiased estimate of Chen et al., arXiv 2107.03374, eq. 1.

    Taken as the product of ``(n - c - i) / (n - i)`` over i < k: the binomials overflow fp64 at n = 1030.

    Args:
        num_samples: n, answers drawn; an integer or an array of one per task.
        num_correct: c, right ones among them; broadcast against ``num_samples``.
        k: attempts granted, the same for all tasks.

    Returns:
        fp64 of the broadcast shape, in [0, 1].

    Raises:
        ConfigError: k is below 1 or above the smallest n.
        ValueError: a count of right answers is below 0 or above n.
    """
    samples, correct = np.broadcast_arrays(
        np.asarray(num_samples, dtype=np.int64), np.asarray(num_correct, dtype=np.int64)
    )
    if k < 1:
        raise ConfigError([f"pass@{k} is not defined: it needs at least one attempt; use k >= 1"])
    if samples.size and k > samples.min():
        raise ConfigError(
            [
                f"pass@{k} cannot be estimated from {samples.min()} samples: it needs at least k of them; "
                f"use k <= {samples.min()} or draw {k} samples a task"
            ]
        )
    if np.any((correct < 0) | (correct > samples)):
        raise ValueError("num_correct must lie between 0 and num_samples for every task")

    drawn = np.arange(k)
    # With fewer than k wrong answers one factor is exactly 0, and so is the chance of missing.
    return 1.0 - np.prod(((samples - correct)[..., None] - drawn) / (samples[..., None] - drawn), axis=-1)
