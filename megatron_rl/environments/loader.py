"""Finds environments; none is registered and none is imported by name.

Three places are looked at, in this order: the folder ``environments/`` (installed as
``megatron_rl_environments``), the entry points of group ``megatron_rl.environments`` that other
packages declare, and, for a reference that has a colon, ``package.module:Class``.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

import megatron_rl
from megatron_rl.environments.base import Environment
from megatron_rl.environments.naming import suggestion
from megatron_rl.errors import ConfigError

PACKAGE = "megatron_rl_environments"
ENTRY_POINT_GROUP = "megatron_rl.environments"
NAME_PATTERN = re.compile(r"[a-z0-9][a-z0-9_.-]*")
"""Names appear in URLs and in metric keys."""
NEW_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
"""A name that is also a module's."""


@dataclass(frozen=True)
class BrokenEnvironment:
    """An environment that could not be imported."""

    name: str
    traceback: str


@dataclass(frozen=True)
class Discovery:
    """All that was found: the environments by name, and those that failed to import."""

    environments: Mapping[str, type[Environment]]
    broken: tuple[BrokenEnvironment, ...]


def discover() -> Discovery:
    """Imports every environment there is; one that raises is reported and does not hide the others."""
    environments: dict[str, type[Environment]] = {}
    broken = []
    for name, load in _candidates():
        try:
            for found in load():
                environments.setdefault(_checked_name(found), found)
        except (Exception, SystemExit):  # noqa: BLE001 - an author's module may raise anything
            broken.append(BrokenEnvironment(name, traceback.format_exc()))
    return Discovery(dict(sorted(environments.items())), tuple(broken))


def find_environment(reference: str) -> type[Environment]:
    """The class named by ``reference``: ``module:Class``, or a name in any case, with or without ``Agent``.

    Of a dotted name (``examples.rl.environments.dapo_agent.DAPOAgent``) only the last part counts.
    """
    if ":" in reference:
        return _import_class(reference)
    wanted = canonical(reference.rpartition(".")[2])
    direct = _import_folder(wanted)
    if direct is not None:
        return direct
    discovery = discover()
    for name, environment in discovery.environments.items():
        if canonical(name) == wanted:
            return environment
    for broken in discovery.broken:
        if canonical(broken.name) == wanted:
            raise ConfigError([f"environment {broken.name!r} fails to import:\n{broken.traceback}"])
    raise ConfigError([f"unknown environment {reference!r}{suggestion(wanted, discovery.environments)}"])


def _candidates() -> Iterator[tuple[str, Callable[[], list[type[Environment]]]]]:
    """Pairs of a name and a function that imports it and returns the environment classes found there."""
    package = _environments_package()
    for module in pkgutil.iter_modules(package.__path__ if package else []):
        if not module.name.startswith("_"):
            yield module.name, lambda name=module.name: _classes_of_folder(name)
    for point in entry_points(group=ENTRY_POINT_GROUP):
        yield point.name, lambda point=point: [_checked_class(point.load(), point.value)]


def _environments_package() -> ModuleType | None:
    """The installed package, or the folder beside ``megatron_rl`` loaded under the package's name."""
    if PACKAGE in sys.modules or importlib.util.find_spec(PACKAGE):
        return importlib.import_module(PACKAGE)
    init = Path(megatron_rl.__file__).resolve().parent.parent / "environments" / "__init__.py"
    if not init.is_file():
        return None
    folder = str(init.parent)
    spec = importlib.util.spec_from_file_location(PACKAGE, init, submodule_search_locations=[folder])
    module = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE] = module
    spec.loader.exec_module(module)
    return module


def _import_folder(wanted: str) -> type[Environment] | None:
    """The environment ``wanted`` out of the module of the same name.

    Tried before full discovery so that a run never imports what the other environments depend on.
    """
    package = _environments_package()
    modules = pkgutil.iter_modules(package.__path__ if package else [])
    module = next((found.name for found in modules if canonical(found.name) == wanted), None)
    if module is None or module.startswith("_"):
        return None
    try:
        classes = _classes_of_folder(module)
    except (Exception, SystemExit) as error:
        raise _import_failure(module) from error
    return next((found for found in classes if canonical(found.name) == wanted), None)


def _classes_of_folder(name: str) -> list[type[Environment]]:
    module = importlib.import_module(f"{PACKAGE}.{name}")
    members = [value for value in vars(module).values() if isinstance(value, type)]
    classes = [
        value
        for value in dict.fromkeys(members)
        if issubclass(value, Environment)
        and not inspect.isabstract(value)
        and value.__module__.startswith(module.__name__)
    ]
    if not classes:
        raise ConfigError([f"{module.__name__} defines no Environment; start a helper's name with '_'"])
    for found in classes:
        _checked_name(found)
    return classes


def _import_class(reference: str) -> type[Environment]:
    module_name, _, class_name = reference.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise _import_failure(reference) from error
    if class_name not in vars(module):
        classes = [name for name, value in vars(module).items() if isinstance(value, type)]
        raise ConfigError([f"{module_name} has no class {class_name!r}{suggestion(class_name, classes)}"])
    found = _checked_class(vars(module)[class_name], reference)
    _checked_name(found)
    return found


def _import_failure(reference: str) -> ConfigError:
    """Of the exception being handled."""
    return ConfigError([f"environment {reference!r} fails to import:\n{traceback.format_exc()}"])


def _checked_class(value: object, reference: str) -> type[Environment]:
    if not (isinstance(value, type) and issubclass(value, Environment)):
        raise ConfigError([f"{reference!r} is not an Environment; derive it from {Environment.__module__}"])
    if inspect.isabstract(value):
        raise ConfigError([f"{reference!r} lacks {', '.join(sorted(value.__abstractmethods__))}"])
    return value


def _checked_name(environment: type[Environment]) -> str:
    name = getattr(environment, "name", None)
    if not isinstance(name, str) or not NAME_PATTERN.fullmatch(name):
        where = f"{environment.__module__}:{environment.__qualname__}"
        raise ConfigError([f"{where} has the name {name!r}; set `name` to match {NAME_PATTERN.pattern}"])
    return name


def canonical(name: str) -> str:
    """``WordCountAgent``, ``word_count_agent`` and ``word-count`` are all ``wordcount``."""
    joined = re.sub("[_-]", "", name.lower())
    return joined.removesuffix("agent") or joined
