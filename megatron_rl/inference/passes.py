"""The number of forward passes of an engine step, agreed among expert-parallel ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist

from megatron_rl.inference.sampler import SamplingModes
from megatron_rl.platform.collectives import max_over


class Passes(NamedTuple):
    """The passes of an engine step: of one rank, or the maxima over all expert-parallel ranks.

        rank 0   prefill  decode  decode  decode
        rank 1      -     decode  decode     -          - : a dummy token through the experts only

    Expert collectives need all ranks, so these numbers are exchanged before every step, and ranks with fewer passes run
    dummy ones. With CUDA graphs all ranks use the same rows, key length and modes in decode steps, padded with idle
    rows, so that they capture and replay the same graphs.
    """

    prefills: int
    """Passes over prompts."""
    rows: int = 1
    """Rows of a decode step. A rank without sequences feeds one dummy token."""
    key_length: int = 0
    """Key length of the first decode step: see `ModelRunner.decode`."""
    steps: int = 0
    """Decode steps until the host reads."""
    modes: SamplingModes = SamplingModes()

    def max_over_ranks(self, lockstep_group: dist.ProcessGroup) -> Passes:
        """Return the maxima over the ranks; collective."""
        own = self._asdict() | self.modes._asdict()
        del own["modes"]
        largest = {name: int(number) for name, number in max_over(own, lockstep_group).items()}
        modes = SamplingModes(*(bool(largest.pop(name)) for name in SamplingModes._fields))
        return Passes(**largest, modes=modes)
