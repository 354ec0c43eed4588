"""Shared fixtures: one initialised rank for the tests that need a model, real data where it is present."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SHARED_DATA = Path(__file__).parents[2] / "shared" / "data"

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("TESTS_SESSION", str(os.getpid()))  # also of the workers, which share `tests.support.forks`
# Where it is set, each of some hundred processes would compile the library anew, in a second.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_addoption(parser: pytest.Parser) -> None:
    begun = "TESTS_LONG" in os.environ  # a pytest that a test starts is as long as its own
    parser.addoption("--long", action="store_true", default=begun, help="also run the tests marked 'long'")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--long"):
        os.environ["TESTS_LONG"] = "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--long"):
        items[:] = with_each_value_once(items)
    for item in items:
        if item.get_closest_marker("long") and not config.getoption("--long"):
            item.add_marker(pytest.mark.skip(reason="long; run with --long"))
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if _is_for_another_process(item):
            item.fixturenames.clear()  # type: ignore[attr-defined]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Thousands of tests and what their modules import stay; a full collection, as before a save, would visit them."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadfile``, a worker takes all files whose tests share launches, not one of them."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "tests/oracles" if nodeid.startswith("tests/oracles/") else super()._split_scope(nodeid)

    return Scheduling(config, log)


def with_each_value_once(items: list[pytest.Item]) -> list[pytest.Item]:
    """Leave out, of each test marked ``each_value``, the cases whose every parameter has its value in another case.

    Of 2 x 2 cases the first and the last stay.
    """
    tests: dict[str, dict[pytest.Item, set[tuple[str, str]]]] = {}
    for item in items:
        if item.get_closest_marker("each_value") and hasattr(item, "callspec"):
            values = {(name, repr(value)) for name, value in item.callspec.params.items()}
            tests.setdefault(item.nodeid.partition("[")[0], {})[item] = values
    left_out: set[pytest.Item] = set()
    for cases in tests.values():
        unseen = set().union(*cases.values())
        left_out.update(cases)
        while unseen:
            chosen = max(cases, key=lambda item: len(unseen & cases[item]))
            unseen -= cases[chosen]
            left_out.discard(chosen)
    return [item for item in items if item not in left_out]


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """A test that runs a command configures the log, with a level that others would see and a stream that closes."""
    logger = logging.getLogger("megatron_rl")
    level, handlers, propagates = logger.level, list(logger.handlers), logger.propagate
    yield
    logger.setLevel(level)
    logger.handlers[:] = handlers
    logger.propagate = propagates


def _is_for_another_process(item: pytest.Item) -> bool:
    return item.get_closest_marker("own_process") is not None and "IN_ITS_OWN_PROCESS" not in os.environ


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test marked ``own_process`` has a pytest of its own: it makes process groups, of which a process has one."""
    if not _is_for_another_process(pyfuncitem):
        return None
    from tests.support.forks import run_python

    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    ended = run_python("-m", "pytest", pyfuncitem.nodeid, env=environment | {"IN_ITS_OWN_PROCESS": "1"}, timeout=900)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return True


@pytest.fixture(scope="session")
def with_long(request: pytest.FixtureRequest) -> bool:
    """For a fixture that makes what several tests look at: whether those marked ``long`` are among them."""
    return request.config.getoption("--long")


@pytest.fixture(scope="session")
def one_rank() -> Iterator[object]:
    """The process groups of a job of one rank; megatron's are global, so they are made once."""
    import torch

    from megatron_rl.platform import current_platform
    from megatron_rl.platform.groups import initialize, shut_down
    from tests.support.tiny import tiny_config

    torch.set_num_threads(1)
    yield initialize(tiny_config().parallel, current_platform())
    shut_down()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with real data sets; tests that need it skip where it is absent."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"real data is absent: no folder {SHARED_DATA.name} beside the checkout's shared/")
    return SHARED_DATA
