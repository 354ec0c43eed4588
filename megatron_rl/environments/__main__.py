"""python -m megatron_rl.environments: list environments, test one, write a new one, serve a YAML list."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import keyword
import logging
import math
import re
import shlex
import signal
import string
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_rl.environments.child import HARNESS_PROCESSES, LOAD_SECONDS
from megatron_rl.environments.loader import canonical, is_listed
from megatron_rl.environments.loading import list_environments, self_test
from megatron_rl.errors import ConfigError, MegatronRLError
from megatron_rl.signals import with_streams
from megatron_rl.user_files import named_path

_VERDICTS = {True: "ok", False: "FAIL", None: "-"}


@with_streams
def main(argv: Sequence[str] | None = None) -> int:
    arguments = vars(_parser().parse_args(argv))
    try:
        return arguments.pop("run")(**arguments)
    except MegatronRLError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def new(words: Sequence[str]) -> int:
    """Run ``megatron-rl new NAME``."""
    return main(["new", *words])


def test(words: Sequence[str]) -> int:
    """Run ``megatron-rl test ENVIRONMENT``."""
    return main(["test", *words])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m megatron_rl.environments", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="{list,test,new,serve}")
    loading = argparse.ArgumentParser(add_help=False)
    loading.add_argument(
        *("--load-timeout", "--rl-environment-load-timeout"), type=_seconds, default=LOAD_SECONDS, metavar="SECONDS",
        help=f"longest time for an import, a set-up, a list of tasks or a grade (default {LOAD_SECONDS:g})",
    )  # fmt: skip
    listing = commands.add_parser("list", parents=[loading], help="names and descriptions of all environments found")
    listing.set_defaults(run=_list)
    test = commands.add_parser("test", parents=[loading], help="check an environment's tasks and grader")
    test.add_argument("name", help="a name from 'list', package.module:Class, a YAML list, or an entry in braces")
    test.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="repeat as needed")
    test.add_argument("--limit", type=int, default=100, help="tasks graded per split (default 100)")
    test.set_defaults(run=_test)
    new = commands.add_parser("new", parents=[loading], help="write a working environment and its test")
    new.add_argument("name", help="lower-case letters, digits and _")
    new.add_argument(
        "--kind", choices=("grade", "harness"), default="grade", help="what it does with a task (default grade)"
    )
    new.add_argument("--dir", dest="folder", type=named_path, default="environments", help="default environments")
    new.set_defaults(run=_new)
    serve = commands.add_parser("serve", parents=[loading], help="serve the environments of a YAML list")
    serve.add_argument("config", help="the YAML list")
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=int, default=0, help="default 0: a free one")
    serve.add_argument("--unix-socket", metavar="PATH", help="listen there (mode 0600) instead of on a port")
    serve.add_argument("--address-file", help="where to write the url and the token (mode 0600)")
    serve.add_argument("--allow-remote", action="store_true", help="permit a host that is not loopback")
    serve.add_argument(
        "--harness-processes", type=int, default=HARNESS_PROCESSES, metavar="N",
        help=f"most samples of harnesses that run at once (default {HARNESS_PROCESSES})",
    )  # fmt: skip
    serve.add_argument("--parent", type=int, help=argparse.SUPPRESS)  # the process it follows in death
    serve.set_defaults(run=_serve)
    return parser


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError(text)
    return value


def _list(load_timeout: float) -> int:
    environments, broken = list_environments(load_timeout)
    shown = [*environments.items(), *((name, problem) for name, (problem, _) in broken.items())]
    width = max((len(name) for name, _ in shown), default=0)
    for name, text in shown:
        print(f"{name:<{width}}  {text}")
    for name, (_, trace) in broken.items():
        if trace:
            print(f"\n{name} cannot be imported:\n{trace}", file=sys.stderr)
    return 0


def _test(name: str, option: Sequence[str], limit: int, load_timeout: float) -> int:
    answer = self_test(name, option, limit, load_timeout)
    if answer.output.strip():
        print(answer.output.rstrip(), file=sys.stderr)
    if answer.problems:
        raise ConfigError(answer.problems)
    for tested in answer.result:
        print(tested["title"])
        for check, passed, detail in tested["checks"]:
            print(f"  {check:<15} {_VERDICTS[passed]:<5} {detail}")
    return 1 if any(passed is False for tested in answer.result for _, passed, _ in tested["checks"]) else 0


def _new(name: str, kind: str, folder: Path, load_timeout: float) -> int:
    _refuse_name(name, load_timeout)
    target = folder / name
    if target.exists() or target.with_suffix(".py").exists():
        raise ConfigError([f"{target} exists already; choose another name, or remove it"])
    module, test = target / "__init__.py", target / f"test_{name}.py"
    class_name = "".join(part.capitalize() for part in name.split("_"))
    try:
        target.mkdir(parents=True)
        for file, template in ((module, kind), (test, f"{kind}_test")):
            text = template_of(template).substitute(name=name, class_name=class_name, path=test)
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError([f"cannot write {target}: {error.strerror}; choose another --dir"]) from error
    reference = name if is_listed(module) else f"{module}:{class_name}"
    print(f"wrote {module} and {test}")
    print(f"check it:  {shlex.join(['python', '-m', 'megatron_rl.environments', 'test', reference])}")
    print(f"test it:   {shlex.join(['python', '-m', 'pytest', str(test)])}")
    return 0


def template_of(file: str) -> string.Template:
    """Fill in the template of a module, or of its test: replace ``$name``, ``$class_name`` and ``$path``."""
    return string.Template((Path(__file__).parent / "new" / f"{file}.txt").read_text(encoding="utf-8"))


def _refuse_name(name: str, load_timeout: float) -> None:
    """``ConfigError`` for a name that is no good, or that selects an environment there is."""
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", name) or keyword.iskeyword(name):
        why = "it becomes a module and a metric name"
        advice = "use lower-case letters, digits and _, beginning with a letter"
        raise ConfigError([f"{name!r} cannot name an environment, because {why}; {advice}"])
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.origin is not None:
        raise ConfigError([f"{name!r} is an installed module, which the environment would hide; choose another name"])
    for other in itertools.chain(*list_environments(load_timeout)):
        if canonical(other) == canonical(name):
            raise ConfigError([f"an environment {other!r} exists, and {name!r} would select it; choose another name"])


def _serve(**options: Any) -> int:
    # imported here: flask takes 0.3 s that the other commands need not pay
    from megatron_rl.environments.server import serve

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: else the address file would stay
    serve(**options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
