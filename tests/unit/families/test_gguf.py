"""A GGUF file where a Hugging Face directory is wanted."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.cli import main
from megatron_rl.config.arguments import read_config
from megatron_rl.errors import ConfigError
from megatron_rl.families import model_directory, read_model, weight_problems
from megatron_rl.families.gguf import cached_import, import_gguf
from megatron_rl.tensor_files import stored_tensors
from megatron_rl.tokenizer import load_tokenizer
from tests.support.gguf_files import LAYERS, TOKENS, write_converted, write_llama
from tests.support.hugging_face import batch_of, reference_logits, write_model

gguf = pytest.importorskip("gguf", reason="pip install 'megatron-rl[gguf]'")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "megatron-rl"


def logits_of(model):
    with torch.inference_mode():
        return model(torch.arange(20)[None] % len(TOKENS)).logits


def test_what_is_imported_is_what_transformers_reads(file, tmp_path):
    import_gguf(file, tmp_path / "model")
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    assert torch.equal(logits_of(ours), logits_of(theirs))
    assert {each.dtype for each in stored_tensors(tmp_path / "model").values()} == {"F32"}
    assert not hasattr(ours.config, "quantization_config")


def test_bfloat16_takes_half_the_room(file, tmp_path, capsys):
    assert main(["import", str(file), str(tmp_path / "half"), "--dtype", "bfloat16"]) == 0
    assert {each.dtype for each in stored_tensors(tmp_path / "half").values()} == {"BF16"}
    assert main(["import", str(file), str(tmp_path / "half")]) == 2
    assert "is not empty; use another directory" in capsys.readouterr().err


def test_load_hf_takes_the_file(file, home):
    config, _ = read_config(["--load-hf", str(file)], 1)
    assert (config.model.num_layers, config.model.num_query_groups) == (LAYERS, 2)
    tokenizer = load_tokenizer(config.tokenizer.tokenizer_model)
    assert tokenizer.decode(tokenizer.encode("than")) == "than"
    assert load_tokenizer(str(file)).vocab_size == len(TOKENS)
    assert [each.name for each in home.iterdir() if each.is_dir()] == [model_directory(file).name]


def test_a_file_is_imported_once_and_anew_when_it_changes(file, home, tmp_path, caplog):
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(file.read_bytes())
    first = cached_import(copy)
    assert cached_import(copy) == first
    assert caplog.text.count("dequantising it") == 1
    write_llama(copy, seed=1)
    assert cached_import(copy) != first
    assert caplog.text.count("dequantising it") == 2


def test_what_an_earlier_version_imported_is_imported_anew(file, home):
    """It knew of no scaling."""
    name = cached_import(file).name
    assert name.endswith("-2")
    (home / name.removesuffix("-2")).mkdir()
    assert cached_import(file).name == name


def test_what_a_killed_import_left_does_not_hinder(file, home):
    home.mkdir(parents=True)
    target = home / cached_import(file).name
    (target.parent / (target.name + ".tmp")).mkdir()
    (target / "config.json").unlink()
    for each in target.iterdir():
        each.unlink()
    target.rmdir()
    assert (cached_import(file) / "config.json").is_file()


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (lambda whole: whole[: len(whole) // 2], "cannot be read as a model"),
        (lambda whole: whole[:600], "cannot be read as a model"),
        (lambda whole: b"\x80\x02}q\x00" + whole, "is no GGUF file"),
        (lambda whole: b"", "is no GGUF file"),
    ],
)
def test_broken_files_are_one_line(file, home, tmp_path, broken, words):
    path = tmp_path / "broken.gguf"
    path.write_bytes(broken(file.read_bytes()))
    with pytest.raises(ConfigError) as raised:
        cached_import(path)
    assert len(raised.value.lines) == 1
    assert str(path) in raised.value.lines[0]
    assert words in raised.value.lines[0]
    assert [each for each in home.iterdir() if each.is_dir()] == []


@pytest.mark.parametrize("architecture", ["falcon", "no-such-architecture"])
def test_an_unknown_architecture_is_one_line(tmp_path, home, architecture):
    path = write_llama(tmp_path / "other.gguf", architecture=architecture)
    with pytest.raises(ConfigError) as raised:
        cached_import(path)
    assert len(raised.value.lines) == 1
    assert raised.value.lines[0].startswith(str(path))


def test_a_missing_file_is_one_line(tmp_path, home, capsys):
    with pytest.raises(ConfigError, match="No such file"):
        model_directory(tmp_path / "none.gguf")
    assert main(["import", str(tmp_path / "none.gguf"), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 16384, "head_dim": 32,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
SCALED = {"rope__scaling__type": "linear", "rope__scaling__factor": 8.0}
GEMMA = {**SIZES, "num_hidden_layers": 7, "sliding_window": 8, "query_pre_attn_scalar": 32}
LOCAL = {"rope_type": "default", "rope_theta": 1e4}


def llama3_divisors(factor: float = 8.0, low: float = 1.0) -> list[float]:
    """`rope_freqs.weight` as llama.cpp's converter computes it, of heads of 32."""
    found = []
    for index in range(0, 32, 2):
        length = 2 * math.pi * 500000.0 ** (index / 32)
        smooth = (8192 / length - low) / (4.0 - low)
        between = 1 / ((1 - smooth) / factor + smooth)
        found.append(1.0 if length < 8192 / 4.0 else factor if length > 8192 / low else between)
    return found


CONVERTED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", SIZES, {}),
    "llama named mistral": ("llama", {**SIZES, "tie_word_embeddings": True}, {"general__name": "mistral"}),
    "llama without the width of its heads": (
        "llama", {**SIZES, "head_dim": 16}, {"attention__key_length": None, "attention__value_length": None},
    ),
    "llama 3.1": ("llama", {**SIZES, "rope_parameters": LLAMA3}, {"rope_freqs__weight": llama3_divisors()}),
    "llama 3.2": (
        "llama", {**SIZES, "rope_parameters": {**LLAMA3, "factor": 32.0}},
        {"rope_freqs__weight": llama3_divisors(32.0)},
    ),
    "divided by 1": ("llama", {**SIZES, "rope_theta": 1e6}, {"rope_freqs__weight": [1.0] * 16}),
    "linear": ("llama", {**SIZES, "rope_parameters": LINEAR}, SCALED),
    "not scaled": ("qwen2", {**SIZES, "rope_theta": 1e6}, SCALED | {"rope__scaling__type": "none"}),
    "qwen3": ("qwen3", {**SIZES, "tie_word_embeddings": True, "rope_theta": 1e6}, {}),
    "gemma3": (
        "gemma3_text", {**GEMMA, "rope_parameters": {"full_attention": LINEAR, "sliding_attention": LOCAL}}, SCALED,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONVERTED)
def test_what_llama_cpp_converted_becomes_the_model_again(tmp_path: Path, name: str) -> None:
    family, sizes, changes = CONVERTED[name]
    model = write_model(tmp_path / "origin", family, sizes)
    path = write_converted(tmp_path / "it.gguf", model, family.removesuffix("_text"), **changes)
    import_gguf(path, tmp_path / "out")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert weight_problems(read_model(tmp_path / "out")) == []
    batch = batch_of(64)
    off = reference_logits(back, batch).log_softmax(-1) - reference_logits(model, batch).log_softmax(-1)
    assert off.abs().max() < 1e-4


REFUSED: dict[str, tuple[Any, str]] = {
    "rope__scaling__type": ("yarn", "rope.scaling.type 'yarn' is not read"),
    "rope__scaling__factor": (4.0, "rope.scaling.factor 4.0 is not read"),
    "rope__scaling__attn_factor": (1.2, "rope.scaling.attn_factor"),
    "rope__scale_linear": (2.0, "rope.scale_linear"),
    "rope__dimension_count": (16, "rope.dimension_count 16 is not read"),
    "attention__value_length": (16, "attention.value_length 16"),
    "attention__sliding_window": (8, "attention.sliding_window 8"),
    "attention__scale": (0.5, "attention.scale 0.5"),
    "attention__causal": (False, "attention.causal False"),
    "attn_logit_softcapping": (30.0, "attn_logit_softcapping"),
    "final_logit_softcapping": (30.0, "final_logit_softcapping"),
    "logit_scale": (0.5, "logit_scale"),
    "expert_count": (8, "expert_count 8"),
    "expert_weights_scale": (2.5, "expert_weights_scale"),
    "vocab_size": (63, "vocab_size 63"),
    "attention__head_count_kv": ([2, 2], "attention.head_count_kv must be one value for all layers, got [2, 2]"),
    "block_count": (10**9, "has 21 tensors for 1000000000 layers"),
    "attention__layer_norm_rms_epsilon": (None, "attention.layer_norm_rms_epsilon must be one value"),
    "rope_freqs__weight": (llama3_divisors(low=2.0), "rope_freqs.weight is not the scaling of Llama 3.1"),
    "blk__0__attn_q__bias": ([0.5] * 128, "tensor blk.0.attn_q.bias is not read"),
    "blk__1__attn_q_norm__weight": ([0.5] * 32, "tensor blk.1.attn_q_norm.weight is not read"),
    "blk__1__ffn_down__weight": (None, "tensor blk.1.ffn_down.weight is missing"),
    "output_norm__weight": (None, "tensor output_norm.weight is missing"),
    "token_embd__weight": (None, "token_embd.weight"),
    "blk__1__ffn_gate__weight": ([[0.5] * 64] * 8, "cannot be read as a model"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_another_model_is_refused_by_name(tmp_path: Path, name: str) -> None:
    value, words = REFUSED[name]
    model = write_model(tmp_path / "origin", "llama", SIZES)
    path = write_converted(tmp_path / "it.gguf", model, "llama", **{name: value})
    with pytest.raises(ConfigError) as raised:
        import_gguf(path, tmp_path / "out")
    (line,) = raised.value.lines
    assert line.startswith(str(path)) and words in line
    assert not (tmp_path / "out").exists()


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def head(tensors: int, keys: int, architecture: bytes = b"llama") -> bytes:
    counts = struct.pack("<IQQ", 3, tensors, keys)
    return b"GGUF" + counts + text(b"general.architecture") + struct.pack("<I", 8) + text(architecture)


NAME_AND_SHAPE = text(b"a") + struct.pack("<IQIQ", 1, 8, 0, 0)
HOSTILE = {
    "no tensors": head(0, 1),
    "no keys": b"GGUF" + struct.pack("<IQQ", 3, 0, 0),
    "2^60 tensors": head(2**60, 1),
    "2^60 keys": head(0, 2**60),
    "2^60 numbers": head(0, 2) + text(b"llama.block_count") + struct.pack("<IIQ", 9, 4, 2**60),
    "2^60 texts": head(0, 2) + text(b"llama.block_count") + struct.pack("<IIQ", 9, 8, 2**60),
    "2^60 letters": head(0, 2) + struct.pack("<Q", 2**60),
    "2^31 dimensions": head(1, 1) + text(b"a") + struct.pack("<I", 2**31),
    "no such type": head(0, 2) + text(b"llama.block_count") + struct.pack("<I", 99),
    "no such numbers": head(1, 1) + text(b"a") + struct.pack("<IQIQ", 1, 8, 999, 0),
    "no UTF-8": head(0, 1, b"\xff\xfe\xfd"),
    "no UTF-8 in a key": head(0, 2) + text(b"\xff") + struct.pack("<II", 4, 1),
    "no UTF-8 in a name": head(1, 1) + text(b"\xff") + struct.pack("<IQIQ", 1, 8, 0, 0) + bytes(64),
    "a key twice": head(0, 2) + text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama"),
    "a tensor twice": head(2, 1) + 2 * NAME_AND_SHAPE + bytes(64),
    "version 9": b"GGUF" + struct.pack("<IQQ", 9, 0, 0),
    "big endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_one_line_at_once(tmp_path: Path, home: Path, name: str) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(HOSTILE[name])
    with pytest.raises(ConfigError) as raised:
        cached_import(path)
    (line,) = raised.value.lines
    assert line.startswith(str(path)) and "HF_HOME" not in line
