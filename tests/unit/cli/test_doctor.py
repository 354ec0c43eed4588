"""`megatron-rl doctor`: one line each, with the fix; exit code 1 only for what would stop a run."""

from __future__ import annotations

import shutil
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace

import pytest
import torch

from megatron_rl import cli
from megatron_rl.cli import doctor
from megatron_rl.models.attention import selection
from megatron_rl.platform import device


def _report(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, tuple[str, str]]]:
    """The exit code, and level and text by what each line is about."""
    code = cli.main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    return code, {line[9:23].strip(): (line[:8].strip(), line[24:]) for line in lines}


def test_this_machine_runs_the_tests_so_nothing_would_stop_a_run(capsys):
    code, found = _report(capsys)
    assert code == 0
    assert {level for level, _ in found.values()} <= {"ok", "warning"}
    assert {"megatron-rl", "python", "torch", "cuda", "sdpa", "memory", "disk", "open files", "ports"} <= found.keys()
    assert found["paged"] == ("ok", "attention agrees with plain torch")


def test_a_package_that_is_missing_or_old_is_an_error_with_its_command(capsys, monkeypatch):
    def pretended(name: str) -> str:
        if name == "flask-restful":
            raise PackageNotFoundError(name)
        return {"numpy": "1.0", "wandb": "0.1"}.get(name) or version(name)

    monkeypatch.setattr(doctor, "version", pretended)
    code, found = _report(capsys)
    assert code == 1
    assert found["flask-restful"][0] == "error"
    assert found["flask-restful"][1].endswith("pip install 'flask-restful<0.4,>=0.3.10'")
    assert found["numpy"] == ("error", "1.0 is installed, <3,>=1.26 is needed; pip install 'numpy<3,>=1.26'")
    assert found["wandb"][0] == "warning"


def test_a_kernel_that_computes_something_else_is_named(capsys, monkeypatch):
    monkeypatch.setattr(selection, "fault_of_packed", lambda *_: "computes something else here: 0.3 off plain torch")
    code, found = _report(capsys)
    assert code == 0
    assert found["sdpa"][0] == "warning"
    assert "0.3 off plain torch; --attention-backend auto passes it over" in found["sdpa"][1]


def test_little_room_is_a_warning_with_what_to_do(capsys, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**20))
    code, found = _report(capsys)
    assert code == 0
    assert found["disk"] == ("warning", "0.0 GiB free; checkpoints go here; --run-dir names another place")
    assert "--shm-size" in found["shared memory"][1]


def test_a_check_that_breaks_is_an_error_and_hides_no_other(capsys, monkeypatch):
    def broken():
        raise OSError("no such device")
        yield

    monkeypatch.setattr(doctor, "CHECKS", (broken, doctor.network))
    code, found = _report(capsys)
    assert code == 1
    assert found["broken"] == ("error", "OSError: no such device")
    assert found["ports"][0] == "ok"


def test_it_takes_no_flags(capsys):
    assert cli.main(["doctor", "--help"]) == 0
    assert cli.main(["doctor", "now"]) == 2
    assert capsys.readouterr().out.startswith("usage: megatron-rl doctor")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
@pytest.mark.parametrize(("gain", "advice"), [(2.6, "--bf16 pays"), (0.3, "leave --bf16 out")])
def test_bf16_is_advised_where_its_products_are_faster(capsys, monkeypatch, gain, advice):
    monkeypatch.setattr(device, "bf16_speedup", lambda: gain)
    _, found = _report(capsys)
    assert found["bf16"] == ("ok", f"products are {gain} times as fast as fp32's: {advice}")
