"""wandb and its kind: missing, failing, hanging or slow, training never waits."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from megatron_rl.metrics.writers import BackgroundWriter, open_wandb


class Gate:
    """A writer that blocks until released."""

    def __init__(self) -> None:
        self.entered, self.released = threading.Event(), threading.Event()
        self.rows: list[int] = []
        self.closed = False

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self.entered.set()
        self.released.wait(60)
        self.rows.append(step)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.released.set()


def test_rows_arrive_in_order_and_the_writer_is_closed(gate: Gate) -> None:
    gate.released.set()
    writer = BackgroundWriter("slow", lambda: gate)
    for step in range(5):
        writer.write(step, {})
    writer.close()
    assert gate.rows == [0, 1, 2, 3, 4]
    assert gate.closed


def test_full_queue_drops_and_counts(gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    writer = BackgroundWriter("slow", lambda: gate, queue_size=2)
    writer.write(0, {})
    assert gate.entered.wait(10)
    for step in range(1, 6):
        writer.write(step, {})
    assert writer.dropped == 3
    gate.released.set()
    writer.close()
    assert gate.rows == [0, 1, 2]
    assert "dropping rows from step 3 on" in caplog.text
    assert "dropped 3 steps" in caplog.text


def test_close_leaves_a_stuck_writer_behind(gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    writer = BackgroundWriter("stuck", lambda: gate, queue_size=1, close_timeout_s=0.1)
    writer.write(0, {})
    assert gate.entered.wait(10)
    writer.write(1, {})
    writer.close()
    assert gate.rows == [], "it was waited for"
    assert "stuck did not finish in 0 s; left behind" in caplog.text


def test_hanging_start_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    released, now = threading.Event(), [0.0]

    def hang() -> Gate:
        released.wait(10)
        raise RuntimeError("too late")

    writer = BackgroundWriter("hanging", hang, open_timeout_s=5.0, clock=lambda: now[0])
    writer.write(0, {})
    now[0] = 6.0
    writer.write(1, {})
    writer.write(2, {})
    writer.close()
    released.set()
    assert caplog.text.count("hanging did not start in 5 s and is off") == 1


class FakeRun:
    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished = False

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.logged.append((step, metrics))

    def finish(self) -> None:
        self.finished = True


def install_wandb(monkeypatch: pytest.MonkeyPatch, init: Callable[..., FakeRun]) -> None:
    module = types.ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]
    module.Settings = dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_MODE", raising=False)


def test_wandb_is_offline_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[dict[str, object]] = []
    run = FakeRun()

    def init(**arguments: object) -> FakeRun:
        calls.append(arguments)
        return run

    install_wandb(monkeypatch, init)
    writer = open_wandb("project", "name", tmp_path / "wandb", {"seed": 1})
    writer.write(1, {"a": 0.5})
    writer.close()
    assert run.logged == [(1, {"a": 0.5})]
    assert run.finished
    assert calls[0]["mode"] == "offline"
    assert calls[0]["config"] == {"seed": 1}


@pytest.mark.parametrize(("asked", "variable"), [("online", None), (None, "online"), ("online", "offline")])
def test_wandb_goes_online_only_when_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asked: str | None, variable: str | None
) -> None:
    modes: list[object] = []

    def init(**arguments: object) -> FakeRun:
        modes.append(arguments["mode"])
        return FakeRun()

    install_wandb(monkeypatch, init)
    if variable is not None:
        monkeypatch.setenv("WANDB_MODE", variable)
    open_wandb("project", "name", tmp_path, {}, asked).close()  # type: ignore[arg-type]
    assert modes == ["online"]


@pytest.mark.parametrize(("asked", "variable"), [("disabled", "online"), (None, "disabled")])
def test_disabled_wandb_is_not_opened(monkeypatch: pytest.MonkeyPatch, asked: str | None, variable: str) -> None:
    monkeypatch.setenv("WANDB_MODE", variable)
    assert open_wandb("project", "name", Path("/nowhere"), {}, asked) is None  # type: ignore[arg-type]


def test_missing_wandb_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    writer = open_wandb("project", "name", tmp_path, {})
    writer.close()
    writer.write(1, {})
    assert caplog.text.count("wandb is off") == 1


def test_failing_wandb_init_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def init(**arguments: object) -> FakeRun:
        raise ConnectionError("no network")

    install_wandb(monkeypatch, init)
    open_wandb("project", "name", tmp_path, {}).close()
    assert "wandb is off: ConnectionError: no network" in caplog.text


def test_hanging_wandb_never_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    released = threading.Event()

    def init(**arguments: object) -> FakeRun:
        released.wait(60)
        ended.append(True)
        return FakeRun()

    ended: list[bool] = []
    install_wandb(monkeypatch, init)
    writer = open_wandb("project", "name", tmp_path, {}, open_timeout_s=0.0)
    for step in range(100):
        writer.write(step, {"a": 1.0})
    writer.close()
    assert ended == []
    released.set()
