"""The tokenizer of a model that transformers knows is the one that `AutoTokenizer` finds by itself."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from megatron_rl.tokenizer import load_tokenizer, open_backend, stamps
from tests.support.tiny import write_tokenizer

KINDS = ("llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "gemma3_text", "olmo3", "deepseek_v3", "gpt_oss", "unknown")
CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend", "Qwen2TokenizerFast", "GPT2Tokenizer", "LlamaTokenizer")
TEXT = "Two  words, 1234 and\n\tﬁ: <|end|> don't"
CHAT = [{"role": "user", "content": "a"}]


def _backend(directory: Path) -> Any:
    return open_backend(str(directory), stamps(str(directory)))


def _settings(directory: Path, name: str, **changes: object) -> None:
    path = directory / name
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | changes))


@pytest.mark.parametrize("kind", KINDS)
def test_class_ids_and_chats_are_transformers(tmp_path: Path, kind: str) -> None:
    directory = write_tokenizer(tmp_path)
    _settings(directory, "config.json", model_type=kind)
    (directory / "chat_template.jinja").write_text("{% for m in messages %}{{ m | tojson }}{% endfor %}{{ eos_token }}")
    for name in CLASSES:
        _settings(directory, "tokenizer_config.json", tokenizer_class=name)
        own, theirs = _backend(directory), AutoTokenizer.from_pretrained(directory)
        assert type(own) is type(theirs)
        assert own.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
        assert own.encode(TEXT) == theirs.encode(TEXT)
        assert own.special_tokens_map == theirs.special_tokens_map
        assert own.apply_chat_template(CHAT, tokenize=False) == theirs.apply_chat_template(CHAT, tokenize=False)


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    directory = write_tokenizer(tmp_path)
    assert _backend(directory) is _backend(directory)
    _settings(directory, "tokenizer_config.json", chat_template="other {{ messages[0].content }}")
    os.utime(directory / "tokenizer_config.json", ns=(1, 1))
    assert load_tokenizer(str(directory)).render(CHAT) == "other a"
