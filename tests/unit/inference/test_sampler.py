"""Draws, their distribution and their log-probs, on numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch.testing import assert_close

from megatron_rl.arithmetic import uniform
from megatron_rl.inference.sampler import SamplingTensors, draw, sample_seed

HAND = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
"""Probabilities .1 .4 .2 .3: in order of likelihood tokens 1, 3, 2, 0."""


def params(
    rows: int,
    seeds: torch.Tensor | None = None,
    temperature: float | Sequence[float] = 1.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    greedy: bool | Sequence[bool] = False,
    vocabulary: int = 4,
) -> SamplingTensors:
    """One value for all rows, or one a row."""

    def column(value: object, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(value, dtype=dtype).expand(rows).clone()

    kept = column(top_k, torch.int64)
    mass = column(top_p, torch.float32)
    argmax = column(greedy, torch.bool)
    filtered = bool((kept > 0).any() or (mass < 1).any())
    return SamplingTensors(
        seeds=torch.arange(rows) * 7919 + 11 if seeds is None else seeds,
        temperature=column(temperature, torch.float32),
        greedy=argmax if argmax.any() else None,
        top_k=torch.where(kept > 0, kept, vocabulary) if filtered else None,
        top_p=mass if filtered else None,
    )


def sample(
    logits: torch.Tensor, positions: torch.Tensor, settings: SamplingTensors
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws for the tokens at ``positions``."""
    return draw(logits, uniform(settings.seeds, positions), settings)


def draw_many(logits: torch.Tensor, rows: int, **sampling: object) -> tuple[torch.Tensor, torch.Tensor]:
    """The same logits in ``rows`` rows with different seeds."""
    positions = torch.zeros(rows, dtype=torch.int64)
    return sample(logits.expand(rows, -1), positions, params(rows, vocabulary=logits.numel(), **sampling))


def chi_square(tokens: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Pearson's statistic of the counts of ``tokens`` against ``probabilities``."""
    expected = probabilities * tokens.numel()
    counts = torch.bincount(tokens, minlength=probabilities.numel())
    return ((counts - expected) ** 2 / expected).sum().item()


# -- uniform -----------------------------------------------------------------------------------


def splitmix(seed: int, position: int) -> float:
    """`uniform` in plain 64-bit integers."""
    mask = 2**64 - 1
    state = (seed * 0x9E3779B97F4A7C15 + (position + 1) * 0xDEADBEEFCAFEBABE) & mask
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & mask
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & mask
    return (((state ^ (state >> 31)) & (2**24 - 1)) + 0.5) / 2**24


def test_uniform_is_a_function_of_seed_and_position_only() -> None:
    seeds = torch.tensor([5, 5, -3, 2**62, -(2**62), 5])
    positions = torch.tensor([0, 1, 0, 7, 100000, 0])
    together = uniform(seeds, positions)
    alone = [uniform(seeds[i : i + 1], positions[i : i + 1]).item() for i in range(6)]
    assert together.tolist() == alone
    in_integers = [splitmix(*pair) for pair in zip(seeds.tolist(), positions.tolist(), strict=True)]
    assert_close(together, torch.tensor(in_integers), rtol=0, atol=2**-24)
    assert together[0] == together[5]
    assert together[:5].unique().numel() == 5


@pytest.mark.parametrize("vary", ["seed", "position", "both"])
def test_uniform_is_uniform(vary: str) -> None:
    count, bins = 100_000, 20
    index = torch.arange(count)
    constant = torch.full((count,), 12345)
    numbers = uniform(
        seeds=constant if vary == "position" else index,
        positions=constant if vary == "seed" else index,
    )
    assert numbers.min() > 0
    assert numbers.max() <= 1
    cells = (numbers * bins).long().clamp_max(bins - 1)
    # 19 degrees of freedom: above 52 in one of 10,000 cases; neighbours 19 apart would show as well.
    assert chi_square(cells, torch.full((bins,), 1 / bins)) < 52
    pairs = cells[:-1] // 5 * 4 + cells[1:] // 5
    assert chi_square(pairs, torch.full((16,), 1 / 16)) < 48


def test_sample_seed_separates_its_parts() -> None:
    keys = [("a", "b"), ("ab", ""), ("", "ab"), ("b", "a"), ("a", "b", ""), ("a", 1), ("a", 11), (1, "a")]
    seeds = {sample_seed(*key) for key in keys}
    assert len(seeds) == len(keys)
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert sample_seed(3, "toy", "task", 0, 1) == -9012856345965495217, "seeds must be the same on every machine"


# -- distribution and log-prob -----------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_tempered_softmax(temperature: float) -> None:
    logits = torch.randn(12, generator=torch.Generator().manual_seed(3)) * 1.5
    expected = (logits / temperature).softmax(-1)
    tokens, logprobs = draw_many(logits, 40_000, temperature=temperature)
    # 11 degrees of freedom: above 37 in one of 10,000 cases.
    assert chi_square(tokens, expected) < 37
    assert chi_square(tokens, (logits / (temperature * 1.1)).softmax(-1)) > 37, "the test sees no difference"
    assert_close(logprobs, expected.log()[tokens])


def test_positions_of_one_sample_are_independent_draws() -> None:
    rows = 40_000
    settings = params(rows, seeds=torch.full((rows,), 99))
    tokens, _ = sample(HAND.expand(rows, -1), torch.arange(rows), settings)
    assert chi_square(tokens, HAND.exp()) < 21  # 3 degrees of freedom, one of 10,000


def test_logprob_is_of_the_tempered_distribution() -> None:
    # Logits 0, ln 2, ln 4 at temperature 1/2: weights 1, 4, 16 of 21.
    logits = torch.tensor([1.0, 2.0, 4.0]).log()
    tokens, logprobs = draw_many(logits, 200, temperature=0.5)
    assert set(tokens.tolist()) == {0, 1, 2}
    assert_close(logprobs, (torch.tensor([1.0, 4.0, 16.0]) / 21).log()[tokens])
    assert logprobs.dtype == torch.float32


def test_greedy_takes_the_likeliest_and_reports_its_plain_logprob() -> None:
    tokens, logprobs = draw_many(HAND, 50, greedy=True)
    assert tokens.unique().tolist() == [1]
    assert_close(logprobs, torch.full((50,), 0.4).log())


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.tensor([float("-inf"), 0.0, float("-inf"), 0.0, float("-inf")])
    tokens, logprobs = draw_many(logits, 5000)
    assert set(tokens.tolist()) == {1, 3}
    assert_close(logprobs, torch.full((5000,), 0.5).log())


def test_the_largest_number_draws_a_possible_token() -> None:
    """fp32 sums of probabilities end a little below or above 1; the last tokens are impossible ones."""
    logits = torch.randn(64, 3000, generator=torch.Generator().manual_seed(2))
    logits[:, -500:] = float("-inf")
    assert (logits.softmax(-1).cumsum(-1)[:, -1] < 1).any()
    _, logprobs = draw(logits, torch.ones(64), params(64, vocabulary=3000))
    assert logprobs.isfinite().all()


# -- support -----------------------------------------------------------------------------------

SUPPORTS = [
    # likeliest first: .4 (token 1), .3 (token 3), .2 (token 2), .1 (token 0)
    pytest.param({"top_k": 1}, {1: 1.0}, id="k=1"),
    pytest.param({"top_k": 2}, {1: 4 / 7, 3: 3 / 7}, id="k=2"),
    pytest.param({"top_k": 4}, {1: 0.4, 3: 0.3, 2: 0.2, 0: 0.1}, id="k=all"),
    pytest.param({"top_p": 0.35}, {1: 1.0}, id="p inside the first"),
    pytest.param({"top_p": 0.6}, {1: 4 / 7, 3: 3 / 7}, id="p inside the second"),
    pytest.param({"top_p": 0.75}, {1: 4 / 9, 3: 3 / 9, 2: 2 / 9}, id="p inside the third"),
    pytest.param({"top_p": 1e-6}, {1: 1.0}, id="the first always stays"),
    pytest.param({"top_p": 0.0}, {1: 1.0}, id="the first stays at zero"),
    # Of the three kept by k the first has 4/9 = .444: enough for p = .42, which .4 would not be.
    pytest.param({"top_k": 3, "top_p": 0.42}, {1: 1.0}, id="p counts the mass k left"),
    pytest.param({"top_k": 3, "top_p": 0.5}, {1: 4 / 7, 3: 3 / 7}, id="k and p"),
    pytest.param({"top_k": 2, "top_p": 0.99}, {1: 4 / 7, 3: 3 / 7}, id="k binds"),
]


@pytest.mark.parametrize(("filters", "support"), SUPPORTS)
def test_support_of_top_k_and_top_p(filters: dict[str, float], support: dict[int, float]) -> None:
    tokens, logprobs = draw_many(HAND, 20_000, **filters)
    assert set(tokens.tolist()) == set(support)
    expected = torch.zeros(4)
    for token, probability in support.items():
        expected[token] = probability
    assert_close(logprobs, expected.log()[tokens])
    inside = expected > 0
    ranks = (inside.cumsum(0) - 1)[tokens]
    assert chi_square(ranks, expected[inside]) < 21


def test_temperature_comes_before_the_support() -> None:
    # Squared, .1 .4 .2 .3 become 1/30, 16/30, 4/30, 9/30: the first alone passes .5.
    tokens, _ = draw_many(HAND, 1000, temperature=0.5, top_p=0.5)
    assert set(tokens.tolist()) == {1}
    tokens, _ = draw_many(HAND, 1000, temperature=1.0, top_p=0.5)
    assert set(tokens.tolist()) == {1, 3}


def test_equal_logits_are_cut_in_order_of_the_token() -> None:
    tokens, _ = draw_many(torch.zeros(6), 2000, top_k=2)
    assert set(tokens.tolist()) == {0, 1}


# -- rows --------------------------------------------------------------------------------------


def mixed_rows(rows: int, order: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows with all kinds of parameters, computed in ``order``."""
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(rows, 37, generator=generator) * 2
    positions = torch.randint(0, 500, (rows,), generator=generator)
    index = torch.arange(rows)
    settings = params(
        len(order),
        seeds=(index * 104729 - 50)[order],
        temperature=(0.5 + 0.25 * (index % 5)).where(index % 4 > 0, 1.0)[order],
        top_k=(index % 3 * 4)[order],
        top_p=torch.tensor([1.0, 0.8, 0.3])[index % 3][order],
        greedy=(index % 4 == 0)[order],
        vocabulary=37,
    )
    return sample(logits[order], positions[order], settings)


def test_permuting_rows_permutes_results_exactly() -> None:
    tokens, logprobs = mixed_rows(64, torch.arange(64))
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    moved_tokens, moved_logprobs = mixed_rows(64, order)
    assert torch.equal(moved_tokens, tokens[order])
    assert torch.equal(moved_logprobs, logprobs[order])


def test_a_row_does_not_know_its_neighbours() -> None:
    tokens, logprobs = mixed_rows(64, torch.arange(64))
    for row in range(64):
        token, logprob = mixed_rows(64, torch.tensor([row]))
        # Alone, a row without filters takes the shorter way; the numbers must be the same.
        assert token == tokens[row]
        assert_close(logprob[0], logprobs[row], rtol=0, atol=1e-6)


def test_logprobs_of_a_large_vocabulary_are_those_of_log_softmax() -> None:
    """Log-probs are not built from a sum that lost digits over many small terms."""
    logits = torch.randn(8, 32_000, generator=torch.Generator().manual_seed(4)) * 3 + 20
    tokens, logprobs = sample(logits, torch.arange(8), params(8, vocabulary=32_000))
    expected = torch.log_softmax(logits.double(), -1).gather(-1, tokens[:, None])[:, 0]
    assert (logprobs - expected).abs().max() < 2e-6
