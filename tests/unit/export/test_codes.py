"""Codes and scales: those of the rollouts, read back by each format's published rule, within its error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_rl.checkpoint.hf.quantize import convert, target_format
from megatron_rl.registry import RECIPES
from tests.unit.export.conftest import read_tensors, write_tensors

TARGETS = [("fp8_block", False), ("fp8_block", True), ("fp8_channel", False), ("int8", False)]
RECIPE_OF = {("fp8_block", False): "fp8_block", ("fp8_block", True): "fp8_block_pow2", ("fp8_channel", False): "fp8",
           ("int8", False): "int8"}  # fmt: skip
FAMILIES = ["qwen2", "qwen3", "llama", "qwen3_moe"]
LINEAR = "model.layers.0.mlp.up_proj.weight"


def dequantised(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """code x scale: a row's, or that of the 128 x 128 tile the element lies in. By index, unlike the library."""
    rows, columns = codes.shape
    if scales.shape == (rows, 1):
        return codes.float() * scales
    row, column = torch.arange(rows) // 128, torch.arange(columns) // 128
    return codes.float() * scales[row][:, column]


def error_bound(weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Half a step: 2^-4 of an E4M3 number and 2^-10 scales below its normal range; half a scale in INT8."""
    unit = dequantised(torch.ones_like(codes), scales)
    if codes.dtype == torch.int8:
        return unit / 2 * (1 + 1e-5)
    return torch.maximum(weight.float().abs() / 16, unit * 2**-10) * (1 + 1e-5)


def scale_of(tensors: dict[str, torch.Tensor], name: str, form: str) -> torch.Tensor:
    return tensors[name + ("_scale_inv" if form == "fp8_block" else "_scale")]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("form", "pow2"), TARGETS)
def test_every_linear_has_the_rollouts_codes_and_scales(
    models: Callable[[str], Path], tmp_path: Path, family: str, form: str, pow2: bool
) -> None:
    source = models(family)
    report = convert(source, tmp_path / "out", target_format(form, pow2))
    before, after = read_tensors(source), read_tensors(tmp_path / "out")
    recipe = RECIPES.get(RECIPE_OF[form, pow2])
    assert len(report.converted) == (2 * (4 + 3 * 4) if family == "qwen3_moe" else 2 * 7)
    for name in report.converted:
        weight, codes, scales = before[name], after[name], scale_of(after, name, form)
        expected = recipe.quantize(weight)
        assert torch.equal(codes.view(torch.uint8), expected.codes[: len(weight), : weight.shape[1]].view(torch.uint8))
        assert scales.dtype == torch.float32
        assert torch.equal(scales, expected.scales)
        values = dequantised(codes, scales)
        assert torch.equal(values, recipe.dequantize(expected))
        assert bool(((values - weight.float()).abs() <= error_bound(weight, codes, scales)).all())
    for name in report.kept:
        assert torch.equal(before[name], after[name])
    assert len(after) == len(before) + len(report.converted)


@pytest.mark.parametrize(("form", "pow2"), TARGETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(300, 200), (1, 129), (640, 128), (128, 1), (257, 384)])
@pytest.mark.parametrize("piece", [1, 30000])  # 128 rows a piece; 150 to 234, were they not cut to whole tiles
def test_pieces_of_rows_give_the_codes_of_the_whole(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    piece: int,
    form: str,
    pow2: bool,
    dtype: torch.dtype,
    shape: tuple[int, int],
) -> None:
    monkeypatch.setattr("megatron_rl.checkpoint.hf.quantize.PIECE_NUMBERS", piece)
    weight = (torch.randn(shape) * torch.logspace(-2, 1, shape[0])[:, None]).to(dtype)
    write_tensors(tmp_path / "in", {LINEAR: weight})
    convert(tmp_path / "in", tmp_path / "out", target_format(form, pow2))
    after, expected = read_tensors(tmp_path / "out"), RECIPES.get(RECIPE_OF[form, pow2]).quantize(weight)
    rows, columns = shape
    assert torch.equal(after[LINEAR].view(torch.uint8), expected.codes[:rows, :columns].contiguous().view(torch.uint8))
    scales = scale_of(after, LINEAR, form)
    assert scales.shape == ((-(-rows // 128), -(-columns // 128)) if form == "fp8_block" else (rows, 1))
    assert torch.equal(scales, expected.scales[: scales.shape[0]])


def test_numbers_worked_out_by_hand(tmp_path: Path) -> None:
    weight = torch.zeros(2, 130)
    weight[0, :4] = torch.tensor([448.0, 1.0, -17.0, 2.0**-10])  # scale 1; 17 is halfway from 16 to 18: to even, 16
    weight[1, 128:] = torch.tensor([-896.0, 3.0])  # the second tile: scale 2, 1.5
    write_tensors(tmp_path / "in", {LINEAR: weight})
    convert(tmp_path / "in", tmp_path / "out", target_format("fp8_block", False))
    after = read_tensors(tmp_path / "out")
    assert after[LINEAR + "_scale_inv"].tolist() == [[1.0, 2.0]]
    codes = after[LINEAR].float()
    assert codes[0, :4].tolist() == [448.0, 1.0, -16.0, 0.0]
    assert codes[1, 128:].tolist() == [-448.0, 1.5]
    assert int(codes.count_nonzero()) == 5


def test_numbers_worked_out_by_hand_in_int8(tmp_path: Path) -> None:
    weight = torch.tensor([[127.0, 2.5, -3.4, 0.4], [-254.0, 1.0, 3.0, 0.0]])  # scales 1 and 2
    write_tensors(tmp_path / "in", {LINEAR: weight})
    convert(tmp_path / "in", tmp_path / "out", target_format("int8", False))
    after = read_tensors(tmp_path / "out")
    assert after[LINEAR + "_scale"].tolist() == [[1.0], [2.0]]
    assert after[LINEAR].tolist() == [[127, 2, -3, 0], [-127, 0, 2, 0]]  # halves to even


def test_the_bound_tells_a_wrong_scale(models: Callable[[str], Path], tmp_path: Path) -> None:
    """Control: a scale an eighth off, or two tiles' scales exchanged, fails where the right ones pass."""
    convert(models("qwen3"), tmp_path / "out", target_format("fp8_block", False))
    after, weight = read_tensors(tmp_path / "out"), read_tensors(models("qwen3"))[LINEAR]
    codes, scales = after[LINEAR], after[LINEAR + "_scale_inv"]
    for wrong in (scales * 1.125, scales.flip(0)):
        off = (dequantised(codes, wrong) - weight.float()).abs()
        assert not bool((off <= error_bound(weight, codes, wrong)).all())


def test_powers_of_two_are_powers_of_two_and_false_means_false(models: Callable[[str], Path], tmp_path: Path) -> None:
    convert(models("qwen3"), tmp_path / "plain", target_format("fp8_block", False))
    convert(models("qwen3"), tmp_path / "pow2", target_format("fp8_block", True))
    plain, pow2 = read_tensors(tmp_path / "plain"), read_tensors(tmp_path / "pow2")
    names = [name for name in plain if name.endswith("_scale_inv")]
    assert names
    for name in names:
        assert bool((torch.frexp(pow2[name]).mantissa == 0.5).all())
        assert bool((torch.frexp(plain[name]).mantissa != 0.5).any())
        ratio = pow2[name] / plain[name]
        assert bool((ratio >= 1).all()) and bool((ratio < 2).all())
    configs = [json.loads((tmp_path / d / "config.json").read_text())["quantization_config"] for d in ("plain", "pow2")]
    assert "scale_fmt" not in configs[0]
    assert configs[1] == {**configs[0], "scale_fmt": "ue8m0"}


def test_the_rollouts_fused_weights_have_the_same_tiles() -> None:
    """fc1 is gate over up, linear_qkv a group's queries, keys and values in turn: whole tiles with heads of 128."""
    heads, groups, size, hidden = 4, 2, 128, 256
    q, k, v = (torch.randn(count * size, hidden) * scale for count, scale in ((heads, 1), (groups, 3), (groups, 9)))
    recipe = RECIPES.get("fp8_block")
    parts = (q.view(groups, -1, hidden), k.view(groups, -1, hidden), v.view(groups, -1, hidden))
    fused = recipe.quantize(torch.cat(parts, dim=1).reshape(-1, hidden))
    apart = [recipe.quantize(part) for part in (q, k, v)]
    codes = torch.cat([part.codes.view(torch.uint8).view(groups, -1, hidden) for part in apart], dim=1)
    scales = torch.cat([part.scales.view(groups, -1, hidden // 128) for part in apart], dim=1)
    assert torch.equal(fused.codes.view(torch.uint8), codes.view(-1, hidden))
    assert torch.equal(fused.scales, scales.view(-1, hidden // 128))
