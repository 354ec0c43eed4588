"""The teacher of on-policy distillation: a frozen model that scores the policy's samples.

Source: Thinking Machines Lab, "On-Policy Distillation", 2025: a token's reward is minus its reverse KL, estimated by
``teacher log-prob - student log-prob``, without later tokens (discount 0).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_rl.algorithms import Terms, TokenBatch, log_ratio
from megatron_rl.algorithms.extension import Function
from megatron_rl.errors import CheckpointError
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.platform.device import as_bytes, release, restore, storages_of
from megatron_rl.trainer.scoring import Scorer


class Teacher:
    """A frozen model; between passes its storages stay or are freed, with the weights on the host."""

    def __init__(self, model: PolicyModel, scorer: Scorer, path: str, weights: Mapping[str, str], stays: bool) -> None:
        """``path`` and ``weights`` (fingerprint per dtype) identify the teacher in checkpoints."""
        self._scorer, self._path, self._weights, self._stays = scorer, path, dict(weights), stays
        self.storages = storages_of(model.parameters())
        pinned = model.device.type == "cuda"
        self._host = [] if stays else [_on_host(storage, pinned) for storage in self.storages]
        self._free()

    def scored(self, part: Sequence[TokenBatch]) -> list[TokenBatch]:
        """Return an update's micro-batches with `TokenBatch.teacher_logprobs`; only inside `on_device`."""
        # Recorded experts are the policy's.
        own = [replace(batch, samples=replace(batch.samples, routing=None)) for batch in part]
        logprobs = self._scorer.logprobs(own)
        return [replace(batch, teacher_logprobs=one) for batch, one in zip(part, logprobs, strict=True)]

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """Keep the weights on the device inside the context."""
        try:
            for storage, values in zip(self.storages, self._host, strict=False):
                restore(storage, values.nbytes).copy_(values, non_blocking=True)
            yield
        finally:
            self._free()

    def _free(self) -> None:
        # The host has a permanent copy: nothing is copied back.
        for storage in () if self._stays else self.storages:
            release(storage)

    def state_dict(self) -> dict[str, Any]:
        """Return path and fingerprint, without weights."""
        return {"path": self._path, "weights": self._weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check that the teacher is the same.

        Raises:
            CheckpointError: the run had another teacher.
        """
        both = state["weights"].keys() & self._weights.keys()
        if not both or any(state["weights"][name] != self._weights[name] for name in both):
            raise CheckpointError(
                f"the teacher {self._path} has other weights than the teacher {state['path']} had when the "
                "run began; name a directory that has them, or begin a new run with --load and --finetune"
            )


def _on_host(storage: torch.UntypedStorage, pinned: bool) -> torch.Tensor:
    values = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu", pin_memory=pinned)
    return values.copy_(as_bytes(storage))


@dataclass(frozen=True, kw_only=True)
class DistillationAdvantage:
    """``reward_weight x rewards' advantage + weight x (teacher log-prob - student log-prob)`` of each token.

    The student is the trainer's model before the step's updates, or, with a single update, the rollout engine. The
    log-ratio is clamped to ``batch.LOG_RATIO_LIMIT``.
    """

    of_rewards: Function
    weight: float
    """0 if the teacher is a term of the loss."""
    reward_weight: float

    def __call__(self, batch: TokenBatch) -> Terms:
        advantages, sums = self.of_rewards(batch)
        student = batch.inference_logprobs if batch.old_logprobs is None else batch.old_logprobs
        # The objective excludes non-finite values; here NaN would only spoil metrics.
        taught = log_ratio(batch.teacher_logprobs, student, batch.loss_mask).nan_to_num(0.0)
        return self.reward_weight * advantages + self.weight * taught, sums
