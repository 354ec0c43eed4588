"""The list of environments a run uses, a YAML file, or one entry of it in braces::

- environment: arithmetic        # or Megatron's spelling, agent_type: ArithmeticAgent
  args: {max_terms: 6}           # or agent_args
  weight: 2.0                    # share of the training prompts, relative to the other entries
  evaluation_only: false         # true: evaluated, never trained on
  in_process: false              # true: graded in the server itself, where nothing stops a grader that hangs
  grade_deadline: 5.0            # seconds one grade may take; these default to what the environment says
  run_deadline: 600.0            # seconds one sample of a harness may take
  eval_prompts: 30               # of an evaluation, in place of --rl-prompts-per-eval
  eval_samples: 32               # completions of each, in place of --rl-samples-per-eval-prompt
  chat_template: short.jinja     # of its chats, in place of --chat-template
  chat_template_kwargs: {enable_thinking: false}    # besides --chat-template-kwargs, and before them
  system_prompt: Be short.       # in place of --system-prompt; "" is none
  max_turns: 4                   # of a conversation, in place of the environment's
  mcp: {command: [python, prices.py]}    # a server of tools that the model may call (``mcp.settings``)
  name: long_arithmetic          # only needed to tell two entries of one environment apart
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.chat import ChatFormat, kwargs_refusal, read_template
from megatron_rl.environments.base import RULES as OF_CLASSES
from megatron_rl.environments.base import Environment, GroupEnvironment, HarnessEnvironment, suggestion, whole_number
from megatron_rl.environments.loader import MAX_NAME, NAME_PATTERN, find_environment, ignore
from megatron_rl.environments.mcp.settings import ServerSettings
from megatron_rl.environments.tool_calls import checked_tools
from megatron_rl.environments.tools import ToolEnvironment
from megatron_rl.environments.wire import ServedEnvironment
from megatron_rl.errors import ConfigError, one_line, problem_lines, shorten
from megatron_rl.json_text import dumps
from megatron_rl.user_files import is_entry, read_text

MAX_WEIGHT = 1e9
MAX_LIST = 2**20
"""Bytes of the YAML file. The safe loader's time grows faster than the file."""

OVERRIDES = ("in_process", "grade_deadline", "run_deadline", "max_turns")
"""Keys that are attributes of the environment's class."""
RULES: Mapping[str, tuple[object, tuple[type, ...], Callable[[Any], bool], str]] = {
    "weight": (1.0, (int, float), lambda value: 0 <= value <= MAX_WEIGHT, f"it must be from 0 to {MAX_WEIGHT:g}"),
    "evaluation_only": (False, *OF_CLASSES["evaluation_only"]),
    "name": (
        *(None, (str,), lambda value: NAME_PATTERN.fullmatch(value) and len(value) <= MAX_NAME),
        f"it must match {NAME_PATTERN.pattern} and have at most {MAX_NAME} characters",
    ),
    **{name: (None, *OF_CLASSES[name]) for name in OVERRIDES},
    "eval_prompts": (None, *whole_number(1_000_000)),
    "eval_samples": (None, *whole_number(100_000)),
    "chat_template": (None, (str,), lambda _: True, "it must be the path of a file"),
    "system_prompt": (None, (str,), lambda _: True, "it must be a text"),
}
"""Default of a key, the types and values that it may have besides, and how to say so."""
SPELLINGS = (("environment", "agent_type"), ("args", "agent_args"))
"""Ours and Megatron's."""
KEYS = (*chain(*SPELLINGS), *RULES, "chat_template_kwargs", "mcp")

BeginEntry = Callable[[str, str, str], None]
"""Told, before an author's code runs, the entry's file and line, its name, and what comes next."""


@dataclass(frozen=True)
class EnvironmentSpec:
    """One entry of the list, checked; ``name`` is unique in the run."""

    name: str
    reference: str
    """What ``find_environment`` resolves."""
    options: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    evaluation_only: bool = False
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Attributes that the entry sets in place of the environment's class, such as ``grade_deadline``."""
    eval_prompts: int | None = None
    eval_samples: int | None = None
    """None leaves it to the flags."""
    chat: ChatFormat = ChatFormat()
    """Of prompts that are chats, before what the flags say."""
    mcp: ServerSettings | None = None
    where: str = field(default="", compare=False)
    """File and line."""
    named: bool = field(default=False, compare=False)
    """Whether the user gave the name."""

    def create(self) -> Environment:
        """Return the environment with its options; ``ConfigError`` when it cannot be set up."""
        found = find_environment(self.reference)
        if self.mcp is not None:
            from megatron_rl.environments.mcp.equipment import equip, with_tools  # no other environment needs it

            found = with_tools(found)
        environment = found.from_options(self.options)
        for name, value in {"evaluation_only": self.evaluation_only, **self.overrides}.items():
            setattr(environment, name, value)
        if self.mcp is not None:
            equip(environment, self.mcp)
        try:
            checked_tools(environment.tools)
        except ValueError as error:
            raise ConfigError([f"its tools cannot be shown to a model: {error}"]) from error
        return environment

    def served(self, environment: Environment) -> ServedEnvironment:
        """Describe ``environment``, which `create` made, for a run."""
        return ServedEnvironment(
            self.name, self.weight, environment.evaluation_only, environment.max_turns,
            isinstance(environment, HarnessEnvironment), self.eval_prompts, self.eval_samples,
            replace(self.chat, tools=tuple(environment.tools)), tuple(environment.reward_range),
            environment.grade_deadline if isinstance(environment, GroupEnvironment) else None,
        )  # fmt: skip


def load_environment_specs(
    path: str | Path, skip: Collection[str] = (), begin: BeginEntry = ignore
) -> list[EnvironmentSpec]:
    """Return the entries of the YAML list at ``path``; one ``ConfigError`` carries all problems found.

    Imports the modules they name, except those of the entries to ``skip``, by file and line: they are left out.
    """
    specs: list[EnvironmentSpec] = []
    problems: list[str] = []
    for entry, line in zip(*_read_yaml(path), strict=True):
        where = f"{shown_list(path)}:{line}"
        if where in skip:
            continue
        try:
            specs.append(_parse_entry(entry, where, partial(begin, where)))
        except ConfigError as error:
            problems += [f"{where}: {problem}" for problem in error.lines]
    problems += _duplicates(specs)
    trained = [spec.weight for spec in specs if not spec.evaluation_only]
    if trained and sum(trained) == 0 and not skip:
        problems.append(f"{shown_list(path)}: the weights sum to 0; give at least one entry a positive weight")
    if problems:
        raise ConfigError(problem_lines(problems))
    return _with_distinct_names(specs)


def shown_list(path: str | Path) -> str:
    """Return what messages call the list: its path, where it is one."""
    return "the environment" if is_entry(str(path)) else str(path)


def list_text(path: str | Path) -> str:
    """Return the YAML of the list: that of a file, or the entry in braces that stands in place of one.

    Raises:
        ConfigError: the file cannot be read.
    """
    if is_entry(str(path)):
        return f"- {path}"
    try:
        return read_text(Path(path), MAX_LIST)
    except ValueError as error:
        raise ConfigError([f"the environment list {shorten(str(path))} {error}; give a YAML file"]) from error


def _read_yaml(source: str | Path) -> tuple[list[Any], list[int]]:
    """The entries of the list and the line each starts at."""
    text, path = list_text(source), shown_list(source)
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        repeated = [] if node is None else list(_repeated_keys(node, set()))
        entries = loader.construct_document(node) if node else None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError([f"{line}: not valid YAML: {one_line(error.problem or error.context)}"]) from error
    except (
        yaml.YAMLError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError,
    ) as error:  # fmt: skip
        # PyYAML raises anything for a value that is not of its type, such as !!int "", and for deep nesting.
        raise ConfigError([f"{path}: not valid YAML: {one_line(str(error))}"]) from error
    if not isinstance(entries, list) or not entries:
        found = "an empty file" if node is None else f"a {type(entries).__name__}"
        advice = "write '- environment: NAME'"
        raise ConfigError([f"{path}: must be a list of environments, not {found}; {advice}"])
    if repeated:
        lines = [f"{path}:{key.start_mark.line + 1}: {shorten(key.value)} is given twice" for key in repeated]
        raise ConfigError(problem_lines(lines))
    return entries, [item.start_mark.line + 1 for item in node.value]


def _repeated_keys(node: yaml.Node, seen: set[int]) -> Iterator[yaml.ScalarNode]:
    """The keys that a mapping below ``node`` has twice, of which PyYAML keeps the last without a word."""
    if isinstance(node, yaml.ScalarNode) or id(node) in seen:
        return
    seen.add(id(node))
    pairs = node.value if isinstance(node, yaml.MappingNode) else [(None, value) for value in node.value]
    keys: set[str] = set()
    for key, value in pairs:
        if isinstance(key, yaml.ScalarNode):
            if key.value in keys:
                yield key
            keys.add(key.value)
        yield from _repeated_keys(value, seen)


def _parse_entry(entry: object, where: str, begin: Callable[[str, str], None]) -> EnvironmentSpec:
    if not isinstance(entry, Mapping):
        raise ConfigError([f"an entry must be a mapping such as 'environment: NAME', not {shorten(entry)}"])
    problems = [f"unknown key {shorten(key)}{suggestion(key, KEYS)}" for key in entry if key not in KEYS]
    both = [(ours, megatrons) for ours, megatrons in SPELLINGS if ours in entry and megatrons in entry]
    problems += [f"both {ours!r} and {megatrons!r} are given; keep one" for ours, megatrons in both]
    reference, options = (entry.get(ours, entry.get(megatrons)) for ours, megatrons in SPELLINGS)
    values: dict[str, Any] = {}
    for key, (default, types, is_right, wanted) in RULES.items():
        values[key] = value = entry.get(key, default)
        if value is not default and not (type(value) in types and is_right(value)):
            problems.append(f"{key} is {shorten(value)}; {wanted}")
    chat = _chat_format(entry, values.pop("chat_template"), values.pop("system_prompt"), problems)
    values["mcp"] = ServerSettings.of_entry(entry, problems)
    if fault := _fault_of(options := options or {}):
        problems, options = [*problems, fault], {}
    environment = None
    if not isinstance(reference, str) or not reference:
        problems.append("no environment is named; add 'environment: NAME'")
    else:
        try:
            environment = find_environment(reference, partial(begin, reference))
            problems += environment.option_problems(options)
        except ConfigError as error:
            problems += error.lines
    if environment is not None:
        problems += _unfit_keys(entry, environment)
    if problems:
        raise ConfigError(problems)
    values["evaluation_only"] |= environment.evaluation_only
    named = values["name"] is not None
    values |= {"name": values["name"] or environment.name, "weight": float(values["weight"])}
    overrides = {key: value for key in OVERRIDES if (value := values.pop(key)) is not None}
    return EnvironmentSpec(
        reference=reference, options=options, overrides=overrides, named=named, where=where, chat=chat, **values
    )


def _unfit_keys(entry: Mapping[str, Any], environment: type[Environment]) -> Iterator[str]:
    """What is wrong with the keys of an entry for an environment of this kind."""
    if environment.evaluation_only and entry.get("evaluation_only") is False:
        why = "models are measured by it"
        yield f"{environment.name} cannot be trained on, because {why}; set evaluation_only: true"
    if issubclass(environment, HarnessEnvironment):
        compares = issubclass(environment, GroupEnvironment)
        foreign, why = ("in_process", "grade_deadline", "max_turns"), "is of graders, and it is a harness"
        foreign = tuple(key for key in foreign if key != "grade_deadline" or not compares)
    else:
        foreign, why = ("run_deadline",), "is of harnesses, and it is none"
    for key in foreign:
        if entry.get(key):
            yield f"{environment.name} is given {key}, which {why}; leave it out"
    has_step = environment.step is not Environment.step
    if "mcp" not in entry:
        if entry.get("max_turns") and not has_step and "max_turns" not in foreign:
            yield f"{environment.name} is given max_turns, but grades the first turn; leave it out"
    elif issubclass(environment, HarnessEnvironment) or has_step and not issubclass(environment, ToolEnvironment):
        yield f"{environment.name} is given mcp, but answers calls itself; leave mcp out, or make it a ToolEnvironment"
    elif issubclass(environment, GroupEnvironment):
        yield f"{environment.name} is given mcp, but grades answers of one turn together; leave mcp out"
    elif entry.get("in_process"):
        yield f"{environment.name} is given in_process and mcp, whose calls wait; leave in_process out"


def _chat_format(entry: Mapping[str, Any], path: object, system_prompt: object, problems: list[str]) -> ChatFormat:
    """The three keys of chats; what is wrong with them is added to ``problems``."""
    kwargs, template = entry.get("chat_template_kwargs") or {}, None
    if (fault := kwargs_refusal(kwargs)) is not None:
        problems.append(f"chat_template_kwargs {fault}")
    if isinstance(path, str):
        try:
            template = read_template(path)
        except ValueError as error:
            problems.append(f"chat_template {shorten(path)} {error}")
    return ChatFormat(template, kwargs, system_prompt, path)


def _fault_of(options: object) -> str:
    """What keeps them from travelling to the workers as JSON."""
    if not isinstance(options, Mapping):
        return f"args is {shorten(options)}; it must be a mapping of options"
    try:
        dumps(options)
    except (TypeError, ValueError) as error:
        return f"args is {shorten(options)}; it must be plain JSON values: {one_line(str(error))}"
    return ""


def _duplicates(specs: list[EnvironmentSpec]) -> list[str]:
    """Entries that repeat another, or that claim a name another entry claims."""
    problems = []
    for index, spec in enumerate(specs):
        for earlier in specs[:index]:
            same = replace(spec, weight=earlier.weight, reference=earlier.reference) == earlier
            if same or (spec.name == earlier.name and spec.named and earlier.named):
                what = "repeats" if same else f"has the name {spec.name!r} of"
                problems.append(f"{spec.where}: {what} {earlier.where}; drop one, or give it another 'name'")
                break
    return problems


def _with_distinct_names(specs: list[EnvironmentSpec]) -> list[EnvironmentSpec]:
    """``arithmetic`` twice becomes ``arithmetic`` and ``arithmetic_2``; a name the user gave stays."""
    taken = {spec.name for spec in specs if spec.named}
    distinct = []
    for spec in specs:
        name, number = spec.name, 2
        while name in taken and not spec.named:
            name, number = f"{spec.name}_{number}", number + 1
        taken.add(name)
        distinct.append(replace(spec, name=name))
    return distinct
