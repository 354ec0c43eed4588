#!/usr/bin/env python
"""Write a tokenizer for chats with tools that are short in tokens, as a Hugging Face tokenizer directory.

    python examples/agent_tools/make_tokenizer.py DIRECTORY

One token a character, and one for each text that a tool call in Hermes form has around its arguments. The texts are
those of any Qwen or Hermes model, so parsers and harnesses see nothing of it.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<|end|>", "<|unknown|>", "<|tool|>", "<|user|>", "<|assistant|>", "<|result|>")
FRAMES = (
    '<tool_call>\n{"name": "search", "arguments": {"query": "',
    '<tool_call>\n{"name": "python", "arguments": {"code": "print(',
    ')"}}\n</tool_call>',
    '"}}\n</tool_call>',
    "<tool_call>",
    "</tool_call>",
)
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
TEMPLATE = """\
{%- for tool in tools or [] %}<|tool|>{{ tool.function.name }}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}<|assistant|>{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- '}\n</tool_call>' }}{% endfor %}
{%- else %}{{ '<|result|>' if message.role == 'tool' else '<|user|>' }}{{ message.content }}{% endif %}<|end|>
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}
"""


def main(directory: Path) -> None:
    """The end-of-text token is id 0."""
    words = (*SPECIAL, *FRAMES, *CHARACTERS)
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=SPECIAL[1]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join([*map(re.escape, FRAMES), r"[\s\S]"])), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL))
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[0], "model_max_length": 1024}
    settings |= {"unk_token": SPECIAL[1], "chat_template": TEMPLATE.rstrip("\n")}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
