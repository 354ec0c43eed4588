"""The chat template is a program that came with the tokenizer: it is tried where it can be stopped."""

from __future__ import annotations

import json
import multiprocessing
import resource
from multiprocessing.connection import Connection
from pathlib import Path

from megatron_rl.errors import one_line
from megatron_rl.tokenizer import Tokenizer
from megatron_rl.types import Message

DEADLINE_S = 10.0
_QUESTION = "What is 2 + 3?"
_LONGEST_TEXT = 100_000
_MEMORY_BYTES = 2**30


def template_problems(tokenizer: Tokenizer, deadline_s: float = DEADLINE_S) -> list[str]:
    """Why the template cannot render a single question, if it cannot. transformers renders it in jinja's sandbox."""
    fault = _fault_of(tokenizer, deadline_s)
    if fault is None:
        return []
    return [
        f'the chat template of tokenizer {tokenizer.name!r} {fault}; mend "chat_template" in its '
        "tokenizer_config.json or its chat_template.jinja, or use the tokenizer of a chat model"
    ]


def _fault_of(tokenizer: Tokenizer, deadline_s: float) -> str | None:
    # Forked, so that nothing is imported or loaded again; the copy runs jinja and no thread of this process.
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_render, args=(tokenizer, writer), daemon=True)
    process.start()
    writer.close()
    try:
        if not reader.poll(deadline_s):
            return f"does not end: a single question takes more than {deadline_s:g} s"
        outcome = json.loads(reader.recv_bytes())
    except EOFError:
        process.join()
        return f"ends the process that renders it (exit code {process.exitcode})"
    finally:
        process.kill()
        process.join()
        reader.close()
    if "error" in outcome:
        return f"cannot render a single question ({one_line(outcome['error'], 300)})"
    return _fault_in(outcome["text"])


def _fault_in(text: str) -> str | None:
    if len(text) > _LONGEST_TEXT:
        return f"makes more than {_LONGEST_TEXT:,} characters of a single question"
    if "".join(_QUESTION.split()) not in "".join(text.split()):
        return f"leaves out what the user says: {_QUESTION!r} becomes {one_line(text, 100)!r}"
    return None


def _render(tokenizer: Tokenizer, writer: Connection) -> None:
    """In the process: what became of the question, as JSON."""
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + _MEMORY_BYTES, resource.RLIM_INFINITY))
    messages: list[Message] = [{"role": "user", "content": _QUESTION}]
    try:
        outcome = {"text": tokenizer.render(messages)[: _LONGEST_TEXT + 1]}
    except Exception as error:  # noqa: BLE001 - a template raises whatever its author chose
        outcome = {"error": f"{type(error).__name__}: {error}"[: 10 * _LONGEST_TEXT]}
    writer.send_bytes(json.dumps(outcome).encode())
