"""Ctrl-C and SIGTERM."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from megatron_rl import signals
from megatron_rl.signals import StopRequest


@pytest.fixture
def request_to_stop() -> Iterator[StopRequest]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    request = StopRequest().install()
    request.started()
    yield request
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
    request.started()
    signal.raise_signal(signal.SIGHUP)
    assert not request.requested
    for number, handler in before.items():
        signal.signal(number, handler)


PYTHON = [sys.executable, "-W", "ignore::DeprecationWarning", "-c"]
"""From 3.12 on Python warns of a fork beside torch's threads."""
START = """
import logging, os, signal, sys, time
from megatron_rl.signals import StopRequest
logging.basicConfig(level=logging.INFO, format="%(message)s")
stop = StopRequest().install()
ready, tell = os.pipe()
if (child := os.fork()) == 0:
    os.write(tell, b"x")
    time.sleep(60)
os.read(ready, 1)
os.kill(child, signal.SIGTERM)  # that of a child is none of ours
time.sleep(0.1)
os.kill(child, signal.SIGKILL)
print("starting", flush=True)
if sys.argv[1] == "started":
    stop.started()
    signal.raise_signal(signal.SIGTERM)
    print("asked to stop:", stop.requested)
    sys.exit(7)
os.read(ready, 1)  # as inside a rendezvous: Python's own handlers do not get their turn
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_it_starts_ends_the_process_cleanly(number: signal.Signals) -> None:
    process = subprocess.Popen(
        [*PYTHON, START, "starting"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout.readline() == "starting\n"
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, output) == (
        0, f"stopped by {number.name} while it started: there is nothing to save\n",
    )  # fmt: skip


def test_a_signal_to_a_run_that_has_started_only_asks() -> None:
    done = subprocess.run([*PYTHON, START, "started"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (7, "starting\nasked to stop: True\n"), done.stderr
