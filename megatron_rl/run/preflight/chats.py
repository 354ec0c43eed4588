"""The settings of chats: whether files and JSON can be read, and the templates render a question."""

from __future__ import annotations

import multiprocessing
import re
import resource
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from megatron_rl.chat import ChatFormat, kwargs_refusal, read_template
from megatron_rl.config.rl_config import RLConfig
from megatron_rl.environments.loading import Surveyed
from megatron_rl.errors import ConfigError, Problem, one_line, shorten
from megatron_rl.json_text import loads
from megatron_rl.registry import PARSERS, REASONING, Registry
from megatron_rl.tokenizer import Tokenizer
from megatron_rl.types import Message

DEADLINE_S = 10.0
_QUESTION = "What is 2 + 3?"
_LONGEST_TEXT = 100_000
_MEMORY_BYTES = 2**30


def chat_format(config: RLConfig) -> ChatFormat:
    """Return what the flags say about chats.

    Raises:
        ConfigError: the template cannot be read, the variables are no JSON object, or there is no such parser of calls.
    """
    asked, problems, template, kwargs, parser = config.tokenizer, [], None, {}, None
    if asked.chat_template is not None:
        try:
            template = read_template(asked.chat_template)
        except ValueError as error:
            problems.append(Problem("--chat-template", f"--chat-template {asked.chat_template} {error}"))
    if asked.chat_template_kwargs is not None:
        try:
            kwargs = loads(asked.chat_template_kwargs)
            refusal = kwargs_refusal(kwargs)
        except ValueError as error:
            refusal = (
                f"{asked.chat_template_kwargs} is not JSON ({error}); write it in single quotes, as in "
                "'{\"enable_thinking\": false}'"
            )
        if refusal is not None:
            problems.append(Problem("--chat-template-kwargs", f"--chat-template-kwargs {refusal}"))
    if asked.rl_tool_call_parser != "auto":
        parser = asked.rl_tool_call_parser
        problems += _unknown("--rl-tool-call-parser", PARSERS, parser)
    if asked.rl_reasoning_parser != "none":
        problems += _unknown("--rl-reasoning-parser", REASONING, asked.rl_reasoning_parser)
    if problems:
        raise ConfigError(problems)
    return ChatFormat(template, kwargs, asked.system_prompt, asked.chat_template, tool_call_parser=parser)


def _unknown(flag: str, parsers: Registry, name: str) -> list[Problem]:
    try:
        parsers.get(name)
    except ConfigError as error:
        return [Problem(flag, f"{flag}: {line}") for line in error.lines]
    return []


def chat_problems(config: RLConfig, found: Sequence[Surveyed], tokenizer: Tokenizer) -> Iterator[Problem]:
    """Find settings without effect, and templates that cannot render the environments' chats."""
    chats = [item for item in found if item.first_chat is not None]
    yield from _without_effect(config, found)
    own = tokenizer.formatting(by_environment={item.name: item.chat for item in found})
    rendered: list[ChatFormat] = []
    for item in chats:
        chat = own.chat_format(item.name)
        if not own.has_chat_template(item.name):
            yield Problem(
                "--tokenizer-model",
                f"{item.name}: task {item.first_chat!r} is a chat, and tokenizer {tokenizer.name!r} has no chat "
                "template; give one with --chat-template FILE, or use the tokenizer of a chat model",
            )
        elif chat not in rendered:
            rendered.append(chat)
            yield from list(template_problems(own, item.name)) or _parser_problems(own, item.name)
    sources = [chat.template for chat in rendered]
    if rendered and None not in sources:  # None: the tokenizer has several
        yield from _unread(tokenizer.chat_format(), chats, sources)


def _parser_problems(tokenizer: Tokenizer, name: str) -> Iterator[Problem]:
    if tokenizer.chat_format(name).tools and not tokenizer.tool_call_parser(name):
        yield Problem(
            "--rl-tool-call-parser",
            f"{name} has tools, and its chat template writes calls in a form that no parser knows "
            f"({', '.join(PARSERS.names())}); name one with --rl-tool-call-parser, or your own, file.py:PARSER",
        )


def _without_effect(config: RLConfig, found: Sequence[Surveyed]) -> Iterator[Problem]:
    advice = "leave it out, or use an environment whose prompts are chats"
    may_chat = [item for item in found if item.first_chat is not None or item.is_harness]
    for name in ("chat_template", "chat_template_kwargs", "system_prompt"):
        flag = f"--{name.replace('_', '-')}"
        if getattr(config.tokenizer, name) and not may_chat:
            yield Problem(flag, f"{flag} has no effect: all prompts are plain text; {advice}")
    calling = any(item.is_harness or (item.chat.tools and item.first_chat is not None) for item in found)
    if config.tokenizer.rl_tool_call_parser != "auto" and not calling:
        text = "--rl-tool-call-parser has no effect: no chat has tools; leave it out"
        yield Problem("--rl-tool-call-parser", text)
    if config.tokenizer.rl_reasoning_parser != "none" and not any(item.is_harness for item in found):
        text = "--rl-reasoning-parser has no effect: no harness calls the endpoint; leave it out"
        yield Problem("--rl-reasoning-parser", text)
    for item in (item for item in found if item not in may_chat):
        if replace(item.chat, tools=()) != ChatFormat():
            what = "the chat template or system prompt of its entry has no effect: its prompts are plain text"
            yield Problem("--langrl-env-config", f"{item.name}: {what}; {advice}")


def _unread(of_run: ChatFormat, chats: Sequence[Surveyed], sources: Sequence[str]) -> Iterator[Problem]:
    """A variable that no template reads is most likely misspelt, and would be ignored without a word."""
    given = [("--chat-template-kwargs", "--chat-template-kwargs", of_run)]
    given += [("--langrl-env-config", f"{item.name}: chat_template_kwargs", item.chat) for item in chats]
    for flag, where, chat in given:
        for name in chat.template_kwargs:
            if not any(re.search(rf"\b{re.escape(name)}\b", source) for source in sources):
                yield Problem(flag, f"{where} has {name!r}, which no chat template reads; correct it, or leave it out")


def template_problems(tokenizer: Tokenizer, environment: str = "", deadline_s: float = DEADLINE_S) -> Iterator[Problem]:
    """Report why the chat template of an environment cannot render a single question, if it cannot.

    It is a program that came with the tokenizer: transformers renders it in jinja's sandbox, here where it can be
    stopped.
    """
    fault, path = _fault_of(tokenizer, environment, deadline_s), tokenizer.chat_format(environment).path
    if fault is not None and path is not None:
        yield Problem("--chat-template", f"chat template {path} {fault}; fix it, or use the tokenizer's own")
    elif fault is not None:
        yield Problem(
            "--tokenizer-model",
            f'the chat template of tokenizer {tokenizer.name!r} {fault}; fix "chat_template" in its '
            "tokenizer_config.json or its chat_template.jinja, give another with --chat-template FILE, or use the "
            "tokenizer of a chat model",
        )


def _fault_of(tokenizer: Tokenizer, environment: str, deadline_s: float) -> str | None:
    # Forked, so that nothing is imported or loaded again; the copy runs jinja and no thread of this process.
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_render, args=(tokenizer, environment, writer), daemon=True)
    process.start()
    writer.close()
    try:
        if not reader.poll(deadline_s):
            return f"does not end: a single question takes more than {deadline_s:g} s"
        return reader.recv_bytes().decode() or None
    except EOFError:
        process.join()
        return f"ends the process that renders it (exit code {process.exitcode})"
    finally:
        process.kill()
        process.join()
        reader.close()


def _render(tokenizer: Tokenizer, environment: str, writer: Connection) -> None:
    """In the process."""
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + _MEMORY_BYTES, resource.RLIM_INFINITY))
    messages: list[Message] = [{"role": "user", "content": _QUESTION}]
    fault = ""
    try:
        text = tokenizer.render(messages, environment)
        if len(text) > _LONGEST_TEXT:
            fault = f"makes more than {_LONGEST_TEXT:,} characters of a single question"
        system = tokenizer.chat_format(environment).system_prompt or ""
        for who, said in (("user", _QUESTION), ("system prompt", system)):
            if not fault and "".join(said.split()) not in "".join(text.split()):
                fault = f"leaves out what the {who} says: {shorten(said)} becomes {one_line(text, 100)!r}"
        if not fault and tokenizer.chat_format(environment).tools and tokenizer.ignores_tools(environment):
            fault = f"shows the model no tools, and {environment} has some"
    except Exception as error:  # noqa: BLE001 - a template raises whatever its author chose
        said = one_line(f"{type(error).__name__}: {error}", 300)
        fault = f"cannot render a single question ({said}{_line_of(error)})"
    writer.send_bytes(fault.encode(errors="replace"))


def _line_of(error: Exception) -> str:
    """The template's line; jinja puts its own frames into tracebacks."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    line = getattr(error, "lineno", None) or (lines[-1] if lines else None)
    return "" if line is None else f", line {line}"
