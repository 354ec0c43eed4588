"""The flags that a command has for itself, among those of a run."""

from __future__ import annotations

import pytest

from megatron_rl.cli.options import Ranks, read_ranks
from megatron_rl.errors import ConfigError


def test_they_are_taken_out_wherever_they_stand():
    words = ["--lr", "1e-6", "--nproc", "8", "--bf16", "--max-restarts=2", "--rl-stop-strings", "a", "b"]
    ranks, flags = read_ranks(words)
    assert ranks == Ranks(nproc=8, max_restarts=2)
    assert flags == ["--lr", "1e-6", "--bf16", "--rl-stop-strings", "a", "b"]
    assert ranks.world_size == 8


def test_without_them_it_is_one_rank():
    ranks, flags = read_ranks(["--lr", "1e-6"])
    assert (ranks.is_one, ranks.world_size, flags) == (True, 1, ["--lr", "1e-6"])


def test_torchruns_spellings_are_taken():
    words = ["--nproc-per-node=4", "--nnodes", "2", "--node_rank", "1", "--master-addr", "a", "--master_port", "99"]
    ranks, flags = read_ranks(words)
    assert ranks == Ranks(nproc=4, nnodes=2, node_rank=1, master_addr="a", master_port=99)
    assert (ranks.world_size, flags) == (8, [])


def test_one_rank_that_is_started_again_needs_a_launcher():
    assert not read_ranks(["--max-restarts", "1"])[0].is_one


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--nproc", "0"], "--nproc must be at least 1, got 0"),
        (["--nproc", "gpu"], "--nproc is not a whole number, got 'gpu'"),
        (["--nproc", "--lr", "1"], "--nproc needs a value"),
        (["--nnodes", "2"], "--master-addr is missing: give the name or address of machine 0"),
        (["--node-rank", "1"], "--node-rank 1 is not below --nnodes 1; machines are numbered from 0"),
    ],
)
def test_wrong_ones_are_one_line(words: list[str], problem: str):
    with pytest.raises(ConfigError) as caught:
        read_ranks(words)
    assert caught.value.lines == [problem]
