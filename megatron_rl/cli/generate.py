"""megatron-rl generate MODEL --prompts FILE --output FILE: answers to the prompts of a file.

    MODEL is a Hugging Face directory or name, a run directory, or a checkpoint. A text file has a prompt a line;
    a .jsonl file has a text, {"prompt": text} or {"messages": [{"role": ..., "content": ...}, ...]} a line.
    The output has {"prompt": ..., "completion": ..., "finish_reason": ..., "num_tokens": ...} a line.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.atomic import write_text_atomic
from megatron_rl.cli.model import USAGE_OF_FLAGS, ModelCommand, model_config
from megatron_rl.cli.options import described, take
from megatron_rl.config.flags import flag
from megatron_rl.config.rl_config import RLConfig
from megatron_rl.errors import ConfigError, shorten
from megatron_rl.json_text import parse_json
from megatron_rl.types import Message, Prompt
from megatron_rl.user_files import read_text

AT_ONCE = 64
_LARGEST_FILE = 2**30


@dataclass(frozen=True, kw_only=True)
class Files:
    """The file of prompts, and the file for the answers."""

    prompts: str | None = flag(None, path=True)
    """Text or .jsonl file."""
    output: str | None = flag(None, path=True)
    """Where to write; without it the screen."""
    raw: bool = flag(False)
    """Texts are the beginning of what the model goes on with, no messages of a user."""


USAGE = f"""usage: megatron-rl generate MODEL --prompts FILE [--output FILE] [--nproc RANKS] [FLAGS]

{__doc__}
{described(Files)}{USAGE_OF_FLAGS}"""


@dataclass(frozen=True)
class Job:
    """The options of `megatron-rl generate`."""

    config: RLConfig
    files: Files
    prompts: Sequence[Prompt]


def _parse(words: Sequence[str], world_size: int) -> Job:
    files, rest = take(Files, words[1:])
    if files.prompts is None:
        raise ConfigError(["--prompts is missing: a text file with a prompt a line, or a .jsonl file"])
    if files.output is not None and not _can_be_written(Path(files.output)):  # before the answers are drawn
        raise ConfigError([f"--output {files.output} cannot be written; name a file in a directory that is there"])
    prompts = list(read_prompts(Path(files.prompts)))
    chats = [prompt for prompt in prompts if not (files.raw and isinstance(prompt, str))]
    return Job(model_config(words[0], rest, world_size, min(AT_ONCE, len(prompts)), chats), files, prompts)


def _can_be_written(path: Path) -> bool:
    return not path.is_dir() and path.parent.is_dir() and os.access(path.parent, os.W_OK | os.X_OK)


def read_prompts(path: Path) -> Iterator[Prompt]:
    """Read a text or .jsonl file, without empty lines.

    Raises:
        ConfigError: it cannot be read, a line is none of the forms, or there are no prompts.
    """
    try:
        # splitlines() would also cut at U+2028 in a JSON text
        lines = read_text(path, _LARGEST_FILE).replace("\r\n", "\n").split("\n")
    except ValueError as error:
        raise ConfigError([f"--prompts {path} {error}; give a text or .jsonl file"]) from error
    if not any(map(str.strip, lines)):
        raise ConfigError([f"--prompts {path} is empty"])
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield _prompt(line, f"{path}:{number}") if path.suffix == ".jsonl" else line


def _prompt(line: str, where: str) -> Prompt:
    try:
        value: Any = parse_json(line)
        if isinstance(value, dict):
            [(key, value)] = [(key, value[key]) for key in ("prompt", "messages") if key in value]
            if isinstance(value, str) != (key == "prompt"):
                raise TypeError(key)
        if not value or not isinstance(value, str | list):
            raise ValueError("it is empty, or no prompt")
        return value if isinstance(value, str) else tuple(map(_message, value))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError([
            f'{where}: {shorten(line)} is no prompt; write a text, {{"prompt": text}} or else {{"messages": [...]}}'
        ]) from error


def _message(turn: dict[str, Any]) -> Message:
    role, content = turn["role"], turn["content"]
    if not isinstance(role, str) or not isinstance(content, str):
        raise TypeError("role and content are texts")
    return {"role": role, "content": content}


def _generate(job: Job) -> int:
    from megatron_rl.generation import as_prompt, open_generator

    with open_generator(job.config) as generator:
        is_text = [isinstance(prompt, str) and not job.files.raw for prompt in job.prompts]
        asked = [as_prompt(generator.tokenizer, prompt) if text else prompt
                 for prompt, text in zip(job.prompts, is_text, strict=True)]  # fmt: skip
        answers = generator.answers(asked)
        if not generator.groups.is_main:
            return 0
    rows = [
        {"prompt": prompt, "completion": answer.text, "finish_reason": answer.finish_reason,
         "num_tokens": answer.num_tokens}
        for prompt, answer in zip(job.prompts, answers, strict=True)
    ]  # fmt: skip
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    if job.files.output is None:
        sys.stdout.write(text)
    else:
        write_text_atomic(Path(job.files.output), text)
    return 0


COMMAND = ModelCommand("generate", USAGE, _parse, _generate)
main, rank = COMMAND.main, COMMAND.rank
