"""What ranks that share experts agree on: all make their passes together.

    rank 0   prefill  decode  decode  decode
    rank 1      -     decode  decode     -          - : a token of nothing through the experts alone

Every step begins with one exchange of how many passes each rank has before it. Which experts a rank has does not depend
on its samples, so whoever has fewer joins in the others' passes with a token that nobody reads.

With CUDA graphs the decode steps of all ranks are alike: as many, of as many rows, of the same key length and sampling
modes. A rank has its other rows idle. So all replay the same graph, and capture together what they have not yet.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist

from megatron_rl.inference.model_runner import ModelRunner
from megatron_rl.inference.sampler import SamplingModes
from megatron_rl.platform.collectives import max_over

logger = logging.getLogger(__name__)


class Passes(NamedTuple):
    """The passes of an engine step: of one rank, or the most that any rank of a lockstep group has."""

    prefills: int
    """Over prompts."""
    rows: int = 1
    """Of a decode step: the first of the batch. A rank without sequences joins in with one token."""
    key_length: int = 0
    """Of the first decode step: see `ModelRunner.decode`."""
    steps: int = 0
    """Decode steps until the host reads."""
    modes: SamplingModes = SamplingModes()

    def most(self, lockstep_group: dist.ProcessGroup) -> Passes:
        """Of any rank; each passes its own. Collective."""
        own = self._asdict() | self.modes._asdict()
        del own["modes"]
        largest = {name: int(number) for name, number in max_over(own, lockstep_group).items()}
        modes = SamplingModes(*(bool(largest.pop(name)) for name in SamplingModes._fields))
        return Passes(**largest, modes=modes)


def drop_unequal_graphs(runners: Sequence[ModelRunner], rows: int, lockstep_group: dist.ProcessGroup) -> None:
    """Decode eager where not all ranks of the lockstep group have as many ``rows``. Collective."""
    found = max_over({"most": rows, "least": -rows}, lockstep_group)
    if found["most"] == -found["least"]:
        return
    for runner in runners:
        if runner.graphs is not None:
            logger.warning("decode runs eager: ranks that share experts have room for different numbers of sequences")
        runner.graphs = None
