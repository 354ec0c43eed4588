"""gpt-oss as it is published: experts in MXFP4, read, trained on, and written back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl import mxfp4
from megatron_rl.checkpoint.hf.load import import_hf
from megatron_rl.checkpoint.hf.save import export_checkpoint
from megatron_rl.errors import CheckpointError, ConfigError
from megatron_rl.families import read_model, weight_problems
from megatron_rl.families.family import FAMILIES
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.tensor_files import TensorReader, stored_tensors
from tests.support.hugging_face import batch_of, hf_run, loaded_policy, packed_logits, reference_logits, write_back
from tests.support.hugging_face import write_model as write_numbers

SHAPE = FAMILIES.get("gpt_oss").examples[0] | {"intermediate_size": 64, "hidden_size": 64, "num_local_experts": 4}
STACKS = ("gate_up_proj", "down_proj")


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written by transformers in bf16, then its experts in blocks drawn at random: all codes, exponents of any size."""
    directory = tmp_path_factory.mktemp("published")
    write_numbers(directory, "gpt_oss", SHAPE, dtype="bfloat16")
    tensors, generator = load_file(directory / "model.safetensors"), torch.Generator().manual_seed(1)
    for name in [name for name in tensors if name.endswith(STACKS)]:
        experts, columns, rows = tensors.pop(name).shape
        scales = experts, rows, columns // 32
        drawn = torch.randint(0, 256, (*scales, 16), generator=generator, dtype=torch.uint8)
        tensors[f"{name}_blocks"] = drawn
        tensors[f"{name}_scales"] = torch.randint(120, 126, scales, generator=generator, dtype=torch.uint8)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    modules = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": modules}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def expanded(directory: Path, target: Path) -> Path:
    """The same in bf16, by transformers' own reading of the blocks."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors = load_file(directory / "model.safetensors")
    for name in [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]:
        parts = (tensors.pop(f"{name}_{part}") for part in ("blocks", "scales"))
        tensors[name] = convert_moe_packed_tensors(*parts).contiguous()
    target.mkdir()
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config))
    return target


def test_numbers_by_hand() -> None:
    """Codes 1 and 15 of the first byte are 0.5 and -6, times 2^(129 - 127)."""
    blocks = torch.zeros(1, 16, dtype=torch.uint8)
    blocks[0, 0] = 0xF1
    numbers = mxfp4.decode(blocks, torch.tensor([129], dtype=torch.uint8))
    assert numbers[:3].tolist() == [2.0, -24.0, 0.0]
    assert all(map(torch.equal, mxfp4.encode(numbers), (blocks[None, 0], torch.tensor([129], dtype=torch.uint8))))


@pytest.mark.parametrize(
    ("number", "nearest"),
    [(0.25, 0), (0.26, 0.5), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5, 4), (5.1, 6), (7.9, 8), (-3, -3)],
)
def test_rounding_goes_to_the_nearest_and_ties_to_the_even_code(number: float, nearest: float) -> None:
    """The largest number of the block, 4, makes the scale 1; with 7.9 in it 2 is nearer."""
    numbers = torch.zeros(32)
    numbers[0], numbers[1] = 4, number
    assert mxfp4.decode(*mxfp4.encode(numbers))[:2].tolist() == [4, nearest]


def test_the_largest_number_of_a_block_may_shrink_a_little() -> None:
    numbers = torch.zeros(32)
    numbers[:2] = torch.tensor([3.99, 0.5])
    assert mxfp4.decode(*mxfp4.encode(numbers))[:2].tolist() == [4, 0.5]


def test_it_is_read_as_transformers_reads_it(one_rank: ParallelGroups, published: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = read_model(published)
    assert weight_problems(model) == [] and model.is_mxfp4
    policy, read = loaded_policy(hf_run(published), 61)
    assert read == sum(tensor.num_bytes for tensor in stored_tensors(published).values())
    twin, _ = loaded_policy(hf_run(expanded(published, tmp_path / "twin")), 61)
    own, other = dict(policy.named_parameters()), dict(twin.named_parameters())
    assert [name for name in own if not torch.equal(own[name], other[name])] == []
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "twin", dtype=torch.float32).eval()
    expected, logits = reference_logits(reference, batch_of(61)), packed_logits(policy, batch_of(61))
    assert (logits[:, :61] - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_that_did_not_change_are_written_back_to_the_bit(
    published: Path, tmp_path: Path, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    """By way of a checkpoint, in either number format."""
    model = read_model(published)
    import_hf(model, tmp_path / "run", dtype, 1)
    export_checkpoint(tmp_path / "run", model, tmp_path / "out")
    before, after = (load_file(path / "model.safetensors") for path in (published, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert (published / "config.json").read_bytes() == (tmp_path / "out" / "config.json").read_bytes()
    assert "rounded" not in caplog.text


def test_what_was_trained_is_rounded_and_said_so(
    one_rank: ParallelGroups, published: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One number of one expert changes: its block is encoded anew, all others keep their bytes."""
    policy, _ = loaded_policy(hf_run(published), 61)
    name = "decoder.layers.0.mlp.experts.local_experts.2.linear_fc2.weight"
    weight = dict(policy.named_parameters())[name]
    with torch.no_grad():
        weight[5, 33] += 0.01 * weight[5, 32:].abs().max()
    write_back(policy, read_model(published), tmp_path / "out")
    assert "0.0 % of their numbers were rounded to 4 bits" in caplog.text and "--dtype bfloat16" in caplog.text
    before, after = (load_file(path / "model.safetensors") for path in (published, tmp_path / "out"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    stack = "model.layers.0.mlp.experts.down_proj"
    assert changed <= {f"{stack}_blocks", f"{stack}_scales"}
    different = (before[f"{stack}_blocks"] != after[f"{stack}_blocks"]).any(-1).nonzero().tolist()
    assert different in ([[2, 5, 1]], [])
    numbers = mxfp4.decode(*(after[f"{stack}_{part}"][2] for part in ("blocks", "scales")))
    assert (numbers - weight).abs().max() <= weight[5, 32:].abs().max() / 4

    write_back(policy, read_model(published), tmp_path / "whole", torch.bfloat16)
    whole = load_file(tmp_path / "whole" / "model.safetensors")[stack][2].t()
    assert torch.equal(whole, weight.bfloat16())
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert "quantization_config" not in config and not read_model(tmp_path / "whole").is_mxfp4


def test_without_the_original_files_all_blocks_are_encoded_anew(published: Path, tmp_path: Path) -> None:
    model = read_model(published)
    import_hf(model, tmp_path / "run", torch.bfloat16, 1)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_bytes((published / "config.json").read_bytes())
    export_checkpoint(tmp_path / "run", replace(model, directory=tmp_path / "config"), tmp_path / "out")
    with TensorReader(published) as before, TensorReader(tmp_path / "out") as after:
        for stack in STACKS:
            name = f"model.layers.1.mlp.experts.{stack}"
            rows = 0, before.stored[f"{name}_blocks"].shape[1]
            assert torch.equal(*(mxfp4.read(reader, name, 3, rows) for reader in (before, after)))


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, 'quantization_config {"quant_method": "fp8"} is not built'),
        ({"quantization_config": {}}, None),
        ({"swiglu_alpha": 1.5}, "swiglu_alpha 1.5 is not built here: the gate is x sigmoid(1.702 x)"),
        ({"attention_bias": False}, "attention_bias false is not built here"),
        ({"experts_per_token": 2}, "experts_per_token 2 is not built here: num_experts_per_tok says otherwise"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "one layer in every few attends"),
        ({"num_local_experts": None}, "lacks num_local_experts"),
    ],
)
def test_what_is_not_built_is_refused_by_name(
    published: Path, tmp_path: Path, changes: dict[str, Any], fragment: str | None
) -> None:
    config = json.loads((published / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    if fragment is None:
        assert not read_model(tmp_path).is_mxfp4
        return
    with pytest.raises(ConfigError) as refused:
        read_model(tmp_path)
    assert fragment in str(refused.value)


def test_a_block_without_numbers_is_refused(published: Path, tmp_path: Path) -> None:
    tensors = load_file(published / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    tensors[name][3, 4, 1] = 255
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((published / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match="down_proj holds NaN"):
        import_hf(read_model(tmp_path), tmp_path / "run", torch.bfloat16, 1)
