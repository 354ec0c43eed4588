"""The list of environments a run uses, a YAML file::

- environment: arithmetic        # or Megatron's spelling, agent_type: ArithmeticAgent
  args: {max_terms: 6}           # or agent_args
  weight: 2.0                    # share of the training prompts, relative to the other entries
  evaluation_only: false         # true: evaluated, never trained on
  in_process: false              # true: graded in the server itself, where nothing stops a grader that hangs
  grade_deadline: 5.0            # seconds one grade may take; both default to what the environment says
  name: long_arithmetic          # only needed to tell two entries of one environment apart
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.environments.base import Environment
from megatron_rl.environments.checks import task_problems
from megatron_rl.environments.loader import NAME_PATTERN, find_environment
from megatron_rl.environments.naming import suggestion
from megatron_rl.errors import ConfigError

KEYS = (
    *("environment", "agent_type", "args", "agent_args", "weight"),
    *("evaluation_only", "in_process", "grade_deadline", "name"),
)
MAX_GRADE_DEADLINE = 600.0


@dataclass(frozen=True)
class EnvironmentSpec:
    """One entry of the list, checked; ``name`` is unique in the run."""

    name: str
    reference: str
    """What ``find_environment`` resolves."""
    options: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    evaluation_only: bool = False
    in_process: bool | None = None
    """None leaves it, and the next, to the environment."""
    grade_deadline: float | None = None

    def create(self) -> Environment:
        """The environment with its options; ``ConfigError`` when it cannot be set up."""
        environment = find_environment(self.reference).from_options(self.options)
        environment.evaluation_only = self.evaluation_only
        for name in ("in_process", "grade_deadline"):
            if getattr(self, name) is not None:
                setattr(environment, name, getattr(self, name))
        return environment


def load_environment_specs(path: str | Path) -> list[EnvironmentSpec]:
    """The entries of the YAML list at ``path``; one ``ConfigError`` carries all problems found."""
    entries, lines = _read_yaml(Path(path))
    specs: list[EnvironmentSpec] = []
    wheres: list[str] = []
    explicit: list[bool] = []
    problems: list[str] = []
    for entry, line in zip(entries, lines, strict=True):
        where = f"{path}:{line}"
        try:
            specs.append(_parse_entry(entry))
            wheres.append(where)
            explicit.append("name" in entry)
        except ConfigError as error:
            problems += [f"{where}: {problem}" for problem in error.problems]
    problems += _duplicates(specs, wheres, explicit)
    trained = [spec.weight for spec in specs if not spec.evaluation_only]
    if trained and sum(trained) == 0:
        problems.append(f"{path}: the weights sum to 0; give at least one entry a positive weight")
    if problems:
        raise ConfigError(problems)
    return _with_distinct_names(specs, explicit)


def check_environments(path: str | Path) -> list[str]:
    """What is wrong with the list at ``path``, its environments and all their tasks; empty if nothing."""
    try:
        set_up_environments(path)
    except ConfigError as error:
        return list(error.problems)
    return []


def set_up_environments(path: str | Path) -> dict[str, Environment]:
    """The environments of the list at ``path`` by name, all their tasks checked; ``ConfigError`` otherwise."""
    environments: dict[str, Environment] = {}
    problems = []
    for spec in load_environment_specs(path):
        try:
            environments[spec.name] = spec.create()
            found = task_problems(environments[spec.name])
        except ConfigError as error:
            found = list(error.problems)
        problems += [f"{spec.name}: {problem}" for problem in found]
    if problems:
        raise ConfigError(problems)
    return environments


def _read_yaml(path: Path) -> tuple[list[Any], list[int]]:
    """The entries of the list and the line each starts at."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"cannot read the environment list {path}: {error}"]) from error
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        entries = loader.construct_document(node) if node else None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError([f"{line}: not valid YAML: {error.problem or error.context}"]) from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError([f"{path}: not valid YAML: {error}"]) from error
    if not isinstance(entries, list) or not entries:
        found = "an empty file" if node is None else f"a {type(entries).__name__}"
        advice = "write '- environment: NAME'"
        raise ConfigError([f"{path}: must be a list of environments, not {found}; {advice}"])
    _refuse_repeated_keys(path, node)
    return entries, [item.start_mark.line + 1 for item in node.value]


def _refuse_repeated_keys(path: Path, node: yaml.SequenceNode) -> None:
    """PyYAML keeps the last of two equal keys without a word."""
    problems = []
    for item in node.value:
        if isinstance(item, yaml.MappingNode):
            counts = Counter(key.value for key, _ in item.value if isinstance(key, yaml.ScalarNode))
            line = item.start_mark.line + 1
            problems += [f"{path}:{line}: {key!r} is given twice" for key, n in counts.items() if n > 1]
    if problems:
        raise ConfigError(problems)


def _parse_entry(entry: object) -> EnvironmentSpec:
    if not isinstance(entry, Mapping):
        raise ConfigError([f"an entry must be a mapping such as 'environment: NAME', not {entry!r}"])
    problems = [f"unknown key {key!r}{suggestion(str(key), KEYS)}" for key in entry if key not in KEYS]
    reference = _either(entry, "environment", "agent_type", problems)
    options = _either(entry, "args", "agent_args", problems) or {}
    weight = entry.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)):
        problems.append(f"weight is {weight!r}; it must be a number")
    elif not math.isfinite(weight) or weight < 0:
        problems.append(f"weight is {weight}; it must be finite and not negative")
    evaluation_only = entry.get("evaluation_only", False)
    if not isinstance(evaluation_only, bool):
        problems.append(f"evaluation_only is {evaluation_only!r}; it must be true or false")
    name = entry.get("name")
    if name is not None and not (isinstance(name, str) and NAME_PATTERN.fullmatch(name)):
        problems.append(f"name is {name!r}; it must match {NAME_PATTERN.pattern}")
    grading = _grading_options(entry, problems)
    if not isinstance(options, Mapping):
        problems.append(f"args is {options!r}; it must be a mapping of options")
        options = {}
    environment = _resolve(reference, options, problems)
    if environment is not None and environment.evaluation_only and entry.get("evaluation_only") is False:
        why = "models are measured by it"
        problems.append(f"{environment.name} cannot be trained on, because {why}; set evaluation_only: true")
    if environment is None or problems:
        raise ConfigError(problems)
    evaluation_only = evaluation_only or environment.evaluation_only
    name = name or environment.name
    return EnvironmentSpec(name, reference, options, float(weight), evaluation_only, **grading)


def _grading_options(entry: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """Where an entry's samples are graded, and for how long."""
    in_process, deadline = entry.get("in_process"), entry.get("grade_deadline")
    if in_process is not None and not isinstance(in_process, bool):
        problems.append(f"in_process is {in_process!r}; it must be true or false")
    if deadline is not None:
        number = isinstance(deadline, (int, float)) and not isinstance(deadline, bool)
        if not number or not 0 < deadline <= MAX_GRADE_DEADLINE:
            problems.append(
                f"grade_deadline is {deadline!r}; give seconds, above 0 and up to {MAX_GRADE_DEADLINE:g}"
            )
    return {"in_process": in_process, "grade_deadline": deadline}


def _either(entry: Mapping[str, Any], ours: str, megatrons: str, problems: list[str]) -> Any:
    """The value under either spelling of a key."""
    if ours in entry and megatrons in entry:
        problems.append(f"both {ours!r} and {megatrons!r} are given; keep one")
    return entry.get(ours, entry.get(megatrons))


def _resolve(reference: object, options: Mapping, problems: list[str]) -> type[Environment] | None:
    if not isinstance(reference, str) or not reference:
        problems.append("no environment is named; add 'environment: NAME'")
        return None
    try:
        environment = find_environment(reference)
    except ConfigError as error:
        problems.extend(error.problems)
        return None
    problems.extend(environment.option_problems(options))
    return environment


def _duplicates(specs: list[EnvironmentSpec], wheres: list[str], explicit: list[bool]) -> list[str]:
    """Entries that repeat another, or that claim a name another entry claims."""
    problems = []
    for index, spec in enumerate(specs):
        for other in range(index):
            earlier = specs[other]
            same = replace(spec, weight=earlier.weight, reference=earlier.reference) == earlier
            if same or (spec.name == earlier.name and explicit[index] and explicit[other]):
                what = "repeats" if same else f"has the name {spec.name!r} of"
                advice = "drop one, or give it another 'name'"
                problems.append(f"{wheres[index]}: {what} {wheres[other]}; {advice}")
                break
    return problems


def _with_distinct_names(specs: list[EnvironmentSpec], explicit: list[bool]) -> list[EnvironmentSpec]:
    """``arithmetic`` twice becomes ``arithmetic`` and ``arithmetic_2``; a name the user gave stays."""
    taken = {spec.name for spec, given in zip(specs, explicit, strict=True) if given}
    distinct = []
    for spec, given in zip(specs, explicit, strict=True):
        name, number = spec.name, 2
        while name in taken and not given:
            name, number = f"{spec.name}_{number}", number + 1
        taken.add(name)
        distinct.append(replace(spec, name=name))
    return distinct
