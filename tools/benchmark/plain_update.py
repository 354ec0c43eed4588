"""The policy update one would write with transformers and torch alone, as fast as it easily gets."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from megatron_rl.config import RLConfig
from megatron_rl.models import PolicyModel
from megatron_rl.types import Sample
from tools.benchmark.twin import hugging_face_twin


class PlainUpdate:
    """Padded micro-batches, gradient accumulation, clipping, AdamW.

    Padding is on the right and attention is causal, so no mask is passed: that is the fast way
    through Hugging Face's attention.
    """

    def __init__(self, policy: PolicyModel, config: RLConfig, max_length: int) -> None:
        self._model = hugging_face_twin(policy, max_length).train()
        settings = config.optimizer
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=settings.lr,
            betas=(settings.adam_beta1, settings.adam_beta2),
            eps=settings.adam_eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self._clip_grad = settings.clip_grad
        self._micro_batch = config.training.micro_batch_size
        algorithm = config.algorithm
        self._clip_range = 1 - algorithm.grpo_clamp_eps_lower, 1 + algorithm.grpo_clamp_eps_upper

    def __call__(self, samples: Sequence[Sample]) -> tuple[float, float]:
        """One update; returns its loss and the norm of its gradient before clipping."""
        self._optimizer.zero_grad()
        denominator = sum(sample.length - sample.prompt_length for sample in samples)
        total = 0.0
        for start in range(0, len(samples), self._micro_batch):
            loss = self._loss_sum(samples[start : start + self._micro_batch]) / denominator
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._clip_grad)
        self._optimizer.step()
        return total, norm.item()

    def _loss_sum(self, samples: Sequence[Sample]) -> torch.Tensor:
        ids = pad_sequence([sample.token_ids for sample in samples], batch_first=True)
        column = torch.arange(1, ids.shape[1])
        first = torch.tensor([sample.prompt_length for sample in samples])[:, None]
        length = torch.tensor([sample.length for sample in samples])[:, None]
        mask = (column >= first) & (column < length)
        advantage = torch.tensor([sample.reward for sample in samples])[:, None]

        logits = self._model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        current = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        ratio = (current - current.detach()).exp()
        clipped = ratio.clamp(*self._clip_range)
        per_token = torch.maximum(-ratio * advantage, -clipped * advantage)
        return torch.where(mask, per_token, 0.0).sum()
