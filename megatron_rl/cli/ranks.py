"""How many ranks a command starts, and where: the flags of the launcher, in torchrun's words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.cli.options import take
from megatron_rl.config.flags import flag
from megatron_rl.errors import ConfigError, Problem


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The processes of a job."""

    nproc: int = flag(1, ge=1, le=1024, aliases=("--nproc-per-node",))
    """Ranks on this machine, one a GPU."""
    nnodes: int = flag(1, ge=1, le=100_000)
    """Machines; the command is started on each of them."""
    node_rank: int = flag(0, ge=0)
    """Number of this machine."""
    master_addr: str | None = flag(None)
    """Name or address of machine 0."""
    master_port: int = flag(29500, ge=1, le=65535)
    """Port of machine 0 on which the machines find each other."""
    max_restarts: int = flag(0, ge=0, le=1000)
    """How often all ranks are started again after one of them failed; needs --resume."""

    @property
    def world_size(self) -> int:
        """All ranks of the job."""
        return self.nproc * self.nnodes

    @property
    def is_one(self) -> bool:
        """Nothing is to be launched: this process is the job."""
        return self.world_size == 1 and self.max_restarts == 0


def read_ranks(words: Sequence[str]) -> tuple[Ranks, list[str]]:
    """What ``words`` say of ranks, and the other words.

    Raises:
        ConfigError: names every value that cannot be.
    """
    ranks, others = take(Ranks, words)
    problems = []
    if ranks.node_rank >= ranks.nnodes:
        text = f"--node-rank {ranks.node_rank} is not below --nnodes {ranks.nnodes}; machines are numbered from 0"
        problems.append(Problem("--node-rank", text))
    if ranks.nnodes > 1 and not ranks.master_addr:
        problems.append(Problem("--master-addr", "--master-addr is missing: give the name or address of machine 0"))
    if problems:
        raise ConfigError(problems)
    return ranks, others
