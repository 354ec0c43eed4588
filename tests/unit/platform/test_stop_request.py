"""Ctrl-C and SIGTERM."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from megatron_rl.platform import StopRequest, signals


@pytest.fixture
def request_to_stop() -> Iterator[StopRequest]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield StopRequest().install()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_is_a_request(request_to_stop: StopRequest, number: signal.Signals) -> None:
    assert not request_to_stop.requested
    signal.raise_signal(number)
    assert request_to_stop.requested
    assert request_to_stop.reason == number.name


def test_a_second_press_means_now(request_to_stop: StopRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals.time, "monotonic", lambda: 100.0)
    signal.raise_signal(signal.SIGINT)
    monkeypatch.setattr(signals.time, "monotonic", lambda: 102.0)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_an_echo_of_the_first_press_is_not_a_second_one(
    request_to_stop: StopRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun passes Ctrl-C on at once, as SIGINT and as SIGTERM."""
    monkeypatch.setattr(signals.time, "monotonic", lambda: 100.0)
    signal.raise_signal(signal.SIGINT)
    try:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
    except KeyboardInterrupt:  # uncaught, it would end the test session
        pytest.fail("the echo was taken for a second press")
    assert request_to_stop.reason == "SIGINT"


def test_nohup_is_respected() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    request = StopRequest().install()
    signal.raise_signal(signal.SIGHUP)
    assert not request.requested
    for number, handler in before.items():
        signal.signal(number, handler)
