"""What becomes of a teacher's log-probs, on the numbers of `test_policy_loss`, and how its weights come and go.

    token                       A0           A1           B0
    current, old, engine        3/4 1/2 1/4  1/2 1/2 1/2  1/4 1/2 1/4
    teacher                     1/4          1/2          3/4
    log(teacher / old)          -ln2         0            ln1.5
    log(current / teacher)      ln3          0            -ln3
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_rl.algorithms import TokenBatch
from megatron_rl.algorithms.groups import informative_groups
from megatron_rl.algorithms.objective import objective_metrics
from megatron_rl.config.rl_config import RLConfig
from megatron_rl.config.rules import teacher_of
from megatron_rl.errors import CheckpointError
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.trainer.packing import collate
from megatron_rl.trainer.scoring import Scorer
from megatron_rl.trainer.teacher import DistillationAdvantage, Teacher
from megatron_rl.trainer.update import reduce_sums
from tests.support.hugging_face import write_shape
from tests.support.samples import own_reward, random_samples
from tests.support.tiny import tiny_config, tiny_policy
from tests.unit.trainer.test_policy_loss import PLAIN, logits, run, scored

LN2, LN3 = math.log(2), math.log(3)


def taught() -> TokenBatch:
    return replace(scored(), teacher_logprobs=torch.tensor([5.0, 0.25, 0.5, 5.0, 0.75]).log())


def test_the_teacher_is_part_of_the_advantage_of_each_token() -> None:
    """Rewards 1 and -2, twice; and half of log(teacher / old)."""
    advantage = DistillationAdvantage(of_rewards=own_reward, weight=0.5, reward_weight=2.0)
    advantages, _ = advantage(taught())
    assert advantages[[1, 2, 4]].tolist() == pytest.approx([2 - LN2 / 2, 2.0, -4 + math.log(1.5) / 2])


def test_with_a_single_update_the_student_is_the_engine() -> None:
    advantage = DistillationAdvantage(of_rewards=own_reward, weight=1.0, reward_weight=0.0)
    advantages, _ = advantage(replace(taught(), old_logprobs=None))
    assert advantages[[1, 2, 4]].tolist() == pytest.approx([0.0, 0.0, LN3])


def test_the_teacher_as_a_term_of_the_loss(one_rank: ParallelGroups) -> None:
    """k2: ln3^2 / 2 twice. k3: 1/3 - 1 + ln3 and 3 - 1 - ln3."""
    base = run(one_rank, PLAIN, batch=taught())[0].item()
    assert base == pytest.approx(run(one_rank, PLAIN)[0].item())
    for estimator, expected in (("k2", LN3**2), ("k3", 4 / 3)):
        objective = replace(PLAIN, teacher_weight=2.0, teacher_estimator=estimator)
        total, denominator, sums = run(one_rank, objective, batch=taught())
        assert total.item() - base == pytest.approx(2 * expected, abs=1e-5)
        assert sums["teacher/loss"].item() == pytest.approx(expected, abs=1e-5)
        assert denominator.item() == 3


def test_the_term_has_the_denominator_of_the_policy_loss(one_rank: ParallelGroups) -> None:
    """Half of A0's ln3^2 / 2, its sequence having two tokens, and B0's; over two sequences."""
    objective = replace(PLAIN, aggregation="sequence-mean", teacher_weight=1.0)
    sums = [run(one_rank, objective, batch=taught())[2]]
    metrics = objective_metrics(reduce_sums(sums, one_rank.data_group, torch.device("cpu")))
    assert metrics["teacher/loss"] == pytest.approx(0.75 * LN3**2 / 2, abs=1e-6)


def test_descending_the_term_brings_the_student_to_the_teacher(one_rank: ParallelGroups) -> None:
    """d k2 / d log pi = log(current / teacher); times (onehot - p)."""
    gradients = []
    for weight in (0.0, 1.0):
        values = logits()
        run(one_rank, replace(PLAIN, teacher_weight=weight), values, taught())[0].backward()
        gradients.append(values.grad)
    nothing = [0.0, 0.0]
    expected = torch.tensor([[LN3 / 4, -LN3 / 4], nothing, nothing, [0.75 * LN3, -0.75 * LN3], nothing])
    torch.testing.assert_close(gradients[1] - gradients[0], expected, atol=1e-6, rtol=0)


def test_metrics(one_rank: ParallelGroups) -> None:
    sums = [run(one_rank, replace(PLAIN, teacher_weight=1.0), batch=taught())[2] for _ in range(2)]
    metrics = objective_metrics(reduce_sums(sums, one_rank.data_group, torch.device("cpu")))
    assert metrics["teacher/kl"] == pytest.approx((LN2 - math.log(1.5)) / 3, abs=1e-6)
    assert metrics["teacher/logprob"] == pytest.approx(math.log(3 / 32) / 3, abs=1e-6)
    assert metrics["teacher/loss"] == pytest.approx(LN3**2 / 3, abs=1e-6)


def test_a_token_that_the_teacher_cannot_score_leaves_the_denominator(one_rank: ParallelGroups) -> None:
    batch = taught()
    batch.teacher_logprobs[1] = math.nan
    advantages, _ = DistillationAdvantage(of_rewards=own_reward, weight=1.0, reward_weight=1.0)(batch)
    total, denominator, sums = run(one_rank, PLAIN, batch=replace(batch, advantages=advantages))
    # What stays is A1 (-1) and B0 at ratio 0.5, whose advantage is -2 + ln1.5: 0.8 (2 - ln1.5).
    assert total.item() == pytest.approx(-1 + 0.8 * (2 - math.log(1.5)), abs=1e-5)
    assert (denominator.item(), sums["actor/dropped_tokens"].item()) == (2, 1)
    assert advantages.isfinite().all()


def test_with_a_teacher_every_group_with_a_grade_has_a_signal() -> None:
    rewards, groups = torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.tensor([0, 0, 1, 2])
    valid = torch.tensor([True, True, True, False])
    assert informative_groups("teacher", rewards, valid, groups).tolist() == [True, True, False]


# -- the model ---------------------------------------------------------------------------------------


def config_with(folder: Path, **changes: object) -> RLConfig:
    return tiny_config(rl_teacher_load_hf=write_shape(folder / "teacher"), **changes)


def test_its_configuration_is_its_own_shape_in_the_policys_layout(tmp_path: Path) -> None:
    config = config_with(tmp_path, recompute_granularity="selective", rl_rollout_quantization="int8")
    own = teacher_of(config, 1)
    assert (config.model.hidden_size, own.model.hidden_size, own.model.num_layers) == (32, 48, 4)
    assert (own.kernels.recompute_granularity, own.quantization.rl_rollout_quantization) == (None, "none")
    assert own.parallel == config.parallel
    assert not own.wants_teacher


@pytest.mark.parametrize("stays", [False, True])
def test_weights_are_there_while_it_scores_and_the_same_each_time(
    one_rank: ParallelGroups, tmp_path: Path, stays: bool
) -> None:
    config = config_with(tmp_path)
    model = tiny_policy(teacher_of(config, 1), seed=3)
    scorer = Scorer(model, one_rank, 1.0)
    batch = collate(random_samples(3), "cpu")
    expected = scorer.logprobs([batch])[0]
    teacher = Teacher(model, scorer, "here", {"float32": "1"}, stays)
    size = sum(parameter.nbytes for parameter in model.parameters())
    away = size if stays else 0
    for _ in range(2):
        assert sum(storage.nbytes() for storage in teacher.storages) == away
        with teacher.on_device():
            assert sum(storage.nbytes() for storage in teacher.storages) == size
            (found,) = teacher.scored([batch])
        assert torch.equal(found.teacher_logprobs, expected)
    with pytest.raises(RuntimeError, match="out of memory"), teacher.on_device():
        raise RuntimeError("out of memory")
    assert sum(storage.nbytes() for storage in teacher.storages) == away


def test_a_resumed_run_compares_its_teacher(one_rank: ParallelGroups, tmp_path: Path) -> None:
    model = tiny_policy(teacher_of(config_with(tmp_path), 1))
    teacher = Teacher(model, Scorer(model, one_rank, 1.0), "here", {"float32": "1", "bfloat16": "2"}, True)
    assert teacher.state_dict() == {"path": "here", "weights": {"float32": "1", "bfloat16": "2"}}
    teacher.load_state_dict({"path": "there", "weights": {"bfloat16": "2"}})
    for weights in ({"float32": "3", "bfloat16": "2"}, {"float16": "1"}, {}):
        with pytest.raises(CheckpointError, match="here has other weights than the teacher there had when the run"):
            teacher.load_state_dict({"path": "there", "weights": weights})
