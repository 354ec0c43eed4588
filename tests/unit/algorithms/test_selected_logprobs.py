"""Selected log-probs on one rank: the shift by hand, values and gradients against torch's own log-softmax."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_rl.algorithms import logprobs as module
from megatron_rl.algorithms.logprobs import selected_logprobs

# P0 P1 A0 E as ids, and logits whose softmax is known: the row at index t says what token t + 1 is.
TOKENS = torch.tensor([2, 0, 3, 1])
ROWS = torch.tensor(
    [
        [1.0, 2.0, 3.0, 4.0],  # at P0: P1 = id 0 has 1/10
        [1.0, 1.0, 2.0, 4.0],  # at P1: A0 = id 3 has 4/8
        [1.0, 6.0, 2.0, 1.0],  # at A0: E = id 1 has 6/10
        [9.0, 1.0, 1.0, 1.0],  # at E: predicts nothing
    ]
).log()


def eager(logits: Tensor, tokens: Tensor, positions: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies in plain torch, row by row."""
    log_softmax = (logits / temperature).log_softmax(1)
    selected, entropies = [], []
    for index, position in enumerate(positions.tolist()):
        row = log_softmax[index - 1]
        selected.append(row[tokens[index]] if position else row.new_zeros(()))
        entropies.append(-(row.exp() * row).sum() if position else row.new_zeros(()))
    return torch.stack(selected), torch.stack(entropies)


def packed_example(dtype: torch.dtype, num_columns: int = 11) -> tuple[Tensor, Tensor, Tensor]:
    """Two sequences of 4 and 3 tokens: logits, tokens, positions."""
    generator = torch.Generator().manual_seed(1)
    logits = (3 * torch.randn(7, num_columns, generator=generator)).to(dtype).requires_grad_()
    tokens = torch.randint(0, 11, (7,), generator=generator)
    return logits, tokens, torch.tensor([0, 1, 2, 3, 0, 1, 2])


def test_the_shift_on_the_worked_example() -> None:
    logprobs, entropy = selected_logprobs(ROWS, TOKENS, torch.arange(4), vocab_size=4)
    # Token t's log-prob sits at index t: nothing, log 0.1, log 0.5, log 0.6.
    torch.testing.assert_close(logprobs, torch.tensor([0.0, -2.302585, -0.693147, -0.510826]))
    assert entropy is None


def test_temperature_divides_the_logits() -> None:
    # At temperature 1/2 the weights are squared: 1/(1+4+9+16), 16/(1+1+4+16), 36/(1+36+4+1).
    logprobs, entropy = selected_logprobs(ROWS, TOKENS, torch.arange(4), vocab_size=4, temperature=0.5)
    expected = torch.tensor([1.0, 1 / 30, 16 / 22, 36 / 42]).log()
    torch.testing.assert_close(logprobs, expected)


def test_entropy_is_of_the_distribution_the_token_was_drawn_from() -> None:
    logprobs, entropy = selected_logprobs(ROWS, TOKENS, torch.arange(4), vocab_size=4, entropy="detached")
    # A0 comes from (1, 1, 2, 4)/8: 2/8 log 8 + 1/4 log 4 + 1/2 log 2 = 1.75 log 2.
    assert entropy[0].item() == 0.0
    assert entropy[2].item() == pytest.approx(1.75 * math.log(2.0), rel=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_elements", [2**20, 22, 1])
def test_values_and_gradients_equal_plain_torch(
    temperature: float, chunk_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CPU_CHUNK_ELEMENTS", chunk_elements)
    logits, tokens, positions = packed_example(torch.float32)
    logprobs, entropy = selected_logprobs(
        logits, tokens, positions, vocab_size=11, temperature=temperature, entropy="differentiable"
    )
    expected_logprobs, expected_entropy = eager(logits, tokens, positions, temperature)
    torch.testing.assert_close(logprobs, expected_logprobs)
    torch.testing.assert_close(entropy, expected_entropy)

    weights = torch.linspace(-1.0, 2.0, 7)
    (gradient,) = torch.autograd.grad((weights * (logprobs + 0.3 * entropy)).sum(), logits)
    (expected,) = torch.autograd.grad((weights * (expected_logprobs + 0.3 * expected_entropy)).sum(), logits)
    torch.testing.assert_close(gradient, expected)
    # The last token of a sequence predicts nothing, least of all the first token of the next one.
    assert gradient[3].tolist() == gradient[6].tolist() == [0.0] * 11


def test_gradcheck() -> None:
    logits, tokens, positions = packed_example(torch.float64)

    def both(logits: Tensor) -> tuple[Tensor, Tensor]:
        return selected_logprobs(
            logits, tokens, positions, vocab_size=11, temperature=0.7, entropy="differentiable"
        )

    assert torch.autograd.gradcheck(both, (logits,))


def test_bf16_logits_are_worked_on_in_fp32() -> None:
    logits, tokens, positions = packed_example(torch.bfloat16)
    logprobs, entropy = selected_logprobs(logits, tokens, positions, vocab_size=11)
    expected, _ = eager(logits.float(), tokens, positions, 1.0)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, expected)
    logprobs.sum().backward()
    assert logits.grad.dtype == torch.bfloat16


def test_padding_columns_have_probability_and_gradient_zero() -> None:
    logits, tokens, positions = packed_example(torch.float32)
    padded = torch.cat([logits.detach(), torch.full((7, 5), 50.0)], dim=1).requires_grad_()
    logprobs, entropy = selected_logprobs(padded, tokens, positions, vocab_size=11, entropy="differentiable")
    expected, expected_entropy = eager(logits, tokens, positions, 1.0)
    torch.testing.assert_close(logprobs, expected)
    torch.testing.assert_close(entropy, expected_entropy)
    (logprobs + entropy).sum().backward()
    assert padded.grad[:, 11:].abs().max() == 0


def test_detached_entropy_has_no_gradient() -> None:
    logits, tokens, positions = packed_example(torch.float32)
    logprobs, entropy = selected_logprobs(logits, tokens, positions, vocab_size=11, entropy="detached")
    assert logprobs.requires_grad
    assert not entropy.requires_grad
    (gradient,) = torch.autograd.grad(logprobs.sum(), logits)
    alone, _ = selected_logprobs(logits, tokens, positions, vocab_size=11)
    assert torch.equal(gradient, torch.autograd.grad(alone.sum(), logits)[0])


def test_impossible_tokens_are_minus_infinity_and_poison_no_gradient() -> None:
    logits, tokens, positions = packed_example(torch.float32)
    with torch.no_grad():
        logits[1, tokens[2]] = -torch.inf
    tokens[3] = 11  # beyond the vocabulary
    logprobs, entropy = selected_logprobs(logits, tokens, positions, vocab_size=11, entropy="differentiable")
    assert logprobs[[2, 3]].tolist() == [-torch.inf, -torch.inf]
    assert entropy.isfinite().all()
    trusted = torch.where(logprobs.isfinite(), logprobs, 0.0)
    (trusted + entropy).sum().backward()
    assert logits.grad.isfinite().all()


def test_the_host_reads_nothing() -> None:
    # A meta tensor has no values: a read raises, where on a GPU it would make the host wait.
    logits, tokens, positions = (tensor.detach().to("meta") for tensor in packed_example(torch.bfloat16))
    logits.requires_grad_()
    logprobs, entropy = selected_logprobs(logits, tokens, positions, vocab_size=9, entropy="differentiable")
    (logprobs + entropy).sum().backward()
    assert logits.grad.shape == logits.shape


def test_one_token_has_no_logprob() -> None:
    logprobs, entropy = selected_logprobs(torch.randn(1, 4), torch.tensor([2]), torch.tensor([0]), vocab_size=4)
    assert logprobs.tolist() == [0.0]
