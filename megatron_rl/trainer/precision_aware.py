"""AdamW with moments in bf16 or FP8 (`--use-precision-aware-optimizer`), in plain torch, without Transformer Engine.

A step computes in fp32, one piece of a parameter at a time, and stores moments with stochastic rounding: a second
moment decreases by at most 0.1 % per step (beta2 0.999), less than half a unit of either format, so rounding to nearest
would never decrease it. The random number is a hash of the value's bits and the step, so a resumed run rounds like an
uninterrupted one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rl.quantization import formats
from megatron_rl.quantization.formats import FP8, FP8_MAX, TILE

MOMENTS = ("exp_avg", "exp_avg_sq")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": FP8}
_AT_ONCE = 2**24
"""Elements of a parameter processed at a time, to limit memory; whole blocks."""
_GOLDEN = -1640531527
"""2^32 divided by the golden ratio, as int32."""
_EXPONENT = 0x7F800000


@dataclass(frozen=True)
class MomentFormat:
    """The format of one moment: fp32, bf16, or E4M3 with a power-of-two scale per 128 numbers."""

    dtype: torch.dtype
    is_second: bool
    """In E4M3 the second moment is stored as its square root, with half the exponent range, and never rounded to 0,
    because the update is divided by it.
    """

    def allocate(self, parameter: Tensor) -> tuple[Tensor, ...]:
        """Allocate zeros for a parameter of any shape: flat numbers, or codes [B, 128] and scales [B, 1] fp32."""
        if self.dtype != FP8:
            return (torch.zeros(parameter.numel(), dtype=self.dtype, device=parameter.device),)
        blocks = -(-parameter.numel() // TILE)
        codes = torch.zeros(blocks, TILE, dtype=FP8, device=parameter.device)
        return codes, torch.ones(blocks, 1, device=parameter.device)

    def read(self, stored: tuple[Tensor, ...], size: int) -> Tensor:
        """Return the first ``size`` numbers in fp32; for fp32 a view."""
        if self.dtype != FP8:
            return stored[0].float()
        codes, scales = stored
        values = (formats.fp8_numbers(codes, torch.float32) * scales).flatten()[:size]
        return values.square_() if self.is_second else values

    def write(self, values: Tensor, stored: tuple[Tensor, ...], step: int | None) -> None:
        """Store ``values`` [N] fp32, stochastically rounded with ``step``, or to nearest if None (exact after `read`).
        """
        if self.dtype == torch.bfloat16 and step is not None:
            values = stochastic_round(values, step, bits=8, smallest=2.0**-100)
        if self.dtype != FP8:
            stored[0].copy_(values)
            return
        codes, scales = stored
        values = formats.segments((values.sqrt() if self.is_second else values)[None])[0]
        scales.copy_(formats.power_of_two(formats.scale_of(formats.row_amax(values), FP8_MAX)))
        values = values / scales
        is_exact = step is None
        rounded = formats.fp8_rounded(values) if is_exact else stochastic_round(values, step, bits=4, smallest=2.0**-6)
        if self.is_second:
            rounded = torch.where(values > 0, rounded.clamp_min(2.0**-9), rounded)
        codes.copy_(rounded)


def stochastic_round(values: Tensor, step: int, bits: int, smallest: float) -> Tensor:
    """Round ``values`` [...] fp32 stochastically to ``bits`` of significand, of constant spacing below ``smallest``."""
    pattern = values.view(torch.int32)
    mixed = (pattern ^ (step * _GOLDEN & 0x7FFFFFFF)) * _GOLDEN
    mixed = (mixed ^ (mixed >> 15)) * _GOLDEN
    chance = ((mixed >> 20) & 0xFFF).float() / 4096  # with few digits, so that a whole number keeps its value below
    power = (pattern & _EXPONENT).view(torch.float32).clamp_min(smallest)
    unit = power * 2.0 ** (1 - bits)
    return (values.abs() / unit).add_(chance).floor_().mul_(unit).copysign_(values)


class PrecisionAwareAdamW(torch.optim.Optimizer):
    """torch's AdamW with other moment storage; replaces megatron's inner optimizer."""

    def __init__(self, param_groups: list[dict[str, Any]], dtypes: Mapping[str, str]) -> None:
        """``param_groups`` of the replaced optimizer; ``dtypes``: a key of `DTYPES` for each of `MOMENTS`."""
        super().__init__([torch.empty(0)], {})
        # Assigned directly: megatron's parameters may be views, which torch refuses as non-leaves.
        self.param_groups = param_groups
        self._formats = {name: MomentFormat(DTYPES[dtypes[name]], name == MOMENTS[1]) for name in MOMENTS}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all parameters with gradients, and their moments."""
        del closure
        for group in self.param_groups:
            group["step"] = int(group.get("step", 0)) + 1
            for parameter in group["params"]:
                if parameter.grad is None or not parameter.numel():
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(self._allocated(parameter))
                state["step"] = torch.tensor(float(group["step"]))  # where megatron looks for torch's Adam's
                self._move(parameter, group)

    def _allocated(self, parameter: Tensor) -> dict[str, Tensor]:
        state = {}
        for name, form in self._formats.items():
            state |= dict(zip((name, f"{name}_scale"), form.allocate(parameter), strict=False))
        return state

    def _move(self, parameter: Tensor, group: dict[str, Any]) -> None:
        (beta1, beta2), step, rate = group["betas"], group["step"], group["lr"]
        root, size = math.sqrt(1 - beta2**step), rate / (1 - beta1**step)
        gradient, weights = parameter.grad.reshape(-1), parameter.data.view(-1)
        for piece, (first, second) in self._pieces(parameter):
            g, weight = gradient[piece].float(), weights[piece]
            mean, square = (form.read(held, len(g)) for form, held in (first, second))
            mean.lerp_(g, 1 - beta1)
            square.mul_(beta2).addcmul_(g, g, value=1 - beta2)
            weight.mul_(1 - rate * group["weight_decay"])
            weight.addcdiv_(mean, (square.sqrt() / root).add_(group["eps"]), value=-size)
            for (form, held), values in ((first, mean), (second, square)):
                form.write(values, held, step)

    def _pieces(self, parameter: Tensor) -> Iterator[tuple[slice, list[tuple[MomentFormat, tuple[Tensor, ...]]]]]:
        """Yield slices of the parameter, and for each moment its format and stored part."""
        state = self.state[parameter]
        for start in range(0, parameter.numel(), _AT_ONCE):
            held = []
            for name, form in self._formats.items():
                stored = [state[key] for key in (name, f"{name}_scale") if key in state]
                a, b = (place // (TILE if form.dtype == FP8 else 1) for place in (start, start + _AT_ONCE))
                held.append((form, tuple(each[a:b] for each in stored)))
            yield slice(start, start + _AT_ONCE), held

    @torch.no_grad()
    def read_moments(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return both moments, fp32 in the shape of ``parameter``; empty before the first step."""
        if parameter not in self.state:
            return {}
        found = {name: torch.empty(parameter.numel(), device=parameter.device) for name in MOMENTS}
        for piece, held in self._pieces(parameter):
            for values, (form, stored) in zip(found.values(), held, strict=True):
                values[piece] = form.read(stored, len(values[piece]))
        return {name: values.view(parameter.shape) for name, values in found.items()}

    @torch.no_grad()
    def write_moments(self, parameter: Tensor, moments: Mapping[str, Tensor]) -> None:
        """Store ``moments`` of any float type, rounded to nearest; bit-exact for results of `read_moments`."""
        flat = [moments[name].to(parameter.device).float().reshape(-1) for name in MOMENTS]
        for piece, held in self._pieces(parameter):
            for values, (form, stored) in zip(flat, held, strict=True):
                form.write(values[piece], stored, None)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load like torch, but keep the moments' dtypes."""
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for place, state in state_dict["state"].items():
            self.state[parameters[place]] = dict(state)
