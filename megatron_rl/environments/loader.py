"""Finds environments; none is registered and none is imported by name.

Three places are looked at, in this order: the folder ``environments/`` beside this package (installed as
``megatron_rl_environments``), the entry points of group ``megatron_rl.environments`` that other
packages declare, and, for a reference that has a colon, ``package.module:Class`` or ``file.py:Class``, also the current
directory.

An author's module may hang, exit or crash here: callers that must not use ``loading``.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterator
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

import megatron_rl
from megatron_rl.environments.base import Environment, suggestion
from megatron_rl.errors import ConfigError, one_line, shorten
from megatron_rl.registry import import_reference

PACKAGE = "megatron_rl_environments"
ENTRY_POINT_GROUP = "megatron_rl.environments"
NAME_PATTERN = re.compile(r"[a-z0-9][a-z0-9_.-]*")
"""Names appear in URLs and in metric keys."""
MAX_NAME = 100
MODULE_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")

Begin = Callable[[str], None]
"""Told what comes next, before an author's code runs."""


def ignore(*_: str) -> None:
    """Do nothing: the ``Begin`` of callers that do not follow the stages."""


def discover(
    begin: Begin = ignore, skip: Collection[str] = ()
) -> tuple[dict[str, type[Environment]], dict[str, BaseException]]:
    """Imports every environment but those to ``skip``: what was found by name, and what a module raised by its name."""
    environments: dict[str, type[Environment]] = {}
    broken: dict[str, BaseException] = {}
    for name, load in _candidates():
        if name in skip:
            continue
        begin(name)
        try:
            for found in load():
                str(found.description())
                environments.setdefault(found.name, found)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - an author's module may raise anything
            broken[name] = error
    return dict(sorted(environments.items())), broken


def find_environment(reference: str, begin: Begin = ignore) -> type[Environment]:
    """Find the class named by ``reference``: ``module:Class``, ``file.py:Class``, or a name, with or without ``Agent``.

    Of a dotted name (``examples.rl.environments.dapo_agent.DAPOAgent``) only the last part counts.
    """
    if ":" in reference:
        begin("its module was imported")
        return _import_class(reference)
    wanted = canonical(reference.rpartition(".")[2])
    # a module of that name comes first, so that a run never imports what the other environments depend on
    module = next((name for name in _module_names() if canonical(name) == wanted), None)
    if module is not None:
        begin("its module was imported")
        with _importing(module):
            classes = _classes_of_folder(module)
        for found in classes:
            if canonical(found.name) == wanted:
                return found
    environments, broken = discover(lambda name: begin(f"module {name!r} was imported in search of it"))
    for name, found in environments.items():
        if canonical(name) == wanted:
            return found
    for name, error in broken.items():
        if canonical(name) == wanted:
            with _importing(name):
                raise error
    raise ConfigError([f"unknown environment {shorten(reference)}{suggestion(wanted, environments)}"])


@contextlib.contextmanager
def _importing(reference: str) -> Iterator[None]:
    """Whatever is raised inside becomes a ``ConfigError`` that names what was imported."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise ConfigError([f"environment {reference!r} cannot be imported: {reason_of(error)}"]) from error


def _candidates() -> Iterator[tuple[str, Callable[[], list[type[Environment]]]]]:
    """Pairs of a name and a function that imports it and returns the environment classes found there."""
    for name in _module_names():
        yield name, partial(_classes_of_folder, name)
    for point in entry_points(group=ENTRY_POINT_GROUP):
        yield point.name, lambda point=point: [_checked_class(point.load(), point.value)]


def _module_names() -> list[str]:
    """Of the folder's environments."""
    package = _environments_package()
    modules = pkgutil.iter_modules(package.__path__ if package else [])
    return [module.name for module in modules if not module.name.startswith("_")]


def is_listed(module: Path) -> bool:
    """Return whether ``module``, an ``__init__.py``, lies in the folder of environments."""
    package = _environments_package()
    return package is not None and os.path.realpath(module.parent.parent) in map(os.path.realpath, package.__path__)


def _environments_package() -> ModuleType | None:
    """The folder beside ``megatron_rl`` under the package's name, else the installed package.

    The folder comes first: with one virtual environment for two checkouts, the installed package is the folder
    of the other.
    """
    root = Path(os.path.realpath(megatron_rl.__file__)).parent.parent
    init = root / "environments" / "__init__.py"
    if (root / PACKAGE).is_dir() or not init.is_file():
        return importlib.import_module(PACKAGE) if importlib.util.find_spec(PACKAGE) else None
    present = sys.modules.get(PACKAGE)
    if present is not None and present.__file__ == str(init):
        return present
    spec = importlib.util.spec_from_file_location(PACKAGE, init, submodule_search_locations=[str(init.parent)])
    module = importlib.util.module_from_spec(spec)
    for name in [name for name in sys.modules if name.startswith(f"{PACKAGE}.")]:
        del sys.modules[name]
    sys.modules[PACKAGE] = module
    spec.loader.exec_module(module)
    return module


def _classes_of_folder(name: str) -> list[type[Environment]]:
    module = importlib.import_module(f"{PACKAGE}.{name}")
    members = [value for value in vars(module).values() if isinstance(value, type)]
    own = [
        value
        for value in dict.fromkeys(members)
        if issubclass(value, Environment) and value.__module__.startswith(module.__name__)
    ]
    # where all lack something, the first says what
    classes = [value for value in own if not inspect.isabstract(value)] or own[:1]
    if not classes:
        raise ConfigError([f"{module.__name__} defines no Environment; start a helper's name with '_'"])
    return [_checked_class(found, found.__name__) for found in classes]


def _import_class(reference: str) -> type[Environment]:
    module_name, _, class_name = reference.rpartition(":")
    is_module = module_name.endswith(".py") or MODULE_NAME.fullmatch(module_name)
    if not is_module or not class_name.isidentifier():
        raise ConfigError([f"{shorten(reference)} names no class; write package.module:Class or file.py:Class"])
    module = _import_module(module_name, reference)
    if class_name not in vars(module):
        classes = [name for name, value in vars(module).items() if isinstance(value, type)]
        raise ConfigError([f"{module_name} has no class {class_name!r}{suggestion(class_name, classes)}"])
    return _checked_class(vars(module)[class_name], reference)


def _import_module(module_name: str, reference: str) -> ModuleType:
    if module_name.partition(".")[0] == PACKAGE:
        _environments_package()
    with _importing(reference):
        try:
            return import_reference(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise
            missing = error.name
    where = f"it is looked for in {os.getcwd()} and among the installed packages (PYTHONPATH adds folders)"
    raise ConfigError([f"environment {reference!r}: there is no module {missing!r}; {where}"])


def reason_of(error: BaseException) -> str:
    """Return ``KeyError: 'gold' (parity.py:12)``: type, text and the last line that is the author's."""
    if isinstance(error, ConfigError):
        return one_line(str(error))
    frames = authors_frames(error)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return one_line(f"{type(error).__name__}: {error}".rstrip(": ")) + place


def authors_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """List where an error passed through code that is neither Python's nor this package's."""
    library, package = os.path.dirname(os.__file__), os.path.dirname(__file__)
    return [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((package, "<"))
        and ("site-packages" in frame.filename or not frame.filename.startswith(library))
    ]


def _checked_class(value: object, reference: str) -> type[Environment]:
    if not (isinstance(value, type) and issubclass(value, Environment)):
        raise ConfigError([f"{reference!r} is not an Environment; derive it from {Environment.__module__}"])
    if inspect.isabstract(value):
        raise ConfigError([f"{reference!r} lacks {', '.join(sorted(value.__abstractmethods__))}"])
    name = getattr(value, "name", None)
    if not isinstance(name, str) or not NAME_PATTERN.fullmatch(name) or len(name) > MAX_NAME:
        where, most = f"{value.__module__}:{value.__qualname__}", f"at most {MAX_NAME} characters"
        raise ConfigError([f"{where} has the name {shorten(name)}; set `name` to match {NAME_PATTERN.pattern}, {most}"])
    return value


def canonical(name: str) -> str:
    """Return the plain name: ``WordCountAgent``, ``word_count_agent`` and ``word-count`` are all ``wordcount``."""
    joined = re.sub("[_-]", "", name.lower())
    return joined.removesuffix("agent") or joined
