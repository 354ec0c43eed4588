"""Streams decode what is new, and say what decoding everything says: for each kind of decoder that tokenizers have."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from megatron_rl.endpoint.answers import IncrementalDecoder
from megatron_rl.tokenizer import Tokenizer
from tests.support.endpoint import byte_tokenizer

HALF = "\N{REPLACEMENT CHARACTER}"
BYTES = [f"<0x{number:02X}>" for number in range(256)]
WORDS = ["<|end|>", "▁", "▁a", "a", "b.", "▁▁", "é", ",", "##s", "do", "n't", "w</w>", "\n", HALF]
LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]


def of_words(decoder: decoders.Decoder) -> Tokenizer:
    backend = tokenizers.Tokenizer(WordLevel({word: number for number, word in enumerate([*WORDS, *BYTES])}, "a"))
    backend.decoder = decoder
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>"), "words")


@pytest.fixture(
    scope="module",
    params=[
        None,
        decoders.Sequence(LLAMA),
        decoders.Metaspace(),
        decoders.WordPiece(),
        decoders.BPEDecoder(),
        decoders.Fuse(),
    ],
    ids=["bytes", "llama", "metaspace", "wordpiece", "suffix", "plain"],
)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """With end tokens in the middle of answers: special tokens are left out of the text."""
    return of_words(request.param) if request.param else byte_tokenizer(tmp_path_factory.mktemp("bytes"))


def some_ids(tokenizer: Tokenizer, seed: int) -> list[int]:
    """Runs of one token, of spaces at the beginning, of bytes that are characters, and of bytes that are none."""
    draw, ids = random.Random(seed), []
    named = tokenizer.vocab_size == len(WORDS) + len(BYTES)

    def spelled(text: bytes) -> list[int]:
        if named:
            return [len(WORDS) + byte for byte in text]
        return tokenizer.encode(text.decode()) if text.isascii() else tokenizer.encode("é你🙂")

    while len(ids) < 400:
        token = draw.randrange(min(len(WORDS) if named else 256, tokenizer.vocab_size))
        ids += draw.choice([
            [token], [token] * draw.randrange(1, 40), spelled("é你🙂".encode()), spelled(b"  "),
            [draw.randrange(tokenizer.vocab_size) for _ in range(draw.randrange(1, 9))],
        ])  # fmt: skip
    return ids


def looks(total: int, seed: int) -> list[int]:
    draw, seen = random.Random(-seed), [0]
    while seen[-1] < total:
        seen.append(min(total, seen[-1] + draw.choice([1, 1, 2, 4, 8, 90])))
    return seen


@pytest.mark.parametrize("seed", range(8))
def test_it_is_what_decoding_everything_gives(tokenizer: Tokenizer, seed: int) -> None:
    ids = some_ids(tokenizer, seed)
    decoder, whole = IncrementalDecoder(tokenizer), tokenizer.decode(ids)
    for count in looks(len(ids), seed):
        kept = [number for number in ids[:count] if number not in tokenizer.special_tokens.values()]
        while kept and kept[-1] in tokenizer.byte_tokens:
            kept.pop()
        text = decoder.decode(ids[:count])
        assert text == tokenizer.decode(kept)
        assert whole.startswith(text.rstrip(HALF)), "what comes later changes nothing"


def test_a_character_over_several_tokens_is_shown_when_it_is_whole(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path)
    ids = tokenizer.encode("a你🙂b")
    decoder = IncrementalDecoder(tokenizer)
    shown = [decoder.decode(ids[:count]).rstrip(HALF) for count in range(1, len(ids) + 1)]
    assert shown == ["a", "a", "a", "a你", "a你", "a你", "a你", "a你🙂", "a你🙂b"]


def test_bytes_that_a_later_one_spoils_are_not_shown() -> None:
    """Where bytes stand for what has no token, one that fits nowhere takes the whole run with it."""
    tokenizer = of_words(decoders.Sequence(LLAMA))
    run = [len(WORDS) + byte for byte in [*"你".encode(), 0xFF]]
    a, decoder = WORDS.index("a"), IncrementalDecoder(tokenizer)
    text = [decoder.decode([a, *run, a][:count]) for count in range(1, 7)]
    assert text == ["a"] * 5 + [f"a{HALF * 4}a"]


@pytest.mark.parametrize("text", ["word ", " ", "é", "你"])
def test_the_cost_of_a_look_is_that_of_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    tokenizer, decoded = byte_tokenizer(tmp_path), []
    decode: Callable[..., str] = tokenizer.decode

    def counting(token_ids: Sequence[int], calls_of: str = "", marks: Sequence[str] = ()) -> str:
        decoded.append(len(token_ids))
        return decode(token_ids, calls_of, marks)

    monkeypatch.setattr(tokenizer, "decode", counting)
    ids = tokenizer.encode(text * 1000)
    decoder = IncrementalDecoder(tokenizer)
    for count in range(0, len(ids), 4):
        decoder.decode(ids[:count])
    assert sum(decoded) < 40 * len(ids)
    assert max(decoded) <= 100
