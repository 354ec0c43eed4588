"""wandb: missing, failing or hanging, training never waits."""

from __future__ import annotations

import logging
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_rl.metrics import writers
from megatron_rl.metrics.rollouts import TextSample
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
    module.Table = lambda columns, data: [dict(zip(columns, row, strict=True)) for row in data]
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_MODE", raising=False)


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whoever runs the tests may be logged in."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()


def test_without_a_key_it_is_offline_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[dict[str, object]] = []
    install_wandb(monkeypatch, lambda **arguments: calls.append(arguments) or FakeRun())
    with caplog.at_level(logging.INFO):
        WandbWriter("project", "name", tmp_path, {}).close()
        WandbWriter("project", "name", tmp_path, {}, "offline").close()  # asked for: nothing to say
    assert [call["mode"] for call in calls] == ["offline", "offline"]
    assert caplog.text.count("wandb is offline: no API key") == 1


def test_samples_are_a_table_and_the_entity_is_passed_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run, calls = FakeRun(), []
    install_wandb(monkeypatch, lambda **arguments: calls.append(arguments) or run)
    writer = WandbWriter("project", "name", tmp_path, {}, "offline", entity="team")
    writer.write(10, {"a": 1.0})
    writer.write_samples(10, [TextSample("best", 0, "toy", "7", "2+2=", "4", 1.0, True, "4", 0.5, 2)])
    writer.close()
    assert calls[0]["entity"] == "team"
    (first, metrics), (second, logged) = run.logged
    assert (first, metrics, second) == (10, {"a": 1.0}, 10)
    [row] = logged["samples"]
    assert (row["which"], row["prompt"], row["answer"], row["reward"], row["gold"]) == ("best", "2+2=", "4", 1.0, "4")


def test_rows_arrive_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
    assert calls[0]["config"] == {"seed": 1}
    assert (tmp_path / "wandb").is_dir()


@pytest.mark.parametrize(
    ("asked", "variable", "key", "mode"),
    [
        (None, None, None, "offline"), ("online", None, None, "online"), (None, "online", None, "online"),
        ("online", "offline", None, "online"), ("disabled", "online", None, "disabled"),
        (None, "disabled", "k", "disabled"), (None, None, "k", "online"), (None, "offline", "k", "offline"),
        ("offline", None, "k", "offline"), (None, "", "k", "online"),
    ],
)  # fmt: skip
def test_the_flag_goes_before_the_variable_and_the_variable_before_the_key(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, variable: str | None, key: str | None, mode: str
) -> None:
    for name, value in (("WANDB_MODE", variable), ("WANDB_API_KEY", key)):
        if value is not None:
            monkeypatch.setenv(name, value)
    assert wandb_mode(asked) == mode  # type: ignore[arg-type]


def test_a_key_of_wandb_login_counts_for_the_server_it_is_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    netrc = tmp_path / "home" / ".netrc"
    netrc.write_text("machine wandb.example.org login user password k\n")
    netrc.chmod(0o600)
    assert wandb_mode(None) == "offline"
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert wandb_mode(None) == "online"


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
