"""The teacher of on-policy distillation: a frozen model that scores what the policy has sampled.

Source: Thinking Machines Lab, "On-Policy Distillation", 2025: the reward of a token is minus its reverse KL, estimated
by ``teacher log-prob - student log-prob``, and what comes after the token does not count (discount 0).
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
from megatron_rl.platform.device import as_bytes, release, storages_of, take_back
from megatron_rl.trainer.scoring import Scorer


class Teacher:
    """Its weights wait on the host and visit the device for a pass, or stay there.

    Storages shrink to nothing and grow again; parameters stay the same objects.
    """

    def __init__(self, model: PolicyModel, scorer: Scorer, path: str, weights: Mapping[str, str], stays: bool) -> None:
        """``path`` and ``weights``, the fingerprint by number format, are what a checkpoint says of it."""
        self._scorer, self._path, self._weights, self._stays = scorer, path, dict(weights), stays
        self.storages = storages_of(model.parameters())
        pinned = model.device.type == "cuda"
        self._host = [] if stays else [_on_host(storage, pinned) for storage in self.storages]
        self._leave()

    def scored(self, part: Sequence[TokenBatch]) -> list[TokenBatch]:
        """Return the micro-batches of an update with `TokenBatch.teacher_logprobs`; only while `visiting`."""
        # Experts that the rollout chose are the policy's.
        own = [replace(batch, samples=replace(batch.samples, routing=None)) for batch in part]
        logprobs = self._scorer.logprobs(own)
        return [replace(batch, teacher_logprobs=one) for batch, one in zip(part, logprobs, strict=True)]

    @contextlib.contextmanager
    def visiting(self) -> Iterator[None]:
        """Have the weights on the device inside the ``with`` block."""
        try:
            for storage, values in zip(self.storages, self._host, strict=False):
                take_back(storage, values.nbytes).copy_(values, non_blocking=True)
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        # What is in them is on the host for good: nothing is copied back.
        for storage in () if self._stays else self.storages:
            release(storage)

    def state_dict(self) -> dict[str, Any]:
        """Return where it was read and its fingerprint, without weights."""
        return {"path": self._path, "weights": self._weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Compare.

        Raises:
            CheckpointError: the run was taught by another model.
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
class TaughtAdvantage:
    """``reward_weight x the rewards' advantage + weight x (teacher log-prob - student log-prob)`` of each token.

    The student is the trainer's model before the step's updates, or where that is not asked, with a single update, the
    engine that drew the token. The log-ratio is within ``batch.LOG_RATIO_LIMIT``.
    """

    of_rewards: Function
    weight: float
    """0 where the teacher is a term of the loss."""
    reward_weight: float

    def __call__(self, batch: TokenBatch) -> Terms:
        """See ``Extension``."""
        advantages, sums = self.of_rewards(batch)
        student = batch.inference_logprobs if batch.old_logprobs is None else batch.old_logprobs
        # The objective leaves out what is not finite here; a NaN would only spoil the metrics.
        taught = log_ratio(batch.teacher_logprobs, student, batch.loss_mask).nan_to_num(0.0)
        return self.reward_weight * advantages + self.weight * taught, sums
