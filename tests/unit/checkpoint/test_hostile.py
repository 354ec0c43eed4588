"""Checkpoints that were made to run code when they are read: none does, by whatever flag it is named."""

from __future__ import annotations

import io
import os
import pickle
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

import megatron_rl
from megatron_rl.checkpoint.layout import MANIFEST, write_manifest
from megatron_rl.checkpoint.manager import CheckpointManager
from megatron_rl.config.rl_config import RLConfig
from megatron_rl.errors import CheckpointError, ConfigError
from megatron_rl.platform.megatron import common_writer
from megatron_rl.run.preflight.starts import checkpoint_problems
from megatron_rl.run.weights import read_first_weights, start_weights
from tests.support.saves import saving_run, train_a_step
from tests.support.tiny import tiny_config, tiny_policy

COMMON_ENTRY = "common_state/shard_0_1"
FLAGS = {
    "perform_rl_step": False, "grpo_group_size": False, "grpo_prompts_per_step": False, "global_batch_size": 4,
    "micro_batch_size": 2, "use_distributed_optimizer": True,
}  # fmt: skip


def _sign(directory: Path) -> None:
    (directory / MANIFEST).unlink()
    write_manifest(directory, 1)


class _Command:
    """Read by Python's own unpickler, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self._path),)


def _description(directory: Path, proof: Path) -> None:
    (directory / ".metadata").write_bytes(pickle.dumps(_Command(proof)))


def _nested_description(directory: Path, proof: Path) -> None:
    """A good one, with the command where nothing looks."""
    described = replace(FileSystemReader(directory).read_metadata(), planner_data=_Command(proof))
    (directory / ".metadata").write_bytes(pickle.dumps(described))


def _add_entry(directory: Path, keys: Sequence[str], content: Any) -> None:
    """Bytes among the tensors, as megatron-core writes what is none."""
    described, written = FileSystemReader(directory).read_metadata(), io.BytesIO()
    torch.save([content], written)
    file = next(directory.glob("*.distcp"))
    place = replace(next(iter(described.storage_data.values())), relative_path=file.name, offset=file.stat().st_size)
    for key in keys:
        described.state_dict_metadata[key] = BytesStorageMetadata()
        described.storage_data[MetadataIndex(key)] = replace(place, length=written.tell())
    file.write_bytes(file.read_bytes() + written.getvalue())
    (directory / ".metadata").write_bytes(pickle.dumps(described))


def _linears(directory: Path, proof: Path) -> None:
    """In place of the state of each linear layer."""
    names = FileSystemReader(directory).read_metadata().state_dict_metadata
    _add_entry(directory, [name for name in names if "_extra_state" in name], _Command(proof))


def _common_entry(directory: Path, proof: Path) -> None:
    """Where megatron-core 0.19 has what is in common.pt."""
    _add_entry(directory, [COMMON_ENTRY], _Command(proof))


def _common(directory: Path, proof: Path) -> None:
    torch.save({"args": _Command(proof)}, directory / "common.pt")


def _common_of_python(directory: Path, proof: Path) -> None:
    (directory / "common.pt").write_bytes(pickle.dumps(_Command(proof)))


PAYLOADS: dict[str, Callable[[Path, Path], None]] = {
    "description": _description, "nested_description": _nested_description, "linears": _linears,
    "common_entry": _common_entry,
    **({} if common_writer() is None else {"common": _common, "common_of_python": _common_of_python}),
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(one_rank, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The checkpoint of a run with an optimizer state."""
    folder = tmp_path_factory.mktemp("saved")
    run = saving_run(tiny_config(**FLAGS), one_rank, folder)
    train_a_step(run)
    run.save(final=True)
    yield folder / "step_0000001"
    run.closing.close()


@pytest.fixture
def hostile(saved: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy with a payload, whose manifest fits."""

    def make(payload: str) -> Path:
        directory = shutil.copytree(saved, tmp_path / "run" / "checkpoints" / saved.name)
        PAYLOADS[payload](directory, tmp_path / "executed")
        _sign(directory)
        return directory

    return make


def _start(config: RLConfig, groups: Any) -> None:
    if problems := checkpoint_problems(config, None):
        raise ConfigError(problems)
    policy, manager = tiny_policy(config, seed=2), CheckpointManager(Path(config.checkpoint.save), 0, groups)
    if config.training.eval_only:  # `chat`, `generate` and `serve`, too
        read_first_weights(config, policy, manager, groups)
    else:
        start_weights(config, policy, manager, groups)


ENTRIES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "resume": lambda directory: {"resume": True, "run_dir": directory.parents[1]},
    "load": lambda directory: {"load": str(directory)},
    "finetune": lambda directory: {"load": str(directory), "finetune": True},
    "pretrained": lambda directory: {"pretrained_checkpoint": str(directory)},
    "chat": lambda directory: {"load": str(directory), "finetune": True, "eval_only": True},
}


@pytest.mark.each_value
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("payload", PAYLOADS)
def test_no_flag_executes_it(hostile, one_rank, tmp_path: Path, payload: str, entry: str) -> None:
    flags = {**FLAGS, "run_dir": tmp_path / "new", **ENTRIES[entry](hostile(payload))}
    try:
        _start(tiny_config(**flags), one_rank)
    except (CheckpointError, ConfigError) as error:
        assert "step_0000001" in str(error) and "\n" not in str(error)
    else:
        assert payload == "linears", "these are not read"
    assert not (tmp_path / "executed").exists()


@pytest.mark.skipif(common_writer() is None, reason="it is written so")
def test_what_a_newer_megatron_has_among_the_tensors_is_read(hostile, saved: Path, one_rank, tmp_path: Path) -> None:
    directory = shutil.copytree(saved, tmp_path / saved.name)
    _add_entry(directory, [COMMON_ENTRY], torch.load(directory / "common.pt", weights_only=True))
    (directory / "common.pt").unlink()
    _sign(directory)
    _start(tiny_config(**FLAGS, run_dir=tmp_path / "new", load=str(directory)), one_rank)


# What else a file may hold that is no checkpoint of ours.


class _Odd:
    """A description of tensors with something else in it."""

    def __init__(self, **fields: Any) -> None:
        self._fields = fields

    def write(self, path: Path) -> None:
        path.write_bytes(pickle.dumps(replace(FileSystemReader(path.parent).read_metadata(), **self._fields)))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "Ran out of input"),
        (pickle.dumps([1, 2]), "'list' object has no attribute"),
        (_Odd(storage_data=None), "has no attribute 'values'"),
        (_Odd(storage_data={1: 2}), "has no attribute 'relative_path'"),
        (_Odd(state_dict_metadata=[1]), "has no attribute 'items'"),
    ],
)  # fmt: skip
def test_a_description_of_something_else_is_one_line(
    saved: Path, one_rank, tmp_path: Path, content: Any, reason: str
) -> None:
    directory = shutil.copytree(saved, tmp_path / "step_0000001")
    path = directory / ".metadata"
    content.write(path) if isinstance(content, _Odd) else path.write_bytes(content)
    _sign(directory)
    message = rf"^checkpoint file '.*\.metadata' cannot be read \(.*{reason}"
    with pytest.raises(CheckpointError, match=message) as caught:
        _start(tiny_config(**FLAGS, run_dir=tmp_path / "new", pretrained_checkpoint=str(directory)), one_rank)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(common_writer() is None, reason="there is no such file")
@pytest.mark.parametrize(
    "content", [{}, [1], {"optimizer": 5}, {"model": {"x": torch.zeros(2)}}, {"optimizer": {"param_state": {0: 5}}}]
)
def test_plain_data_that_no_optimizer_can_take_is_one_line(saved: Path, one_rank, tmp_path: Path, content: Any) -> None:
    directory = shutil.copytree(saved, tmp_path / saved.name)
    torch.save(content, directory / "common.pt")
    _sign(directory)
    with pytest.raises(CheckpointError, match=r"^checkpoint '.*step_0000001'") as caught:
        _start(tiny_config(**FLAGS, run_dir=tmp_path / "new", load=str(directory)), one_rank)
    assert "\n" not in str(caught.value)


def test_no_file_outside_the_directory_is_read(saved: Path, one_rank, tmp_path: Path) -> None:
    directory = shutil.copytree(saved, tmp_path / "step_0000001")
    described = FileSystemReader(directory).read_metadata()
    index, place = next(iter(described.storage_data.items()))
    shutil.copy(directory / place.relative_path, tmp_path / "elsewhere")
    described.storage_data[index] = replace(place, relative_path="../elsewhere")
    (directory / ".metadata").write_bytes(pickle.dumps(described))
    _sign(directory)
    with pytest.raises(CheckpointError, match=r"it names \.\./elsewhere, which is no file beside it"):
        _start(tiny_config(**FLAGS, run_dir=tmp_path / "new", pretrained_checkpoint=str(directory)), one_rank)


def test_pickles_are_opened_in_two_modules() -> None:
    package = Path(megatron_rl.__file__).parent
    unsafe = ("torch.load(", "pickle.", ".load(state", ".read_metadata(", "allow_pickle", "shelve", "dill", "joblib")
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if any(name in path.read_text() for name in unsafe)
    }
    assert found == {"checkpoint/pickled.py", "config/megatron_args.py"}
