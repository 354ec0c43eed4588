"""The rollout engine where other copies of the model hold some of the experts: all make their passes together.

    rank 0   prefill  decode  decode  decode
    rank 1      -     decode  decode     -          - : a token of nothing through the experts alone

Every step begins with one exchange of how many passes each rank has before it. Which experts a rank has does not depend
on its samples, so whoever has fewer joins in the others' passes with a token that nobody reads.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ListOf

import torch
import torch.distributed as dist

from megatron_rl.inference.engine import EngineOptions
from megatron_rl.inference.rollout_engine import RolloutEngine
from megatron_rl.models import PolicyModel
from megatron_rl.parallel import ParallelGroups
from megatron_rl.parallel.collectives import max_over
from megatron_rl.types import Completed


def of_others(passes: int, steps: int, lockstep_group: dist.ProcessGroup) -> tuple[int, int]:
    """Passes over prompts, and decode steps, that some copy of the model has beyond this one's; collective."""
    most = max_over({"passes": passes, "steps": steps}, lockstep_group)
    return int(most["passes"]) - passes, int(most["steps"]) - steps


class LockstepEngine(RolloutEngine):
    """All ranks of the lockstep group step while one of them has unfinished requests."""

    def __init__(
        self,
        policy: PolicyModel,
        options: EngineOptions,
        stop_token_ids: ListOf[int],
        decode_text: Callable[[ListOf[int]], str],
        groups: ParallelGroups,
    ) -> None:
        super().__init__(policy, options, stop_token_ids, decode_text, groups.tensor_group)
        self._lockstep_group = groups.lockstep_group
        self._expert_layers = [layer.mlp for layer in policy.gpt.decoder.layers]
        self._nothing = torch.zeros(1, policy.config.hidden_size, dtype=policy.dtype, device=policy.device)

    @torch.inference_mode()
    def step(self) -> list[Completed]:
        """See `RolloutEngine.step`; collective over the lockstep group."""
        chunks, kinds = self._plan()
        running = self._scheduler.running
        burst = self._next_burst(running) if running else None
        passes, steps = len([*self.runner.passes(chunks)]), burst[2] if burst else 0
        others_passes, others_steps = of_others(passes, steps, self._lockstep_group)
        if chunks:
            self.runner.prefill(chunks, kinds)
        self._join(others_passes)
        if burst is not None:
            self.decode(*burst, kinds)
        self._join(others_steps)
        return self._finish(running) if running else []

    def _join(self, passes: int) -> None:
        for _ in range(passes):
            for experts in self._expert_layers:
                experts.decode(self._nothing, self.runner.context)
