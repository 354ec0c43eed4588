"""A GGUF file where a Hugging Face directory is wanted."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.cli import main
from megatron_rl.config.arguments import read_config
from megatron_rl.errors import ConfigError
from megatron_rl.families import model_directory
from megatron_rl.families.gguf import cached_import, import_gguf
from megatron_rl.tensor_files import stored_tensors
from megatron_rl.tokenizer import load_tokenizer
from tests.support.gguf_files import LAYERS, TOKENS, write_llama

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
