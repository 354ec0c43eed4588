"""Supervised warm start on an environment's demonstrations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from megatron_rl.algorithms import TokenBatch
from megatron_rl.algorithms.batch import Sample
from megatron_rl.algorithms.objective import MicroLoss
from megatron_rl.chat import unless_refused
from megatron_rl.errors import EnvironmentFault
from megatron_rl.metrics.timers import PhaseTimer
from megatron_rl.tokenizer import Tokenizer
from megatron_rl.trainer.optimizer import Optimization
from megatron_rl.trainer.scoring import Scorer
from megatron_rl.trainer.update import TrainOutcome, outcome_metrics
from megatron_rl.types import Demonstration


class DemonstrationSource:
    """Demonstrations in the order of the environment, with a saved cursor.

    The order is a curriculum, so it is not shuffled; after the last one it starts again.
    """

    def __init__(
        self, demonstrations: Sequence[tuple[str, Demonstration]], tokenizer: Tokenizer, max_tokens: int
    ) -> None:
        """``demonstrations``: (environment name, demonstration)."""
        self._demonstrations = demonstrations
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._cursor = 0
        self._refused: dict[str, str] = {}
        self.skipped = 0
        """Number of demonstrations that are too long or that the chat template refuses."""

    def draw(self, count: int) -> list[Sample]:
        """Return the next ``count`` demonstrations that fit; others are skipped and counted.

        Raises:
            EnvironmentFault: none fits.
        """
        samples: list[Sample] = []
        seen = 0
        while len(samples) < count:
            if not samples and seen > len(self._demonstrations):
                why = "".join(self._refused.values())
                raise EnvironmentFault(f"no demonstration fits in {self._max_tokens} tokens; raise --seq-length{why}")
            shown = self._demonstrations[self._cursor % len(self._demonstrations)]
            sample = unless_refused(partial(self._sample, *shown), self._refused, shown[0])
            self._cursor += 1
            seen += 1
            if sample is not None and sample.length <= self._max_tokens:
                samples.append(sample)
            else:
                self.skipped += 1
        return samples

    def state_dict(self) -> dict[str, int]:
        """Return the cursor, for a checkpoint."""
        return {"demonstrations": self._cursor}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the cursor."""
        self._cursor = int(state.get("demonstrations", 0))

    def _sample(self, environment: str, demonstration: Demonstration) -> Sample:
        asked, tokenizer = demonstration.task.prompt, self._tokenizer
        end = [tokenizer.end_token_id]
        parts = [(tokenizer.encode_prompt(asked, environment), False)]
        parts.append((tokenizer.encode(demonstration.completion) + end, True))
        for turn in demonstration.later:
            parts.append((tokenizer.encode_reply(asked, turn.messages, True, environment), False))
            parts.append((tokenizer.encode(turn.completion) + end, True))
        ids = torch.tensor([token for part, _ in parts for token in part])
        mask = torch.tensor([is_written for part, is_written in parts for _ in part])
        zeros = torch.zeros_like(ids)
        return Sample(
            token_ids=ids, loss_mask=mask, inference_logprobs=zeros.float(), versions=zeros, sample_id=self._cursor
        )


@dataclass(frozen=True)
class SupervisedTrainer:
    """Cross-entropy on the tokens of demonstrations, divided by their number in the batch."""

    optimization: Optimization
    scorer: Scorer
    timer: PhaseTimer

    def step(self, micro_batches: Sequence[TokenBatch]) -> TrainOutcome:
        """Take one update; collective."""
        with self.timer.phase("update_actor"):
            outcomes, totals = self.scorer.update(self.optimization, [micro_batches], self.loss)
        tokens = float(totals["tokens"])
        loss = float(totals["loss"]) / max(tokens, 1.0)
        metrics = {
            "train/loss": loss,
            "train/perplexity": math.exp(min(loss, 50.0)),
            "perf/total_num_tokens": tokens,
        }
        metrics |= outcome_metrics(outcomes) | self.scorer.balance_metrics()
        return TrainOutcome(metrics, [micro_batches], outcomes)

    def loss(self, output: torch.Tensor, batch: TokenBatch) -> MicroLoss:
        """Compute the loss from the output of `Scorer.forward`; the denominator is the number of answer tokens."""
        logprobs = self.scorer.select(output, batch).current_logprobs
        total = -(logprobs * batch.loss_mask).sum()
        tokens = batch.loss_mask.sum()
        return total, tokens, {"loss": total.detach(), "tokens": tokens}
