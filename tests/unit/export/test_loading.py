"""What is written loads elsewhere: in transformers where its extras are installed, else the settings are compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers.utils import import_utils

from megatron_rl.checkpoint.hf.quantize import convert, target_format
from tests.unit.export.conftest import read_tensors, write_model
from tests.unit.export.test_codes import dequantised

DENSE = ["qwen2", "qwen3", "llama"]


def _loaded_weights(directory: Path) -> dict[str, torch.Tensor]:
    """As transformers has them once it has run: it decompresses in or before the first forward pass."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    with torch.no_grad():
        assert bool(model(torch.arange(12)[None]).logits.isfinite().all())
    return dict(model.state_dict())


@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("family", DENSE)
def test_fp8_block_loads_in_transformers(
    models: Callable[[str], Path], tmp_path: Path, family: str, pow2: bool
) -> None:
    """On a machine without a GPU it dequantises while loading; with one it would keep the codes."""
    pytest.importorskip("accelerate", reason="transformers loads FP8 only with accelerate")
    if torch.cuda.is_available():
        pytest.skip("on a GPU transformers keeps the codes")
    report = convert(models(family), tmp_path / "out", target_format("fp8_block", pow2))
    loaded, written = _loaded_weights(tmp_path / "out"), read_tensors(tmp_path / "out")
    for name in report.converted:
        assert torch.equal(loaded[name], dequantised(written[name], written[name + "_scale_inv"]).bfloat16())
    for name in report.kept:
        assert torch.equal(loaded[name], written[name])


def test_experts_in_fp8_block_load_in_transformers(models: Callable[[str], Path], tmp_path: Path) -> None:
    """It fuses them into one tensor a layer, gate over up."""
    pytest.importorskip("accelerate", reason="transformers loads FP8 only with accelerate")
    if torch.cuda.is_available():
        pytest.skip("on a GPU transformers keeps the codes")
    convert(models("qwen3_moe"), tmp_path / "out", target_format("fp8_block", False))
    loaded, written = _loaded_weights(tmp_path / "out"), read_tensors(tmp_path / "out")

    def values(layer: int, expert: int, kind: str) -> torch.Tensor:
        name = f"model.layers.{layer}.mlp.experts.{expert}.{kind}_proj.weight"
        return dequantised(written[name], written[name + "_scale_inv"]).bfloat16()

    for layer in range(2):
        experts = f"model.layers.{layer}.mlp.experts."
        for expert in range(4):
            gate_up = torch.cat([values(layer, expert, "gate"), values(layer, expert, "up")])
            assert torch.equal(loaded[experts + "gate_up_proj"][expert], gate_up)
            assert torch.equal(loaded[experts + "down_proj"][expert], values(layer, expert, "down"))
        router = f"model.layers.{layer}.mlp.gate.weight"
        assert torch.equal(loaded[router], written[router])


@pytest.mark.parametrize("form", ["fp8_channel", "int8"])
@pytest.mark.parametrize("family", DENSE)
def test_compressed_tensors_load_in_transformers(
    models: Callable[[str], Path], tmp_path: Path, family: str, form: str
) -> None:
    pytest.importorskip("accelerate", reason="compressed-tensors needs accelerate")
    pytest.importorskip("compressed_tensors", reason="transformers loads this format with compressed-tensors")
    report = convert(models(family), tmp_path / "out", target_format(form, False))
    loaded, written = _loaded_weights(tmp_path / "out"), read_tensors(tmp_path / "out")
    for name in report.converted:
        exact = dequantised(written[name], written[name + "_scale"])
        # compressed-tensors rounds scale and product to the model's bf16: 2^-8 each
        assert torch.allclose(loaded[name].float(), exact, rtol=2**-7, atol=0)
    for name in report.kept:
        assert torch.equal(loaded[name], written[name])


def test_the_versions_given_are_those_that_transformers_asks_for() -> None:
    root = Path(__file__).parents[3]
    for name, least in (
        ("accelerate", import_utils.ACCELERATE_MIN_VERSION),
        ("compressed-tensors", import_utils.COMPRESSED_TENSORS_MIN_VERSION),
    ):
        assert f'"{name}>={least}"' in (root / "setup.py").read_text()
        assert f"'{name}>={least}'" in (root / "docs" / "export.md").read_text()


def _quantization_config(directory: Path) -> dict[str, object]:
    return json.loads((directory / "config.json").read_text())["quantization_config"]


def test_settings_of_fp8_block(models: Callable[[str], Path], tmp_path: Path) -> None:
    convert(models("llama"), tmp_path / "out", target_format("fp8_block", False))
    assert _quantization_config(tmp_path / "out") == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    }


@pytest.mark.parametrize(("form", "number"), [("fp8_channel", "float"), ("int8", "int")])
def test_settings_of_compressed_tensors(models: Callable[[str], Path], tmp_path: Path, form: str, number: str) -> None:
    convert(models("qwen3_moe"), tmp_path / "out", target_format(form, False))
    config = _quantization_config(tmp_path / "out")
    group = config["config_groups"]["group_0"]
    assert config["quant_method"] == "compressed-tensors"
    assert config["format"] == f"{number}-quantized"
    assert config["ignore"] == ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
    assert group["targets"] == ["Linear"]
    common = {"num_bits": 8, "type": number, "symmetric": True}
    assert group["weights"] == {**common, "strategy": "channel", "dynamic": False}
    assert group["input_activations"] == {**common, "strategy": "token", "dynamic": True}


def test_the_rest_of_the_config_and_the_small_files_are_kept(tmp_path: Path) -> None:
    source = write_model(tmp_path / "in", shard_size="200KB")
    (source / "pytorch_model.bin").write_bytes(b"pickle")
    (source / "original").mkdir()
    (source / "hidden").write_text("blob")
    (source / "vocab.json").symlink_to(source / "hidden")  # as in a hub's cache
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool.jinja").write_text("tool")
    report = convert(source, tmp_path / "out", target_format("fp8_block", False))
    before, after = ({p.name for p in (tmp_path / d).iterdir()} for d in ("in", "out"))
    assert after == before - {"pytorch_model.bin", "original"}
    assert report.left_out == ("original/", "pytorch_model.bin")
    for name in ("tokenizer.json", "merges.txt", "chat_template.jinja", "generation_config.json", "vocab.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    assert not (tmp_path / "out" / "vocab.json").is_symlink()
    assert (tmp_path / "out" / "additional_chat_templates" / "tool.jinja").read_text() == "tool"
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    del config["quantization_config"]
    assert config == json.loads((source / "config.json").read_text())


def test_shards_keep_their_names_and_the_index_tells_the_truth(tmp_path: Path) -> None:
    source = write_model(tmp_path / "in", shard_size="200KB")
    convert(source, tmp_path / "out", target_format("int8", False))
    shards = sorted(path.name for path in source.glob("*.safetensors"))
    assert len(shards) > 2
    assert sorted(path.name for path in (tmp_path / "out").glob("*.safetensors")) == shards
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    held = {shard: load_file(tmp_path / "out" / shard) for shard in shards}
    assert index["weight_map"] == {name: shard for shard, names in held.items() for name in names}
    total = sum(t.numel() * t.element_size() for tensors in held.values() for t in tensors.values())
    assert index["metadata"]["total_size"] == total
