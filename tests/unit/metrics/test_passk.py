"""pass@k against counts done by hand."""

from __future__ import annotations

from math import comb

import numpy as np
import pytest

from megatron_rl.metrics.evaluation import pass_at_k


@pytest.mark.parametrize(
    ("num_samples", "num_correct", "k", "expected"),
    [
        (4, 1, 1, 1 / 4),  # the share of right answers
        (4, 1, 2, 1 / 2),  # 1 - C(3,2)/C(4,2) = 1 - 3/6
        (5, 2, 3, 9 / 10),  # 1 - C(3,3)/C(5,3) = 1 - 1/10
        (4, 2, 3, 1.0),  # only two wrong answers: three attempts must hit
        (4, 0, 4, 0.0),
        (4, 4, 1, 1.0),
    ],
)
def test_single_tasks(num_samples: int, num_correct: int, k: int, expected: float) -> None:
    assert pass_at_k(num_samples, num_correct, k) == pytest.approx(expected, abs=1e-15)


def test_tasks_may_have_different_counts() -> None:
    result = pass_at_k(np.array([4, 5, 4]), np.array([1, 2, 0]), 2)
    # 1 - 3/6;  1 - C(3,2)/C(5,2) = 1 - 3/10;  0
    np.testing.assert_allclose(result, [0.5, 0.7, 0.0], atol=1e-15)
    assert result.dtype == np.float64


def test_large_counts_do_not_overflow() -> None:
    exact = 1 - comb(4096 - 3, 1024) / comb(4096, 1024)
    assert pass_at_k(4096, 3, 1024) == pytest.approx(exact, rel=1e-12)
