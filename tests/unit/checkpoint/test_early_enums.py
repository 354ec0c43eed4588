"""Python 3.11.0 to 3.11.3 store members of enumerations as calls of ``getattr``."""

from __future__ import annotations

import pickle
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from megatron_rl.checkpoint.dist_files import DistFiles
from megatron_rl.errors import CheckpointError
from tests.support.foreign import write_dist
from tests.support.tiny import tiny_config, tiny_policy


class _EarlyPickler(pickle.Pickler):
    def reducer_override(self, stored: Any) -> Any:
        return (getattr, (type(stored), stored.name)) if isinstance(stored, Enum) else NotImplemented


class _Method:
    def __reduce__(self) -> tuple[Any, tuple[Any, str]]:
        return getattr, (torch.Size, "numel")


def test_they_are_read_and_nothing_else_that_is_stored_so(one_rank, tmp_path: Path) -> None:
    directory = write_dist(tmp_path, tiny_policy(tiny_config()), None)
    names, file = DistFiles(directory).names, directory / ".metadata"
    described = FileSystemReader(directory).read_metadata()
    with file.open("wb") as opened:
        _EarlyPickler(opened).dump(described)
    assert b"getattr" in file.read_bytes() and DistFiles(directory).names == names
    file.write_bytes(pickle.dumps(_Method()))
    with pytest.raises(CheckpointError, match="it asks for the attribute numel of something, which is not allowed"):
        DistFiles(directory)
