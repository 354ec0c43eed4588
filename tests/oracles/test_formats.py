"""Exported 8-bit weights are what their formats define."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.oracles.conftest import FORMATS
from tests.oracles.formats import problems
from tests.oracles.product import Cast, Run

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def exported(quick: dict[str, Run], casts: dict[str, Cast]) -> dict[str, Cast]:
    """They are written in the launch of the quick runs."""
    del quick
    return casts


@pytest.mark.parametrize("name", FORMATS)
def test_codes_and_scales(exported: dict[str, Cast], name: str) -> None:
    cast = exported[name]
    before, after = _tensors(cast.source), _tensors(cast.target)
    suffix = "_scale_inv" if name.startswith("fp8_block") else "_scale"
    linears = [key for key in before if key.split(".")[-2] in LINEARS]
    assert len(linears) == 7 and after.keys() == before.keys() | {key + suffix for key in linears}
    for key, weight in before.items():
        if key not in linears:
            assert torch.equal(after[key], weight), key
            continue
        assert after[key].dtype == (torch.int8 if name == "int8" else torch.float8_e4m3fn)
        assert problems(weight, after[key], after[key + suffix], cast.powers_of_two) == [], key


def test_what_readers_are_told(exported: dict[str, Cast]) -> None:
    """The fields that engines read: DeepSeek's for tiles, compressed-tensors' for channels."""
    told = {
        name: json.loads((cast.target / "config.json").read_text())["quantization_config"]
        for name, cast in exported.items()
    }
    for name in ("fp8_block", "fp8_block_pow2"):
        assert (told[name]["quant_method"], told[name]["weight_block_size"]) == ("fp8", [128, 128])
    for name, (kind, number) in {"fp8_channel": ("float-quantized", "float"), "int8": ("int-quantized", "int")}.items():
        assert (told[name]["quant_method"], told[name]["format"]) == ("compressed-tensors", kind)
        (group,) = told[name]["config_groups"].values()
        weights = group["weights"]
        assert (weights["num_bits"], weights["type"], weights["strategy"]) == (8, number, "channel")
        assert weights["symmetric"] is True and "lm_head" in told[name]["ignore"]


def _tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {key: tensor for path in directory.glob("*.safetensors") for key, tensor in load_file(path).items()}
