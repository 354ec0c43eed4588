"""Router replay: the trainer sends a token to the experts that the rollout sent it to (R3, arXiv 2510.11370).

Near ties of the router fall one way in a quantised rollout and the other way in the trainer, and another expert is
another function: that gap is far larger than rounding. Only the choice is replayed. How much each chosen expert counts
is the trainer's own probability, so the router has its gradient.

megatron has a replay of its own. It keeps what is replayed in the router, so somebody must switch it between phases,
and with pipeline stages queue it for the backward pass. Here the ids come with the plan of each forward pass, which a
layer that is recomputed gets again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

TopK = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class Routing:
    """Stands in for a router's ``router_replay``, which megatron's top-k asks."""

    def __init__(self) -> None:
        self._given: torch.Tensor | None = None
        self.chosen: torch.Tensor | None = None
        """[T, k] int64: the experts of the last forward pass that chose for itself, without gradients."""

    @contextlib.contextmanager
    def given(self, experts: torch.Tensor | None) -> Iterator[None]:
        """Inside, tokens go to ``experts`` [T, k]; where these are the largest number of their dtype, and with None,
        the router chooses.
        """
        self._given = experts
        try:
            yield
        finally:
            self._given = None

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: TopK
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and ids of the experts to use, [T, k] each, from ``scores`` [T, experts]."""
        values, chosen = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self._given is None:
            if not torch.is_grad_enabled():
                self.chosen = chosen
            return values, chosen
        known = self._given != torch.iinfo(self._given.dtype).max
        chosen = torch.where(known, self._given.long(), chosen)
        return scores.gather(1, chosen), chosen
