"""The settings of chats: whether files and JSON can be read, and the templates render a question."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence

from megatron_rl.chat import ChatFormat, kwargs_refusal, read_template, reason_in_template
from megatron_rl.config.rl_config import RLConfig
from megatron_rl.environments.loading import Surveyed
from megatron_rl.errors import ConfigError, Problem, one_line, shorten
from megatron_rl.json_text import loads
from megatron_rl.registry import PARSERS, REASONING, Registry
from megatron_rl.tokenizer import Tokenizer
from megatron_rl.types import Message

_QUESTION = "What is 2 + 3?"
_SINGLE: Mapping[str, Sequence[Message]] = {"a single question": [{"role": "user", "content": _QUESTION}]}
_MOST_SHOWN = 3

logger = logging.getLogger(__name__)


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
    rendered, training = list[ChatFormat](), config.training
    splits = () if training.eval_only else ("train" if training.perform_rl_step else "demonstration",)
    splits += ("test",) if training.eval_only or training.eval_interval is not None else ()
    for item in chats:
        chat = own.chat_format(item.name)
        if not own.has_chat_template(item.name):
            yield Problem(
                "--tokenizer-model",
                f"{item.name}: {item.first_chat.partition(' of ')[0]} is a chat, and tokenizer {tokenizer.name!r} has "
                "no chat template; give one with --chat-template FILE, or use the tokenizer of a chat model",
            )
        else:
            read = {row: messages for row, messages in item.chats.items() if row.startswith(splits)}
            yield from list(template_problems(own, item.name, read)) or _parser_problems(own, item.name)
            rendered.append(chat)
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


def _unread(of_run: ChatFormat, chats: Sequence[Surveyed], sources: Sequence[str]) -> Iterator[Problem]:
    """A variable that no template reads is most likely misspelt, and would be ignored without a word."""
    given = [("--chat-template-kwargs", "--chat-template-kwargs", of_run)]
    given += [("--langrl-env-config", f"{item.name}: chat_template_kwargs", item.chat) for item in chats]
    for flag, where, chat in given:
        for name in chat.template_kwargs:
            if not any(re.search(rf"\b{re.escape(name)}\b", source) for source in sources):
                yield Problem(flag, f"{where} has {name!r}, which no chat template reads; correct it, or leave it out")


def template_problems(
    tokenizer: Tokenizer, environment: str = "", chats: Mapping[str, Sequence[Message]] | None = None
) -> Iterator[Problem]:
    """Report why the chat template of an environment cannot render a single question, or ``chats`` by their rows.

    Rows that it refuses are skipped, with a warning; they are a problem where no other row is left.
    """
    path, refused = tokenizer.chat_format(environment).path, dict[str, str]()
    for row, messages in {**_SINGLE, **(chats or {})}.items():
        fault, is_refused = _rendered(tokenizer, environment, row, messages)
        if is_refused and row not in _SINGLE:
            refused[row] = fault
        elif fault and path is not None:
            yield Problem("--chat-template", f"chat template {path} {fault}; fix it, or use the tokenizer's own")
        elif fault:
            yield Problem(
                "--tokenizer-model",
                f'the chat template of tokenizer {tokenizer.name!r} {fault}; fix "chat_template" in its '
                "tokenizer_config.json or its chat_template.jinja, give another with --chat-template FILE, or use the "
                "tokenizer of a chat model",
            )
        if fault and row in _SINGLE:
            return
    for split in dict.fromkeys(row.partition(" ")[0] for row in refused):
        faults = [fault for row, fault in refused.items() if row.startswith(split)]
        text = f"{environment or '--prompts'}: the chat template {'; '.join(faults[:_MOST_SHOWN])}"
        if split != "prompt" and any(row.startswith(split) and row not in refused for row in chats):
            logger.warning("%s; rows with these roles will be skipped", text)
        else:
            advice = "change the roles (leave out a system prompt, say), or give another template with --chat-template"
            yield Problem("--langrl-env-config", f"{text}; {advice}")


def _rendered(tokenizer: Tokenizer, environment: str, row: str, messages: Sequence[Message]) -> tuple[str, bool]:
    """Return the template's fault for a row, empty if it has none, and whether the template raised an error."""
    try:
        return _fault_of(tokenizer, environment, row, messages) if messages else "", False
    except Exception as error:  # noqa: BLE001 - a template raises whatever its author chose
        return f"cannot render {row} ({reason_in_template(error.__cause__ or error)})", True


def _fault_of(tokenizer: Tokenizer, environment: str, row: str, messages: Sequence[Message]) -> str:
    text, chat = tokenizer.render(messages, environment), tokenizer.chat_format(environment)
    for who, said in (("user", _QUESTION), ("system prompt", chat.system_prompt or "")) if row in _SINGLE else ():
        if "".join(said.split()) not in "".join(text.split()):
            return f"leaves out what the {who} says: {shorten(said)} becomes {one_line(text, 100)!r}"
    if row in _SINGLE and chat.tools and tokenizer.ignores_tools(environment):
        return f"shows the model no tools, and {environment} has some"
    return ""
