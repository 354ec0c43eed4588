"""AdamW with moments in bf16 and FP8: stored numbers by hand, training beside fp32 moments, a checkpoint to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_rl.trainer.precision_aware import DTYPES, MOMENTS, MomentFormat, PrecisionAwareAdamW, stochastic_round

FP8, BF16 = DTYPES["fp8"], DTYPES["bf16"]


def stored(values: Tensor, dtype: torch.dtype, is_second: bool = False, step: int | None = None) -> tuple[Tensor, ...]:
    form = MomentFormat(dtype, is_second)
    held = form.allocate(values)
    form.write(values, held, step)
    return held


def read(held: tuple[Tensor, ...], size: int, is_second: bool = False) -> list[float]:
    return MomentFormat(held[0].dtype, is_second).read(held, size).tolist()


def test_fp8_by_hand() -> None:
    values = torch.zeros(130)
    values[:4] = torch.tensor([900.0, -3.3, 0.01, 448.0])
    values[128:] = torch.tensor([0.5, -448.0])
    held = stored(values, FP8)
    assert held[1].flatten().tolist() == [4.0, 1.0], "900 / 448 is rounded up to a power of two, 128 numbers a scale"
    # In units of 4: 225 -> 224, 0.825 -> 0.8125, 0.0025 -> 2^-9, 112.
    assert read(held, 130)[:4] == [896.0, -3.25, 4 * 2.0**-9, 448.0]
    assert read(held, 130)[128:] == [0.5, -448.0]


def test_a_second_moment_is_kept_by_its_root_and_never_vanishes() -> None:
    values = torch.tensor([448.0**2, 9.0, 1e-9, 0.0])
    held = stored(values, FP8, is_second=True)
    assert held[1].item() == 1.0
    assert read(held, 4, is_second=True) == [448.0**2, 9.0, 2.0**-18, 0.0]
    for step in range(20):
        held = stored(values, FP8, is_second=True, step=step)
        assert read(held, 4, is_second=True)[2] == 2.0**-18, "by chance it would be 0, and the update infinite"


@pytest.mark.parametrize(("bits", "smallest", "low", "high"), [(8, 2.0**-100, 1.0, 1.0 + 2**-7), (4, 2.0**-6, 8.0, 9.0),
                                                               (4, 2.0**-6, 2.0**-9, 2.0**-8)])  # fmt: skip
def test_rounding_by_chance_is_right_on_average(bits: int, smallest: float, low: float, high: float) -> None:
    spread = torch.rand(4096, generator=torch.Generator().manual_seed(0)) * 1e-3
    values = low + (high - low) * (0.25 + spread)
    found = stochastic_round(values, 7, bits, smallest)
    assert set(found.tolist()) == {low, high}
    assert (found == high).float().mean().item() == pytest.approx(0.25, abs=0.03)
    assert torch.equal(stochastic_round(-values, 7, bits, smallest).abs().unique(), found.unique())
    assert torch.equal(found, stochastic_round(values, 7, bits, smallest)), "a resumed run must round alike"
    other = stochastic_round(values, 8, bits, smallest)
    assert not torch.equal(found, other), "a number that stays must not be rounded alike for ever"
    assert torch.equal(stochastic_round(found, 9, bits, smallest), found), "what fits stays"


@pytest.mark.parametrize(("dtype", "tolerance"), [(BF16, 0.02), (FP8, 0.06)])
def test_a_moment_decays_without_gradients(dtype: torch.dtype, tolerance: float) -> None:
    """Rounded to nearest, 0.999 of a number of either format is that number."""
    form = MomentFormat(dtype, True)
    values = 2.0 ** (6 * torch.rand(1024, generator=torch.Generator().manual_seed(2)))
    held = form.allocate(values)
    form.write(values, held, None)
    start = form.read(held, 1024).clone()
    for step in range(1, 201):
        form.write(form.read(held, 1024) * 0.999, held, step)
    assert (form.read(held, 1024) / start).mean().item() == pytest.approx(0.999**200, rel=tolerance)


@pytest.mark.parametrize("is_second", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP8])
def test_what_was_read_is_stored_again_to_the_bit(dtype: torch.dtype, is_second: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(5000, generator=generator) * 10.0 ** torch.randint(-18, 3, (5000,), generator=generator)
    values = values.square() if is_second else values
    form, first = MomentFormat(dtype, is_second), stored(values, dtype, is_second, step=5)
    numbers = form.read(first, 5000).clone()
    again = stored(numbers, dtype, is_second)
    assert torch.equal(form.read(again, 5000), numbers)


def quadratic(dtypes: tuple[str, str] | None, steps: int) -> tuple[list[Tensor], torch.optim.Optimizer]:
    """Two parameters that noisy gradients pull to a target, by torch's AdamW (None) or by ours."""
    generator = torch.Generator().manual_seed(1)
    parameters = [torch.randn(shape, generator=generator).requires_grad_() for shape in ((300,), (40, 10))]
    scales = [10.0 ** (4 * torch.rand(p.shape, generator=generator) - 3) for p in parameters]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.999), weight_decay=0.01)
    if dtypes is not None:
        optimizer = PrecisionAwareAdamW(optimizer.param_groups, dict(zip(MOMENTS, dtypes, strict=True)))
    for _ in range(steps):
        for parameter, scale in zip(parameters, scales, strict=True):
            parameter.grad = scale * (parameter.detach() + 0.5 * torch.randn(parameter.shape, generator=generator))
        optimizer.step()
    return [parameter.detach() for parameter in parameters], optimizer


def test_with_fp32_moments_it_is_torchs() -> None:
    ours, theirs = quadratic(("fp32", "fp32"), 50)[0], quadratic(None, 50)[0]
    for mine, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("dtypes", "tolerance"), [(("bf16", "bf16"), 0.01), (("bf16", "fp32"), 0.01),
                                                   (("fp8", "bf16"), 0.03), (("fp8", "fp8"), 0.08)])  # fmt: skip
def test_weights_stay_near_those_of_fp32_moments(dtypes: tuple[str, str], tolerance: float) -> None:
    """Relative to how far 200 steps moved them."""
    start, exact, ours = (quadratic(*given)[0] for given in ((None, 0), (None, 200), (dtypes, 200)))
    for first, wanted, mine in zip(start, exact, ours, strict=True):
        assert 0 < (mine - wanted).norm() / (wanted - first).norm() < tolerance
