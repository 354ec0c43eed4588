"""Mismatch corrections on numbers worked out by hand.

Three sequences; m is masked and NaN::

    token      A0    A1    m     B0    B1    C0    m
    ratio      3     0.6   -     0.25  1     0.995 -      old / engine

    product    1.8         0.25        0.995              exp of the sum of log ratios
    geometric  1.3416      0.5         0.995              exp of their mean
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_rl.algorithms.corrections import masked_is, token_tis, veto
from megatron_rl.algorithms.extension import CLIPPED, Function, correction_of
from megatron_rl.algorithms.mismatch import correction_problem
from megatron_rl.errors import ConfigError
from megatron_rl.registry import CORRECTIONS
from tests.support.tiny import tiny_config
from tests.support.tokens import correction, token_batch

NAN = torch.nan
INFERENCE = torch.tensor([-1.0, -2.0, NAN, -0.5, -4.0, -0.25, NAN])
OLD = INFERENCE + torch.tensor([3.0, 0.6, 1.0, 0.25, 1.0, 0.995, 1.0]).log()
MASK = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0])
SEQUENCE = torch.tensor([0, 0, 0, 1, 1, 2, 2])
T, F = True, False


def weighed(found: Function, old: Tensor, inference: Tensor, mask: Tensor, sequence: Tensor) -> tuple[Tensor, Tensor]:
    """Weights, and which tokens are clipped."""
    batch = token_batch(sequence, mask, old_logprobs=old, inference_logprobs=inference)
    weights, sums = found(batch)
    return weights, sums.get(CLIPPED, torch.zeros_like(batch.in_loss))


def run(name: str, old: Tensor = OLD, inference: Tensor = INFERENCE, **options: float) -> tuple[Tensor, Tensor]:
    return weighed(correction(name, **options), old, inference, MASK, SEQUENCE)


@pytest.mark.parametrize(
    ("name", "options", "weights", "clipped"),
    [
        ("none", {}, [1, 1, 0, 1, 1, 1, 0], [F] * 7),
        ("token_tis", {}, [2, 0.6, 0, 0.25, 1, 0.995, 0], [T, F, F, F, F, F, F]),
        ("masked_is", {}, [0, 0.6, 0, 0, 1, 0.995, 0], [T, F, F, T, F, F, F]),
        ("masked_is", {"lower": 0.2}, [0, 0.6, 0, 0.25, 1, 0.995, 0], [T, F, F, F, F, F, F]),
        ("sequence_tis", {}, [1.8, 1.8, 0, 0.25, 0.25, 0.995, 0], [F] * 7),
        ("sequence_tis", {"cap": 1.5}, [1.5, 1.5, 0, 0.25, 0.25, 0.995, 0], [T, T, F, F, F, F, F]),
        ("geometric", {}, [0, 0, 0, 0, 0, 1, 0], [T, T, F, T, T, F, F]),
        ("geometric", {"upper": 1.35}, [1, 1, 0, 0, 0, 1, 0], [F, F, F, T, T, F, F]),
        ("geometric", {"upper": 1.34}, [0, 0, 0, 0, 0, 1, 0], [T, T, F, T, T, F, F]),
        ("geometric", {"lower": 0.49}, [0, 0, 0, 1, 1, 1, 0], [T, T, F, F, F, F, F]),
        ("veto", {}, [1, 1, 0, 1, 1, 1, 0], [F] * 7),
        ("veto", {"veto": 0.3}, [1, 1, 0, 0, 0, 1, 0], [F, F, F, T, T, F, F]),
        ("token_tis+veto", {"veto": 0.3}, [2, 0.6, 0, 0, 0, 0.995, 0], [T, F, F, T, T, F, F]),
        ("veto+none+token-tis", {"veto": 0.7}, [0, 0, 0, 0, 0, 0.995, 0], [T, T, F, T, T, F, F]),
        # 1.8 * 3 without a cap in reach.
        ("sequence_tis+token_tis", {"cap": 9}, [5.4, 1.08, 0, 0.0625, 0.25, 0.990025, 0], [F] * 7),
    ],
)
def test_weights(name: str, options: dict[str, float], weights: list[float], clipped: list[bool]) -> None:
    found, found_clipped = run(name, **options)
    torch.testing.assert_close(found, torch.tensor(weights, dtype=torch.float32))
    assert found_clipped.tolist() == clipped


def test_the_default_veto_is_of_one_in_ten_thousand() -> None:
    for ratio, weight in ((1.1e-4, 1.0), (0.9e-4, 0.0)):
        old = INFERENCE.index_put((torch.tensor([4]),), INFERENCE[4] + torch.tensor(ratio).log())
        assert run("veto", old=old)[0].tolist() == [1, 1, 0, weight, weight, 1, 0]


@pytest.mark.parametrize(
    ("name", "above", "below"),
    [("sequence_tis", 2.0, 0.0), ("geometric", 0.0, 0.0), ("veto", 1.0, 0.0), ("sequence_tis+veto", 2.0, 0.0)],
)
def test_a_long_sequence_does_not_overflow(name: str, above: float, below: float) -> None:
    """100,000 tokens of 15 nats each: exp of the sum is inf, and of its negative 0 with a log of -inf."""
    length = 100_000
    found, zeros = correction(name), torch.zeros(length)
    for shift, weight in ((15.0, above), (-15.0, below)):
        weights, _ = weighed(found, zeros + shift, zeros, zeros + 1, zeros.long())
        assert weights.isfinite().all()
        assert weights[[0, -1]].tolist() == pytest.approx([weight] * 2, abs=1e-8)


@pytest.mark.parametrize("name", CORRECTIONS.names())
def test_two_micro_batches_equal_one(name: str) -> None:
    options = {"lower": 0.4, "upper": 1.35, "veto": 0.3}
    found, (weights, clipped) = correction(name, **options), run(name, **options)
    for part, first in ((slice(0, 3), 0), (slice(3, 7), 1)):
        own = weighed(found, OLD[part], INFERENCE[part], MASK[part], SEQUENCE[part] - first)
        assert torch.equal(own[0], weights[part])
        assert torch.equal(own[1], clipped[part])


@pytest.mark.parametrize("name", [*CORRECTIONS.names(), "token_tis+veto"])
def test_an_empty_micro_batch(name: str) -> None:
    empty = torch.zeros(0)
    weights, clipped = weighed(correction(name), empty, empty, empty, empty.long())
    assert weights.shape == clipped.shape == (0,)


def test_a_bound_that_rejects_agreement_is_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        masked_is.Correction(lower=1.0, upper=1.0)
    assert [line.split()[0] for line in refused.value.lines] == ["lower", "upper"]
    for build in (
        lambda: token_tis.Correction(cap=0.0),
        lambda: veto.Correction(veto=1e-9),
        lambda: masked_is.Correction(lower=NAN),
    ):
        with pytest.raises(ConfigError):
            build()


def test_unknown_and_repeated_parts_are_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        correction_of(tiny_config(rl_correction="tokn_tis+vetoo"))
    first, second = refused.value.lines
    assert "'tokn_tis': did you mean token_tis" in first
    assert "'vetoo': did you mean veto" in second
    with pytest.raises(ConfigError, match="''"):
        correction_of(tiny_config(rl_correction="token_tis+"))
    with pytest.raises(ConfigError, match="twice"):
        correction_of(tiny_config(rl_correction="token_tis+token-tis"))


def warn(name: str, weight: float, size: float, clipped: float = 0.1) -> str | None:
    """As the loop has them: among other metrics."""
    return correction_problem(
        name,
        correction(name.replace(" ", "")),
        {
            "actor/grad_norm": 1.0,
            "rollout_corr/rollout_is_mean": weight,
            "rollout_corr/rollout_is_eff_sample_size": size,
            "rollout_corr/rollout_is_clipped": clipped,
        },
    )


@pytest.mark.parametrize("name", ["sequence_tis", "geometric", "veto", "token_tis+veto", "token-tis + geometric"])
def test_a_collapse_of_sequences_is_told_with_its_numbers(name: str) -> None:
    assert warn(name, 0.5, 0.5) is None
    for weight, size, numbers in ((0.4567, 0.9, "0.457"), (0.9, 0.4567, "0.457"), (0.0, 0.0, "0.000")):
        line = warn(name, weight, size)
        assert numbers in line
        assert "--rl-correction token_tis" in line
        assert "\n" not in line


def test_no_collapse_of_tokens_and_none_without_tokens() -> None:
    for name in ("none", "token_tis", "masked_is", "masked_is+token_tis"):
        assert warn(name, 0.1, 0.1) is None
    assert warn("geometric", 0.0, 0.0, clipped=0.0) is None
    assert correction_problem("geometric", correction("geometric"), {"actor/grad_norm": 1.0}) is None
