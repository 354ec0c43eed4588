"""``python -m megatron_rl.environments``: list environments, test one, write a new one, serve a YAML list."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from megatron_rl.environments.loader import discover, find_environment
from megatron_rl.environments.scaffold import class_name, write_environment
from megatron_rl.environments.selftest import Check, run_checks
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
    listing = commands.add_parser("list", help="names and descriptions of all environments found")
    listing.set_defaults(run=_list)
    test = commands.add_parser("test", help="check an environment's tasks and grader")
    test.add_argument("name", help="a name from 'list', or package.module:Class")
    test.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="repeat as needed")
    test.add_argument("--limit", type=int, default=100, help="tasks graded per split (default 100)")
    test.set_defaults(run=_test)
    new = commands.add_parser("new", help="write a working environment and its test")
    new.add_argument("name", help="lower-case letters, digits and _")
    new.add_argument("--dir", default="environments", help="the folder it goes into (default environments)")
    new.set_defaults(run=_new)
    serve = commands.add_parser("serve", help="serve the environments of a YAML list")
    serve.add_argument("config", help="the YAML list")
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=int, default=0, help="default 0: a free one")
    serve.add_argument("--unix-socket", metavar="PATH", help="listen there (mode 0600) instead of on a port")
    serve.add_argument("--address-file", help="where to write the url and the token (mode 0600)")
    serve.add_argument("--allow-remote", action="store_true", help="permit a host that is not loopback")
    serve.set_defaults(run=_serve)
    return parser


def _list(arguments: argparse.Namespace) -> int:
    discovery = discover()
    width = max((len(name) for name in discovery.environments), default=0)
    for name, environment in discovery.environments.items():
        print(f"{name:<{width}}  {environment.description()}")
    for broken in discovery.broken:
        reason = broken.traceback.strip().splitlines()[-1]
        print(f"{broken.name:<{width}}  cannot be imported: {reason}")
        print(f"\n{broken.name} cannot be imported:\n{broken.traceback}", file=sys.stderr)
    return 0


def _test(arguments: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # what a data set was left without
    environment = find_environment(arguments.name).from_options(_options(arguments.option))
    checks = run_checks(environment, arguments.limit)
    print(f"{environment.name}: {environment.description()}")
    for check in checks:
        print(_row(check))
    return 1 if any(check.passed is False for check in checks) else 0


def _new(arguments: argparse.Namespace) -> int:
    module, test = write_environment(arguments.name, Path(arguments.dir))
    found = arguments.name in discover().environments
    reference = arguments.name if found else f"{arguments.name}:{class_name(arguments.name)}"
    path = "" if found else f"PYTHONPATH={arguments.dir} "
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
    )
    return 0


def _row(check: Check) -> str:
    return f"  {check.name:<15} {_VERDICTS[check.passed]:<5} {check.detail}"


def _options(pairs: Sequence[str]) -> dict[str, object]:
    """``["max_terms=6"]`` as the YAML list would read it."""
    if wrong := [pair for pair in pairs if "=" not in pair]:
        raise ConfigError([f"--option {pair} has no value; write KEY=VALUE" for pair in wrong])
    split = (pair.partition("=") for pair in pairs)
    return {key: yaml.safe_load(value) for key, _, value in split}


if __name__ == "__main__":
    sys.exit(main())
