"""Who says what: rank 0 talks, the others only warn and say who they are."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator

import pytest

from megatron_rl.metrics.logging import LONGEST_MESSAGE, NOISY_LOGGERS, ROOT, configure_logging

LOOP = logging.getLogger("megatron_rl.loop")


@pytest.fixture(autouse=True)
def restore_logging() -> Iterator[None]:
    names = (ROOT, *NOISY_LOGGERS)
    levels = {name: logging.getLogger(name).level for name in names}
    library = logging.getLogger(ROOT)
    handlers, propagate = list(library.handlers), library.propagate
    with warnings.catch_warnings():
        yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    library.handlers[:], library.propagate = handlers, propagate


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Callable[[int], list[str]]:
    def written(rank: int) -> list[str]:
        configure_logging(rank)
        LOOP.debug("a detail")
        LOOP.info("a fact")
        LOOP.warning("a worry")
        return [line.split(" ", 1)[1] for line in capsys.readouterr().err.splitlines()]

    return written


def test_rank_0_reports_from_info(lines) -> None:
    assert lines(rank=0) == ["INFO loop: a fact", "WARNING loop: a worry"]


def test_other_ranks_warn_with_their_rank(lines) -> None:
    assert lines(rank=3) == ["WARNING [rank 3] loop: a worry"]


def test_configuring_twice_does_not_repeat_lines(lines) -> None:
    configure_logging(0)
    assert len(lines(rank=0)) == 2


def test_a_message_of_megabytes_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(0)
    LOOP.error("tensor %s is missing; download it again", "x" * 10**6)
    written = capsys.readouterr().err
    assert len(written) < LONGEST_MESSAGE + 100
    assert "tensor xxx" in written and written.endswith("xxx is missing; download it again\n")


def test_third_party_chatter_is_quiet_but_warnings_of_others_pass() -> None:
    configure_logging(0)
    assert not logging.getLogger("httpx").isEnabledFor(logging.INFO)
    with warnings.catch_warnings(record=True) as caught:
        warnings.warn("Transformer Engine and Apex are not installed. Falling back", stacklevel=1)
        warnings.warn("the loss is odd", stacklevel=1)
    assert [str(warning.message) for warning in caught] == ["the loss is odd"]
