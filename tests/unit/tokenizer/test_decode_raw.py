"""Records show what the model saw."""

from __future__ import annotations

from tests.support.toy import toy_tokenizer


def test_special_tokens_stay_in_what_is_recorded() -> None:
    tokenizer = toy_tokenizer()
    ids = [tokenizer.end_token_id, *tokenizer.encode("ab"), tokenizer.end_token_id]
    special = tokenizer.decode_raw([tokenizer.end_token_id])
    assert special
    assert tokenizer.decode_raw(ids) == f"{special}ab{special}"
    assert tokenizer.decode(ids) == "ab"
