"""``python -m megatron_rl.environments``: list environments, test one, write a new one, serve a YAML list."""

from __future__ import annotations

import argparse
import logging
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.environments.limits import LOAD_SECONDS
from megatron_rl.environments.loader import is_listed
from megatron_rl.environments.loading import found, inspected
from megatron_rl.environments.scaffold import class_name, write_environment
from megatron_rl.errors import ConfigError, MegatronRLError

_VERDICTS = {True: "ok", False: "FAIL", None: "-"}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except MegatronRLError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


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
    test.add_argument("name", help="a name from 'list', or package.module:Class")
    test.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="repeat as needed")
    test.add_argument("--limit", type=int, default=100, help="tasks graded per split (default 100)")
    test.set_defaults(run=_test)
    new = commands.add_parser("new", parents=[loading], help="write a working environment and its test")
    new.add_argument("name", help="lower-case letters, digits and _")
    new.add_argument("--dir", default="environments", help="the folder it goes into (default environments)")
    new.set_defaults(run=_new)
    serve = commands.add_parser("serve", parents=[loading], help="serve the environments of a YAML list")
    serve.add_argument("config", help="the YAML list")
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=int, default=0, help="default 0: a free one")
    serve.add_argument("--unix-socket", metavar="PATH", help="listen there (mode 0600) instead of on a port")
    serve.add_argument("--address-file", help="where to write the url and the token (mode 0600)")
    serve.add_argument("--allow-remote", action="store_true", help="permit a host that is not loopback")
    serve.add_argument("--parent", type=int, help=argparse.SUPPRESS)  # the process it follows in death
    serve.set_defaults(run=_serve)
    return parser


def _seconds(text: str) -> float:
    """A positive, finite number of seconds."""
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError(text)
    return value


def _list(arguments: argparse.Namespace) -> int:
    all_of_them = found(arguments.load_timeout)
    width = max(map(len, [*all_of_them.environments, *all_of_them.broken]), default=0)
    for name, description in all_of_them.environments.items():
        print(f"{name:<{width}}  {description}")
    for name, problem in all_of_them.broken.items():
        print(f"{name:<{width}}  {problem}")
    for name, trace in all_of_them.tracebacks.items():
        print(f"\n{name} cannot be imported:\n{trace}", file=sys.stderr)
    return 0


def _test(arguments: argparse.Namespace) -> int:
    answer = inspected(arguments.name, arguments.option, arguments.limit, arguments.load_timeout)
    if answer.output.strip():
        print(answer.output.rstrip(), file=sys.stderr)
    if answer.problems:
        raise ConfigError(answer.problems)
    print(answer.result["title"])
    for name, passed, detail in answer.result["checks"]:
        print(f"  {name:<15} {_VERDICTS[passed]:<5} {detail}")
    return 1 if any(passed is False for _, passed, _ in answer.result["checks"]) else 0


def _new(arguments: argparse.Namespace) -> int:
    before = found(arguments.load_timeout)
    module, test = write_environment(arguments.name, Path(arguments.dir), [*before.environments, *before.broken])
    listed = is_listed(module)
    reference = arguments.name if listed else f"{arguments.name}:{class_name(arguments.name)}"
    path = "" if listed else f"PYTHONPATH={arguments.dir} "
    print(f"wrote {module} and {test}")
    print(f"check it:  {path}python -m megatron_rl.environments test {reference}")
    print(f"test it:   python -m pytest {test}")
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    # imported here: flask takes 0.3 s that the other commands need not pay
    from megatron_rl.environments.server import serve

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    serve(
        arguments.config,
        arguments.host,
        arguments.port,
        arguments.address_file,
        arguments.allow_remote,
        arguments.unix_socket,
        arguments.load_timeout,
        arguments.parent,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
