"""How many passes an engine step takes, and how ranks that share experts agree on it."""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist

from megatron_rl.inference.sampler import SamplingModes
from megatron_rl.platform.collectives import max_over


class Passes(NamedTuple):
    """The passes of an engine step: of one rank, or the largest numbers of all ranks that share experts.

        rank 0   prefill  decode  decode  decode
        rank 1      -     decode  decode     -          - : a token of nothing through the experts alone

    Such ranks make all passes together, so they exchange these numbers before every step. Who has fewer joins in the
    others' passes with a token that nobody reads. With CUDA graphs the decode steps of all ranks are alike in steps,
    rows, key length and sampling modes, the other rows of a rank idle: so all replay, and capture, the same graphs.
    """

    prefills: int
    """Over prompts."""
    rows: int = 1
    """Of a decode step: the first of the batch. A rank without sequences joins in with one token."""
    key_length: int = 0
    """Of the first decode step: see `ModelRunner.decode`."""
    steps: int = 0
    """Decode steps until the host reads."""
    modes: SamplingModes = SamplingModes()

    def of_all(self, lockstep_group: dist.ProcessGroup) -> Passes:
        """Return the largest numbers of any rank; collective."""
        own = self._asdict() | self.modes._asdict()
        del own["modes"]
        largest = {name: int(number) for name, number in max_over(own, lockstep_group).items()}
        modes = SamplingModes(*(bool(largest.pop(name)) for name in SamplingModes._fields))
        return Passes(**largest, modes=modes)
