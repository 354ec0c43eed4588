"""Megatron's format torch: pickles that are more than data, and the conversion into torch_dist."""

from __future__ import annotations

import os
import pickle
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.transformer.enums import AttnBackend

from megatron_rl.checkpoint.dist_files import DistFiles
from megatron_rl.checkpoint.layout import convert_ahead, find_checkpoint
from megatron_rl.checkpoint.pickled import read
from megatron_rl.checkpoint.run_state import architecture_problems
from megatron_rl.checkpoint.torch_format import converted
from megatron_rl.config.arguments import read_config
from megatron_rl.config.megatron_args import read_args
from megatron_rl.errors import CheckpointError
from tests.support.foreign import MODEL_FILE, Topology, args_of, random_policy, transformer_engine, write_ranks
from tests.support.ranks import REPOSITORY
from tests.support.tiny import VOCABULARY, tiny_config, tiny_policy


class _Command:
    """Unpickled by Python's own unpickler, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self._path),)


def test_a_forbidden_class_is_named_and_nothing_is_executed(tmp_path: Path) -> None:
    path, proof = tmp_path / "model.pt", tmp_path / "executed"
    torch.save({"model": {}, "args": _Command(proof)}, path)
    with pytest.raises(CheckpointError, match=r"model\.pt.*posix\.mkdir.*nothing of it was executed") as caught:
        read(path)
    assert "\n" not in str(caught.value)
    assert not proof.exists()
    pickle.loads(pickle.dumps(_Command(proof)))  # noqa: S301 - the file would have done something
    assert proof.exists()


class _EarlyMember:
    """Stored as Python 3.11.0 to 3.11.3 store members of enums."""

    def __reduce__(self) -> tuple[Any, tuple[Any, str]]:
        return getattr, (AttnBackend, "flash")


def test_a_name_that_is_passed_over_is_not_called(tmp_path: Path) -> None:
    torch.save({"a": np.arange(3), "b": AttnBackend.flash, "c": _EarlyMember()}, tmp_path / "file.pt")
    content = read(tmp_path / "file.pt")
    assert {type(value).__name__ for value in content.values()} == {"Emptied"}
    assert all(vars(value) == {} for value in content.values())


def test_what_others_allow_counts_for_nothing_here_and_is_left_as_it_was(tmp_path: Path) -> None:
    """megatron-core allows classes for the whole process."""
    torch.save(Fraction(1, 3), tmp_path / "file.pt")
    with torch.serialization.safe_globals([Fraction]):
        before = set(torch.serialization.get_safe_globals())
        with pytest.raises(CheckpointError, match=r"fractions\.Fraction"):
            read(tmp_path / "file.pt")
        assert set(torch.serialization.get_safe_globals()) == before


# -- conversion into torch_dist --------------------------------------------------------------------


def _args_and_names(directory: Path) -> tuple[dict[str, Any], set[str]]:
    return read_args(directory / "common.pt"), DistFiles(directory).names


def _told(caplog: pytest.LogCaptureFixture) -> int:
    return caplog.text.count(": converting ")


def test_a_directory_is_converted_once_and_anew_when_a_file_changes(one_rank, tmp_path, cache, caplog) -> None:
    config = tiny_config()
    policy = random_policy(config)
    directory = write_ranks(tmp_path, policy, args_of(config), Topology(2, 2), rename=transformer_engine)
    first = converted(directory)
    assert converted(directory) == first and first.parent == cache
    line = f"{directory}: converting 0.0 GB of Megatron-LM's format torch into {first}, once: about 1 s"
    assert _told(caplog) == 1 and caplog.messages[0] == line
    args, names = _args_and_names(first)
    assert names == {parameter.name for parameter in policy.layout.parameters}
    assert (args["num_layers"], args["tensor_model_parallel_size"]) == (2, 2)
    os.utime(directory / "mp_rank_01_001" / MODEL_FILE, ns=(0, 0))
    assert converted(directory) != first
    assert _told(caplog) == 2


def test_one_of_several_processes_converts_and_the_others_wait(one_rank, tmp_path, cache, caplog) -> None:
    directory = write_ranks(tmp_path, tiny_policy(), None)
    with ThreadPoolExecutor(4) as pool:  # locks are of an open file, so threads stand for processes
        (target,) = set(pool.map(converted, [directory] * 4))
    assert _told(caplog) == 1 and DistFiles(target).names
    assert {path.name for path in cache.iterdir()} == {target.name, f"{target.name}.lock"}


def test_a_conversion_that_fails_or_was_killed_leaves_nothing_half(one_rank, tmp_path, cache) -> None:
    directory = write_ranks(tmp_path, tiny_policy(), None, Topology(2))
    file = directory / "mp_rank_01" / MODEL_FILE
    content, known = file.read_bytes(), file.stat()
    file.write_bytes(content[:5000] + bytes(len(content) - 5000))
    os.utime(file, ns=(known.st_atime_ns, known.st_mtime_ns))
    with pytest.raises(CheckpointError, match=r"mp_rank_01/model_optim_rng\.pt' cannot be read"):
        converted(directory)
    (lock,) = cache.iterdir()
    (cache / lock.name.replace(".lock", ".tmp")).mkdir()
    (cache / lock.name.replace(".lock", ".tmp") / ".metadata").touch()
    file.write_bytes(content)
    os.utime(file, ns=(known.st_atime_ns, known.st_mtime_ns))
    assert DistFiles(converted(directory)).names
    assert sorted(path.name for path in cache.iterdir()) == [lock.name.removesuffix(".lock"), lock.name]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"model": {}}, "has no tensors in 'model', as megatron-core writes them"),
        ([1], "has no tensors in 'model'"),
        ({"model": 5}, r"AttributeError: 'int' object has no attribute 'items'"),
        ({"model": {"a": torch.ones(2)}, "args": Namespace(tensor_model_parallel_size="2")}, "TypeError"),
    ],
)
def test_a_file_of_something_else_is_one_line(tmp_path: Path, cache: Path, content: Any, reason: str) -> None:
    (tmp_path / "iter_0000012" / "mp_rank_00").mkdir(parents=True)
    torch.save(content, tmp_path / "iter_0000012" / "mp_rank_00" / MODEL_FILE)
    with pytest.raises(CheckpointError, match=rf"^checkpoint .*iter_0000012.*{reason}") as caught:
        converted(tmp_path / "iter_0000012")
    assert "\n" not in str(caught.value) and [path.suffix for path in cache.iterdir()] == [".lock"]


def test_a_cache_that_cannot_be_written_is_one_line(one_rank, tmp_path, monkeypatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HF_HOME", str(tmp_path / "file"))
    message = r"^checkpoint '.*iter_0000012' cannot be converted into .*; set HF_HOME to a directory with room"
    with pytest.raises(CheckpointError, match=message):
        converted(write_ranks(tmp_path, tiny_policy(), None))


@pytest.mark.parametrize(("named", "is_converted"), [(".", True), ("iter_0000012", True), ("missing", False)])
def test_a_run_converts_before_process_groups_wait(one_rank, tmp_path, cache, named: str, is_converted: bool) -> None:
    write_ranks(tmp_path, tiny_policy(), None)
    convert_ahead(str(tmp_path / named))
    assert cache.exists() == is_converted


def test_the_converter_writes_a_directory_that_says_what_its_model_is(one_rank, tmp_path, cache, capsys) -> None:
    config = tiny_config()
    directory = write_ranks(tmp_path / "ranks", random_policy(config), args_of(config))
    specification = spec_from_file_location("convert", Path(REPOSITORY, "tools", "checkpoint", "convert.py"))
    converter = module_from_spec(specification)
    specification.loader.exec_module(converter)
    argv = ["--loader", "core", "--saver", "core", "--load-dir", str(directory), "--save-dir", str(tmp_path / "out")]
    assert converter.main(argv) == 0 and not cache.exists()
    written = tmp_path / "out" / "iter_0000012"
    assert architecture_problems(config, find_checkpoint(written), VOCABULARY) == []
    read, _ = read_config(["--pretrained-checkpoint", str(written)], 1)
    assert read.model.hidden_size == config.model.hidden_size
    argv[5] = str(written)
    assert converter.main(argv) == 2
    assert "both are one format, which any parallel layout loads" in capsys.readouterr().err
