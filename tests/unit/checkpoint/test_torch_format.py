"""Megatron's format torch: which ranks wrote its files, and pickles that are more than data."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.transformer.enums import AttnBackend

from megatron_rl.checkpoint.foreign import MODEL_FILE, Topology, topology_of
from megatron_rl.checkpoint.pickled import read
from megatron_rl.errors import CheckpointError


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
    assert {type(value).__name__ for value in content.values()} == {"_Nothing"}
    assert all(vars(value) == {} for value in content.values())


def test_what_others_allow_counts_for_nothing_here_and_is_left_as_it_was(tmp_path: Path) -> None:
    """megatron-core allows classes for the whole process."""
    torch.save(Fraction(1, 3), tmp_path / "file.pt")
    with torch.serialization.safe_globals([Fraction]):
        before = set(torch.serialization.get_safe_globals())
        with pytest.raises(CheckpointError, match=r"fractions\.Fraction"):
            read(tmp_path / "file.pt")
        assert set(torch.serialization.get_safe_globals()) == before


@pytest.mark.parametrize(
    ("names", "topology"),
    [
        (["mp_rank_00"], Topology()),
        (["mp_rank_00", "mp_rank_01"], Topology(2)),
        (["mp_rank_00_000", "mp_rank_00_001"], Topology(1, 2)),
        (["mp_rank_00_000", "mp_rank_00_001", "mp_rank_01_000", "mp_rank_01_001"], Topology(2, 2)),
    ],
)
def test_directories_say_how_ranks_share_the_model(tmp_path: Path, names: list[str], topology: Topology) -> None:
    directory = tmp_path / "iter_0000012"
    for name in names:
        (directory / name).mkdir(parents=True)
        torch.save({"model": {}}, directory / name / MODEL_FILE)
    assert topology_of(directory) == topology and topology.names == names
