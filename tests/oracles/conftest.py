"""Two launches for the quick half, two for the long table, whatever the number of cases."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.oracles import cases
from tests.oracles.models import write_model
from tests.oracles.product import Cast, Run, Workshop

FORMATS = {
    "fp8_block": ("fp8_block", False), "fp8_block_pow2": ("fp8_block", True),
    "fp8_channel": ("fp8_channel", False), "int8": ("int8", False),
}  # fmt: skip


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """The folder that all of it happens in."""
    torch.set_num_threads(1)
    return Workshop(tmp_path_factory.mktemp("oracles"))


@pytest.fixture(scope="session")
def casts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Cast]:
    """A bf16 model whose weights do not divide into tiles, one of them with a tile and a row of zeros."""
    folder = tmp_path_factory.mktemp("formats")
    source = folder / "bf16"
    sizes = {"hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 1, "head_dim": 48}
    write_model(source, "qwen3", dtype="bfloat16", **sizes)
    tensors = load_file(source / "model.safetensors")
    gate = tensors["model.layers.0.mlp.gate_proj.weight"]
    gate[:128, :128], gate[200] = 0, 0
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    return {name: Cast(format, pow2, source, folder / name) for name, (format, pow2) in FORMATS.items()}


@pytest.fixture(scope="session")
def quick(workshop: Workshop, casts: dict[str, Cast]) -> dict[str, Run]:
    """The runs of every test run; the exports are made beside them."""
    return workshop.run(cases.QUICK + cases.SAMPLING, list(casts.values()))


@pytest.fixture(scope="session")
def table(workshop: Workshop) -> dict[str, Run]:
    """The long table."""
    return workshop.run(cases.TABLE + cases.SAMPLING_TABLE)
