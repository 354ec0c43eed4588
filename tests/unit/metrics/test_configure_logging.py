"""Who says what: rank 0 talks, the others only warn and say who they are."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator

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


def lines(rank: int, verbose: bool = False) -> list[str]:
    stream = io.StringIO()
    configure_logging(rank, verbose, stream)
    LOOP.debug("a detail")
    LOOP.info("a fact")
    LOOP.warning("a worry")
    return [line.split(" ", 1)[1] for line in stream.getvalue().splitlines()]


def test_rank_0_reports_from_info() -> None:
    assert lines(rank=0) == ["INFO loop: a fact", "WARNING loop: a worry"]


def test_other_ranks_warn_with_their_rank() -> None:
    assert lines(rank=3) == ["WARNING [rank 3] loop: a worry"]


def test_verbose_lowers_the_level_by_one() -> None:
    assert lines(rank=0, verbose=True)[0] == "DEBUG loop: a detail"
    assert lines(rank=1, verbose=True)[0] == "INFO [rank 1] loop: a fact"


def test_configuring_twice_does_not_repeat_lines() -> None:
    configure_logging(0, stream=io.StringIO())
    assert len(lines(rank=0)) == 2


def test_a_message_of_megabytes_is_cut() -> None:
    stream = io.StringIO()
    configure_logging(0, stream=stream)
    LOOP.error("tensor %s is missing; download it again", "x" * 10**6)
    assert len(stream.getvalue()) < LONGEST_MESSAGE + 100
    assert "tensor xxx" in stream.getvalue() and stream.getvalue().endswith("xxx is missing; download it again\n")


def test_third_party_chatter_is_quiet_but_warnings_of_others_pass() -> None:
    configure_logging(0, stream=io.StringIO())
    assert not logging.getLogger("httpx").isEnabledFor(logging.INFO)
    with warnings.catch_warnings(record=True) as caught:
        warnings.warn("Transformer Engine and Apex are not installed. Falling back", stacklevel=1)
        warnings.warn("the loss is odd", stacklevel=1)
    assert [str(warning.message) for warning in caught] == ["the loss is odd"]
