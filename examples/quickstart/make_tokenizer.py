#!/usr/bin/env python
"""Write the character tokenizer of the arithmetic task as a Hugging Face tokenizer directory.

    python examples/quickstart/make_tokenizer.py DIRECTORY [CHARACTERS]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

END = "<|end|>"
CHARACTERS = "0123456789+-=,#"


def main(directory: Path, characters: str = CHARACTERS) -> None:
    """One token a character, and the end-of-text token as id 0."""
    vocabulary = {END: 0} | {character: index for index, character in enumerate(characters, start=1)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=END))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([END])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "model_max_length": 1024}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:3])
