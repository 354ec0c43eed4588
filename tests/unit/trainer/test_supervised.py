"""Demonstrations in order, and the loss on them worked out by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.errors import EnvironmentFault
from megatron_rl.metrics.timers import PhaseTimer
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.trainer.packing import collate
from megatron_rl.trainer.scoring import Scorer
from megatron_rl.trainer.supervised import DemonstrationSource, SupervisedTrainer
from megatron_rl.types import Demonstration, Task
from tests.support.samples import random_samples, tiny_optimization
from tests.support.toy import LETTERS, toy_tokenizer


def source(*texts: str, max_tokens: int = 8) -> DemonstrationSource:
    """``ab:cd`` is prompt ``ab``, answer ``cd``."""
    pairs = [text.split(":") for text in texts]
    demonstrations = [("toy", Demonstration(Task(prompt, prompt), answer)) for prompt, answer in pairs]
    return DemonstrationSource(demonstrations, toy_tokenizer(), max_tokens)


def texts(samples: list) -> list[str]:
    """The answers; ``$`` is the end token."""
    return ["".join(LETTERS[i] for i in sample.token_ids[sample.loss_mask]) for sample in samples]


def test_a_demonstration_is_prompt_answer_and_end() -> None:
    sample = source("ab:cde").draw(1)[0]
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 5, 0]
    assert sample.loss_mask.tolist() == [False] * 2 + [True] * 4
    assert (sample.reward, sample.inference_logprobs.tolist()) == (0.0, [0.0] * 6)


def test_the_order_is_kept_and_starts_again() -> None:
    demonstrations = source("a:x", "b:y", "c:z")
    assert texts(demonstrations.draw(2)) == ["x$", "y$"]
    assert texts(demonstrations.draw(3)) == ["z$", "x$", "y$"]
    assert demonstrations.state_dict() == {"demonstrations": 5}


def test_too_long_ones_are_skipped_and_counted_in_the_cursor() -> None:
    demonstrations = source("a:x", "b:toolong", "c:z", max_tokens=8)
    assert texts(demonstrations.draw(2)) == ["x$", "z$"]
    assert demonstrations.skipped == 1
    assert demonstrations.state_dict() == {"demonstrations": 3}


def test_a_resumed_source_goes_on_where_the_other_stopped() -> None:
    names = [f"{letter}:{letter}" for letter in "abcdefg"]
    first = source(*names)
    first.draw(5)
    resumed = source(*names)
    resumed.load_state_dict(first.state_dict())
    assert texts(resumed.draw(6)) == texts(first.draw(6)) == ["f$", "g$", "a$", "b$", "c$", "d$"]


def test_nothing_to_draw_from() -> None:
    with pytest.raises(EnvironmentFault, match="no demonstration fits in 4 tokens; raise --seq-length"):
        source("a:toolong", "b:toolong", max_tokens=4).draw(1)


def supervised(groups: ParallelGroups, **changes: object) -> SupervisedTrainer:
    optimization = tiny_optimization(**changes)
    scorer = Scorer(optimization.policy, groups, 1.0)
    return SupervisedTrainer(optimization, scorer, PhaseTimer())


def test_loss_by_hand(one_rank: ParallelGroups) -> None:
    """``P0 P1 A0 E``: A0 = 1 has 1/4 after P1, E = 0 has 1/2 after A0; what P1 had after P0 does not count."""
    scorer = Scorer(SimpleNamespace(vocab_size=2, padded_vocab_size=2), one_rank, 1.0)
    trainer = SupervisedTrainer(None, scorer, PhaseTimer())
    batch = collate(source("aa:a").draw(1), "cpu")
    batch.samples.token_ids.copy_(torch.tensor([0, 1, 1, 0]))
    rows = [[5.0, -5.0], [math.log(3), 0.0], [0.0, 0.0], [5.0, -5.0]]
    logits = torch.tensor(rows, requires_grad=True)
    total, denominator, _ = trainer.loss(logits, batch)
    assert total.item() == pytest.approx(math.log(4) + math.log(2), abs=1e-6)
    assert denominator.item() == 2
    total.backward()
    # p - onehot at the two logits that predict the answer.
    expected = [[0.0, 0.0], [0.75, -0.75], [-0.5, 0.5], [0.0, 0.0]]
    torch.testing.assert_close(logits.grad, torch.tensor(expected))


def test_metrics_are_those_of_the_whole_batch(one_rank: ParallelGroups) -> None:
    """The mean over all answer tokens, whatever the micro-batches."""
    samples = random_samples(5)
    whole = supervised(one_rank).step([collate(samples, "cpu")])
    parts = supervised(one_rank).step([collate(samples[:1], "cpu"), collate(samples[1:], "cpu")])
    tokens = sum(int(sample.loss_mask.sum()) for sample in samples)
    assert whole.metrics["perf/total_num_tokens"] == tokens
    assert parts.metrics == pytest.approx(whole.metrics, rel=1e-5)
    assert whole.metrics["train/perplexity"] == pytest.approx(math.exp(whole.metrics["train/loss"]))


def test_training_lowers_the_loss(one_rank: ParallelGroups) -> None:
    trainer = supervised(one_rank, train_iters=20)
    batch = collate(random_samples(4), "cpu")
    losses = [trainer.step([batch]).metrics["train/loss"] for _ in range(8)]
    assert losses[-1] < 0.5 * losses[0]
