"""The kernels between a layer's products against eager torch: in Triton's interpreter here, compiled in tests/gpu.

The interpreter must be switched on before Triton's import, so a process of its own runs `KernelChecks`. It truncates
to bf16 where a GPU rounds, so fp32 is the exact check there, and bf16 may be two units in the last place of the
largest numbers off.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as functional

from megatron_rl.models.attention.kv_format import FP8, KVFormat
from megatron_rl.models.gradients import rotate
from megatron_rl.quantization import formats
from megatron_rl.quantization.recipe import PackedActivations, Packing
from tests.support.interpreter import INTERPRETED, run_interpreted

EXACT = {"rtol": 1e-6, "atol": 1e-6}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
ROWS_FP8, ROWS_INT8 = Packing(formats.FP8, 112), Packing(torch.int8, 112)
SEGMENTS, POWERS = (Packing(formats.FP8, 384, in_segments=True, power_of_two=power) for power in (False, True))


def randn(*size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def near(actual: torch.Tensor, expected: torch.Tensor, tolerance: dict[str, float]) -> None:
    torch.testing.assert_close(actual.cpu(), expected, **tolerance)


SMOOTHED = Packing(torch.int8, 112, smoothing=0.5 + torch.arange(100) / 50)
IN_TWO_PARTS = [
    Packing(formats.FP8, 1200), Packing(torch.int8, 1200, smoothing=0.5 + torch.arange(1188) / 600)
]  # fmt: skip


def check_packed(packed: PackedActivations, numbers: torch.Tensor, packing: Packing) -> None:
    """The scales of eager torch, and its codes but for a few on the border between two."""
    largest = 127.0 if packing.code_type == torch.int8 else 448.0
    if packing.smoothing is not None:
        numbers = numbers / packing.smoothing.cpu()
    cut = formats.segments(numbers) if packing.in_segments else numbers[:, None]
    scales = formats.scale_of(formats.row_amax(cut), largest)
    scales = formats.power_of_two(scales) if packing.power_of_two else scales
    encode = formats.integer_codes if packing.code_type == torch.int8 else formats.fp8_codes
    wanted = encode(cut, scales).flatten(1).float()
    codes = packed.codes.cpu().float()
    assert packed.codes.dtype == packing.code_type and codes.shape == (numbers.shape[0], packing.columns)
    near(packed.scales, scales[..., 0], EXACT)
    assert not packing.in_segments or packed.scales.stride(0) == 1, "cuBLAS takes them column by column"
    assert not codes[:, wanted.shape[1] :].any(), "the padding is not zero"
    codes = codes[:, : wanted.shape[1]]
    assert (codes == wanted).float().mean() > 0.98
    step = {"rtol": 0.0, "atol": 1.0} if packing.code_type == torch.int8 else {"rtol": 2**-3, "atol": 2**-9}
    torch.testing.assert_close(codes, wanted, **step)


class KernelChecks:
    """Subclasses name the device."""

    device: str
    paged: str
    """The attention backend of whole rollouts."""
    low: dict[str, float]
    """Tolerance in bf16."""

    def _tolerance(self, dtype: torch.dtype) -> dict[str, float]:
        return EXACT if dtype == torch.float32 else self.low

    # -- residual + output, norm, quantisation -------------------------------------------------

    @DTYPES
    @pytest.mark.parametrize("case", ["first", "added", "biased"])
    def test_residual_and_norm(self, dtype, case):
        from megatron_rl.models.kernels import add_norm

        residual, output, bias, weight = self._stream(dtype)
        output, bias = (None if case == "first" else output), (bias if case == "biased" else None)
        wanted = residual if output is None else (output if bias is None else output + bias) + residual
        before = None if output is None else output.to(self.device)
        stream, normed = add_norm(residual.to(self.device), before, self._to(bias), self._to(weight), 1e-5, None)
        near(stream, wanted, self._tolerance(dtype))
        near(normed, functional.rms_norm(wanted, (100,), weight, 1e-5), self._tolerance(dtype))
        assert before is None or stream.data_ptr() == before.data_ptr(), "the sum takes no memory of its own"

    @pytest.mark.parametrize("packing", [ROWS_FP8, ROWS_INT8, SMOOTHED, SEGMENTS, POWERS])
    def test_norm_and_codes(self, packing):
        from megatron_rl.models.kernels import add_norm

        packing = replace(packing, smoothing=self._to(packing.smoothing))
        columns = 300 if packing.in_segments else 100
        residual, output, _, weight = self._stream(torch.float32, columns)
        wanted = output + residual
        stream, packed = add_norm(*map(self._to, (residual, output)), None, self._to(weight), 1e-5, packing)
        near(stream, wanted, EXACT)
        check_packed(packed, functional.rms_norm(wanted, (columns,), weight, 1e-5), packing)

    # -- silu(gate) x up -----------------------------------------------------------------------

    @DTYPES
    @pytest.mark.parametrize("columns", [100, 1500])
    def test_gate(self, dtype, columns):
        from megatron_rl.models.kernels import gate_up

        inner = 3 * randn(3, 2 * columns, dtype=dtype)
        gate, up = inner.chunk(2, -1)
        near(gate_up(inner.to(self.device), None), functional.silu(gate) * up, self._tolerance(dtype))

    @pytest.mark.parametrize(
        "packing",
        [ROWS_FP8, ROWS_INT8, SMOOTHED, *IN_TWO_PARTS, SEGMENTS, POWERS, Packing(formats.FP8, 1280, in_segments=True)],
    )
    def test_gate_and_codes(self, packing):
        """The largest number of a row that is computed in two parts may be in either."""
        from megatron_rl.models.kernels import gate_up

        packing = replace(packing, smoothing=self._to(packing.smoothing))
        columns = packing.columns - (84 if packing.in_segments else 12)
        inner = 3 * randn(3, 2 * columns)
        for row, column in enumerate((0, columns - 1)):
            inner[row, column] = inner[row, columns + column] = 20.0
        gate, up = inner.chunk(2, -1)
        check_packed(gate_up(inner.to(self.device), packing), functional.silu(gate) * up, packing)

    @DTYPES
    @pytest.mark.parametrize("columns", [100, 1500])
    def test_gradient_of_the_gate(self, dtype, columns):
        from megatron_rl.models.blocks.dense import swiglu
        from megatron_rl.models.kernels import gate_up_gradient

        inner, grad = 3 * randn(3, 2 * columns, dtype=dtype), randn(3, columns, seed=1, dtype=dtype)
        inner[0, 0], inner[0, 1] = 100.0, -100.0
        (wanted,) = torch.autograd.grad(swiglu(inner.requires_grad_()), inner, grad)
        actual = gate_up_gradient(*map(self._to, (inner.detach(), grad)))
        near(actual, wanted, self._tolerance(dtype))

    # -- heads ---------------------------------------------------------------------------------

    @DTYPES
    @pytest.mark.parametrize(
        ("share", "width", "rotated"), [(4, 16, 16), (1, 64, 64), (7, 24, 24), (2, 32, 16)],
        ids=["grouped", "alone", "odd", "partial"],
    )  # fmt: skip
    @pytest.mark.parametrize("normed", [False, True], ids=["", "normed"])
    @pytest.mark.parametrize("biased", [False, True], ids=["", "biased"])
    def test_rotation_and_cache(self, dtype, share, width, rotated, normed, biased):
        self._check_heads(dtype, share, width, rotated, normed, stored=None, biased=biased)

    def test_a_cache_of_codes(self):
        self._check_heads(torch.float32, 4, 16, 16, True, stored=FP8)

    def test_a_bf16_cache_of_an_fp32_model(self):
        self._check_heads(torch.float32, 4, 16, 16, False, stored=torch.bfloat16)

    def test_a_key_that_is_no_number_stays_none(self):
        from megatron_rl.models.kernels import rotate_store

        mixed, cos, sin = randn(1, 1, 3, 16), randn(1, 1, 1, 16), randn(1, 1, 1, 16)
        mixed[0, 0, 2, 5] = float("nan")
        mixed[0, 0, 2, 6] = 1e9
        stored = self._stored(KVFormat(1, 1, torch.float32, FP8, torch.device(self.device)), 1, 16, torch.tensor([0]))
        rotate_store(*map(self._to, (mixed, cos, sin)), None, None, *stored)
        value = stored[1].view(FP8).float()[0, 0, 0].cpu()
        assert value[5].isnan() and value[6] == 448.0 and value.isnan().sum() == 1

    # -- a whole rollout -----------------------------------------------------------------------

    @pytest.mark.parametrize(("model", "recipe"), [("biased", "none"), ("normed", "int8")])
    def test_a_rollout(self, one_rank, monkeypatch, model, recipe):
        """The same greedy tokens as eager torch, and log-probs within 1e-5; int8 codes may round another way.

        Of the second rollout: the first one is audited, and its linears get no packed activations.
        """
        from megatron_rl.inference import rollout_engine as module
        from megatron_rl.models.rollout_ops import RolloutOps
        from tests.support.generation import largest_gap, rollout_engine, tokens
        from tests.support.quantized import complete, quantizable_policy, rollout_quantization, short_requests

        changes = {"qk_layernorm": True, "add_qkv_bias": False} if model == "normed" else {}
        policy = quantizable_policy(attention_backend=self.paged, **changes)
        requests, results = short_requests(2, greedy=True, max_new_tokens=3), []
        for kernels in (False, True):
            monkeypatch.setattr(module, "RolloutOps", lambda fused, kernels=kernels: RolloutOps(fused=kernels))
            quantization = rollout_quantization(policy, recipe)
            engine = rollout_engine(policy)
            for _ in range(2):
                last = complete(policy, engine, quantization, requests)
            results.append(last)
        assert tokens(results[0]) == tokens(results[1])
        assert largest_gap(*results) < (1e-5 if recipe == "none" else 2e-2)

    # -- shared --------------------------------------------------------------------------------

    def _to(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.to(self.device)

    def _stream(self, dtype: torch.dtype, columns: int = 100) -> list[torch.Tensor]:
        """Residual, output, bias and the norm's weight."""
        return [
            randn(3, columns, seed=1, dtype=dtype), 2 * randn(3, columns, seed=2, dtype=dtype),
            randn(columns, seed=3, dtype=dtype), 1 + randn(columns, seed=4, dtype=dtype),
        ]  # fmt: skip

    def _stored(self, numbers: KVFormat, groups: int, width: int, cells: torch.Tensor) -> tuple[torch.Tensor, ...]:
        keys, values = (torch.zeros(4, 16, groups, width, dtype=numbers.storage, device=self.device) for _ in range(2))
        return keys, values, cells.to(self.device), *numbers.scales(0)

    def _check_heads(self, dtype, share, width, rotated, normed, stored, biased=False):
        from megatron_rl.models.kernels import rotate_store

        groups, cells = 2, torch.tensor([33, 0, 62])
        # A slice of a wider product, as projections of several layers in one would give.
        mixed = randn(3, groups * (share + 2) * width + 8, dtype=dtype)[:, 8:].unflatten(1, (groups, share + 2, width))
        cos, sin = randn(3, 1, 1, rotated, seed=5, dtype=dtype), randn(3, 1, 1, rotated, seed=6, dtype=dtype)
        weights = [1 + randn(width, seed=seed, dtype=dtype) for seed in (7, 8)]
        bias = randn(groups * (share + 2) * width, seed=9, dtype=dtype) if biased else None
        whole = mixed if bias is None else mixed + bias.view(mixed.shape[1:])
        query, key, value = whole[:, :, :share], whole[:, :, share], whole[:, :, share + 1]
        if normed:
            query, key = (
                functional.rms_norm(heads, (width,), weight, 1e-5)
                for heads, weight in zip((query, key), weights, strict=True)
            )
        query = rotate(query.reshape(3, 1, groups * share, width), cos, sin)
        key, value = rotate(key[:, None], cos, sin), value[:, None]
        numbers = KVFormat(1, groups, dtype, stored, torch.device("cpu"))
        numbers.calibrate(0, key, value)
        there = KVFormat(1, groups, dtype, stored, torch.device(self.device))
        if stored == FP8:
            there.key_scales.copy_(numbers.key_scales), there.value_scales.copy_(numbers.value_scales)
        stored_in = self._stored(there, groups, width, cells)
        norms = [SimpleNamespace(weight=self._to(weight), eps=1e-5) if normed else None for weight in weights]
        actual = rotate_store(*map(self._to, (mixed, cos, sin)), *norms, *stored_in, bias=self._to(bias))
        near(actual, query, self._tolerance(dtype))
        for cached, wanted in zip(stored_in[:2], numbers.pack(0, key, value), strict=True):
            rows = cached.cpu().view(-1, groups, width)
            if stored == FP8:
                rows, wanted = rows.view(FP8), wanted.view(FP8)
            rows, wanted = rows.float(), wanted[:, 0].float()
            step = {"rtol": 2**-3, "atol": 2**-9} if stored == FP8 else self._tolerance(stored or dtype)
            near(rows[cells], wanted, step)
            rows = rows.clone()
            rows[cells] = 0
            assert not rows.any(), "something lies where no token is"


if INTERPRETED:

    @pytest.mark.each_value
    class TestInterpreted(KernelChecks):
        device, paged = "cpu", "paged"
        low = {"rtol": 2**-6, "atol": 2**-4}

else:

    @pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
    def test_the_kernels_in_tritons_interpreter():
        run_interpreted(__file__)
