"""One line for each thing that cannot be converted; it names the file or tensor, and nothing is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron_rl.checkpoint.hf.quantize import convert, target_format
from megatron_rl.errors import CheckpointError, ConfigError, shorten
from tests.unit.export.conftest import write_model, write_tensors

TARGET = target_format("fp8_block", False)
WEIGHT = "model.layers.0.mlp.up_proj.weight"
INDEX = "model.safetensors.index.json"


def refused(source: Path, output: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        convert(source, output, TARGET)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message
    assert not output.exists()
    assert not output.with_name(output.name + ".tmp").exists()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_tensors(tmp_path / "in", {WEIGHT: torch.randn(256, 128).bfloat16()})


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_model(tmp_path / "in", "llama", shard_size="200KB")


def test_no_such_directory(tmp_path: Path) -> None:
    refused(tmp_path / "absent", tmp_path / "out", "absent", "no directory")


def test_no_weights(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    refused(tmp_path / "in", tmp_path / "out", "no safetensors")


def test_only_a_pickle(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "pytorch_model.bin").write_bytes(b"x")
    refused(tmp_path / "in", tmp_path / "out", "pickle", "pytorch_model.bin")


def test_several_files_without_an_index(source: Path, tmp_path: Path) -> None:
    (source / "model.safetensors").rename(source / "a.safetensors")
    (source / "b.safetensors").write_bytes((source / "a.safetensors").read_bytes())
    refused(source, tmp_path / "out", INDEX)


def test_no_config(source: Path, tmp_path: Path) -> None:
    (source / "config.json").unlink()
    refused(source, tmp_path / "out", "config.json", "cannot be read")


@pytest.mark.parametrize("text", ["{", "[]", "", "[" * 20_000], ids=["cut", "list", "empty", "deep"])
def test_a_config_that_is_no_json_object(source: Path, tmp_path: Path, text: str) -> None:
    (source / "config.json").write_text(text)
    refused(source, tmp_path / "out", "config.json")


def test_a_missing_shard(sharded: Path, tmp_path: Path) -> None:
    victim = sorted(sharded.glob("*.safetensors"))[1]
    victim.unlink()
    refused(sharded, tmp_path / "out", victim.name, "missing")


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_truncated_shard(sharded: Path, tmp_path: Path, keep: int) -> None:
    victim = sorted(sharded.glob("*.safetensors"))[-1]
    victim.write_bytes(victim.read_bytes()[:keep])
    refused(sharded, tmp_path / "out", victim.name, "truncated")


def test_an_index_that_names_a_tensor_the_shard_lacks(sharded: Path, tmp_path: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    shard = sorted(set(index["weight_map"].values()))[0]
    index["weight_map"]["model.layers.9.mlp.up_proj.weight"] = shard
    (sharded / INDEX).write_text(json.dumps(index))
    refused(sharded, tmp_path / "out", "model.layers.9.mlp.up_proj.weight", shard)


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "model.bin", "..", f"{300 * 'x'}.safetensors"])
def test_an_index_that_points_elsewhere(sharded: Path, tmp_path: Path, name: str) -> None:
    (sharded / INDEX).write_text(json.dumps({"weight_map": {WEIGHT: name}}))
    refused(sharded, tmp_path / "out", shorten(name)[1:60])


def test_a_tensor_in_two_shards(sharded: Path, tmp_path: Path) -> None:
    shards = sorted(sharded.glob("*.safetensors"))
    (sharded / "model-again.safetensors").write_bytes(shards[0].read_bytes())
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"][next(n for n, f in index["weight_map"].items() if f == shards[0].name)] = (
        "model-again.safetensors"
    )
    (sharded / INDEX).write_text(json.dumps(index))
    refused(sharded, tmp_path / "out", "model-again.safetensors", shards[0].name)


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": {"quant_method": "gptq"}},
        {"text_config": {"quantization_config": {"quant_method": "fp8"}}},
    ],
)
def test_a_quantised_model(source: Path, tmp_path: Path, config: dict[str, object]) -> None:
    (source / "config.json").write_text(json.dumps(config))
    refused(source, tmp_path / "out", "quantised already")


def test_our_own_output(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "once", TARGET)
    refused(tmp_path / "once", tmp_path / "out", "quantised already")


def test_codes_without_a_word_of_it_in_the_config(tmp_path: Path) -> None:
    codes = torch.ones(128, 128).to(torch.float8_e4m3fn)
    refused(write_tensors(tmp_path / "in", {WEIGHT: codes}), tmp_path / "out", WEIGHT, "F8_E4M3")


@pytest.mark.parametrize("name", [WEIGHT, "model.norm.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite(tmp_path: Path, name: str, value: float) -> None:
    tensors = {WEIGHT: torch.ones(300, 128).bfloat16(), "model.norm.weight": torch.ones(128).bfloat16()}
    tensors[name].view(-1)[-1] = value
    refused(write_tensors(tmp_path / "in", tensors), tmp_path / "out", repr(name), "NaN or infinity")


def test_a_model_without_linear_layers_known_here(tmp_path: Path) -> None:
    source = write_tensors(tmp_path / "in", {"h.0.attn.c_attn.weight": torch.ones(8, 8)})
    refused(source, tmp_path / "out", "h.0.attn.c_attn.weight")


def test_an_output_that_is_the_input_or_overlaps_it(source: Path, tmp_path: Path) -> None:
    before = sorted(source.rglob("*"))
    link = tmp_path / "link"
    link.symlink_to(source)
    for output in (source, source / "out", tmp_path, link, tmp_path / "x" / ".." / "in"):
        for overwrite in (False, True):
            with pytest.raises(CheckpointError, match="overlaps"):
                convert(source, output, TARGET, overwrite=overwrite)
    assert sorted(source.rglob("*")) == before


def test_an_overwrite_never_removes_the_input_by_its_temporary_name(tmp_path: Path) -> None:
    source = write_tensors(tmp_path / "out.tmp", {WEIGHT: torch.ones(2, 2)})
    with pytest.raises(CheckpointError, match="overlaps"):
        convert(source, tmp_path / "out", TARGET, overwrite=True)
    assert (source / "model.safetensors").is_file()


def test_too_little_space_is_found_before_writing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("megatron_rl.checkpoint.hf.quantize.shutil.disk_usage", lambda path: usage)
    refused(source, tmp_path / "out", "MiB are needed", "out")


def test_wrong_formats() -> None:
    with pytest.raises(ConfigError, match="did you mean fp8_block"):
        target_format("fp8_blok", False)
    for name in ("fp8_channel", "int8"):
        with pytest.raises(ConfigError, match="for fp8_block"):
            target_format(name, True)
    assert target_format("fp8_block", True).recipe_name == "fp8_block_pow2"


def test_control_the_source_of_these_tests_converts(source: Path, tmp_path: Path) -> None:
    assert convert(source, tmp_path / "out", TARGET).converted
    assert (tmp_path / "out" / "model.safetensors").is_file()
