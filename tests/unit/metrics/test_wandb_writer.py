"""wandb: missing, failing or hanging, training never waits."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_rl.metrics import writers
from megatron_rl.metrics.writers import WandbWriter, wandb_mode


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


def test_rows_arrive_in_order_and_offline_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[dict[str, object]] = []
    run = FakeRun()

    def init(**arguments: object) -> FakeRun:
        calls.append(arguments)
        return run

    install_wandb(monkeypatch, init)
    writer = WandbWriter("project", "name", tmp_path / "wandb", {"seed": 1})
    for step in range(5):
        writer.write(step, {"a": step / 2})
    writer.close()
    assert run.logged == [(step, {"a": step / 2}) for step in range(5)]
    assert run.finished
    assert calls[0]["mode"] == "offline"
    assert calls[0]["config"] == {"seed": 1}
    assert (tmp_path / "wandb").is_dir()


@pytest.mark.parametrize(
    ("asked", "variable", "mode"),
    [
        (None, None, "offline"), ("online", None, "online"), (None, "online", "online"),
        ("online", "offline", "online"), ("disabled", "online", "disabled"), (None, "disabled", "disabled"),
    ],
)  # fmt: skip
def test_wandb_goes_online_only_when_told(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, variable: str | None, mode: str
) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if variable is not None:
        monkeypatch.setenv("WANDB_MODE", variable)
    assert wandb_mode(asked) == mode  # type: ignore[arg-type]


def test_missing_wandb_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    writer = WandbWriter("project", "name", tmp_path, {})
    writer.close()
    writer.write(1, {})
    assert caplog.text.count("wandb is off") == 1


def test_failing_init_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def init(**arguments: object) -> FakeRun:
        raise ConnectionError("no network")

    install_wandb(monkeypatch, init)
    WandbWriter("project", "name", tmp_path, {}).close()
    assert "wandb is off: ConnectionError: no network" in caplog.text


def test_a_client_that_hangs_blocks_nothing_and_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    released = threading.Event()

    def init(**arguments: object) -> FakeRun:
        released.wait(60)
        ended.append(True)
        return FakeRun()

    ended: list[bool] = []
    install_wandb(monkeypatch, init)
    monkeypatch.setattr(writers, "CLOSE_TIMEOUT_S", 0.1)
    writer = WandbWriter("project", "name", tmp_path, {})
    for step in range(100):
        writer.write(step, {"a": 1.0})
    writer.close()
    assert ended == []
    assert "wandb did not finish in 0 s and is left behind" in caplog.text
    released.set()
