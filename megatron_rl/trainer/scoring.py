"""Run the model over a packed batch and read off the log-probs of its tokens."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_rl.algorithms.logprobs import Entropy, SelectedLogprobs, selected_logprobs
from megatron_rl.attention.buckets import BucketedPlan
from megatron_rl.models import PolicyModel
from megatron_rl.types import PackedBatch


class Scorer:
    """The trainer's view of token probabilities: of the tempered distribution that was sampled."""

    def __init__(
        self, policy: PolicyModel, tensor_group: dist.ProcessGroup, temperature: float
    ) -> None:
        self._policy = policy
        self._tensor_group = tensor_group if tensor_group.size() > 1 else None
        self._vocab_start = tensor_group.rank() * (policy.padded_vocab_size // tensor_group.size())
        self._temperature = temperature

    @property
    def device(self) -> torch.device:
        """Where the results lie."""
        return self._policy.device

    def forward(self, model: torch.nn.Module, batch: PackedBatch) -> torch.Tensor:
        """Logits ``[T, V / tensor ranks]``; ``model`` is the GPTModel or its DDP wrapper."""
        plan = BucketedPlan.build(
            batch.lengths, batch.cu_seqlens, batch.position_ids, self._policy.rope, self._policy.dtype
        )
        logits = model(batch.token_ids[None], batch.position_ids[None], None, packed_seq_params=plan)
        return logits[0]

    def select(
        self, logits: torch.Tensor, batch: PackedBatch, entropy: Entropy = "none"
    ) -> SelectedLogprobs:
        """Log-prob of token t at index t, ``[T]`` fp32."""
        return selected_logprobs(
            logits,
            batch.token_ids,
            batch.position_ids,
            vocab_size=self._policy.vocab_size,
            temperature=self._temperature,
            vocab_start=self._vocab_start,
            tensor_group=self._tensor_group,
            entropy=entropy,
        )

    @torch.no_grad()
    def logprobs(self, batch: PackedBatch) -> torch.Tensor:
        """Log-probs without gradient, by the same forward pass that training uses."""
        return self.select(self.forward(self._policy.gpt, batch), batch).logprobs

    @torch.no_grad()
    def logprobs_and_top(self, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Also the likeliest next token after every position, [T] int64, of the real vocabulary."""
        logits = self.forward(self._policy.gpt, batch)
        return self.select(logits, batch).logprobs, self._top(logits)

    def _top(self, logits: torch.Tensor) -> torch.Tensor:
        real = min(max(self._policy.vocab_size - self._vocab_start, 0), logits.shape[-1])
        if real == 0:  # this rank has padding only
            best = logits.new_full(logits.shape[:1], float("-inf")).float()
            token = torch.zeros_like(best, dtype=torch.int64)
        else:
            best, token = logits[:, :real].float().max(-1)
        token = token + self._vocab_start
        if self._tensor_group is None:
            return token
        overall = best.clone()
        dist.all_reduce(overall, op=dist.ReduceOp.MAX, group=self._tensor_group)
        token = torch.where(best == overall, token, self._policy.padded_vocab_size)
        dist.all_reduce(token, op=dist.ReduceOp.MIN, group=self._tensor_group)  # equal ones: the first
        return token
