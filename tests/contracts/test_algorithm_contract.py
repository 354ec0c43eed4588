"""What every advantage, loss and correction must hold to, found by its file or named by a path.

A new file of the library is tested by being there. So are the examples of docs/extending.md, which lie outside.
"""

from __future__ import annotations

import re
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_rl.algorithms import CLIPPED, Terms, TokenBatch
from megatron_rl.algorithms.batch import summed
from megatron_rl.algorithms.extension import Composed, advantage_of, correction_of, level_of, loss_of
from megatron_rl.algorithms.mismatch import mismatch_sums
from megatron_rl.errors import ConfigError
from megatron_rl.registry import ADVANTAGES, CORRECTIONS, FILTERS, LOSSES
from tests.support.tiny import tiny_config
from tests.support.tokens import changed, correction, one_token_a_sample, step_rewards, token_batch

MASK = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0])
SEQUENCE = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2])
MASKED = MASK == 0
DOCS = Path(__file__).parents[2] / "docs" / "extending.md"


@pytest.fixture(scope="module", autouse=True)
def mine(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The examples of the docs as a file outside the library, which is the current directory."""
    parts = re.findall(r"```python\n# mine\.py.*?\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    patch = pytest.MonkeyPatch()
    request.addfinalizer(patch.undo)
    folder = tmp_path_factory.mktemp("outside")
    patch.chdir(folder)
    patch.setattr(sys, "path", list(sys.path))  # which the registry adds the current directory to
    (folder / "mine.py").write_text("".join(parts), encoding="utf-8")
    return folder


def logprobs(seed: int) -> Tensor:
    return -3 * torch.rand(9, generator=torch.Generator().manual_seed(seed))


def run_loss(name: str, current: Tensor, old: Tensor, advantages: Tensor, mask: Tensor = MASK) -> Terms:
    loss = LOSSES.get(name)
    bounds = {"clamp_eps_lower": 0.2, "clamp_eps_upper": 0.28, "dual_clip": 3.0}
    known = {field.name for field in fields(loss)}
    batch = token_batch(SEQUENCE, mask, current_logprobs=current, old_logprobs=old, advantages=advantages)
    return loss(**{option: value for option, value in bounds.items() if option in known})(batch)


@pytest.mark.parametrize("name", [*ADVANTAGES.names(), "mine.py:Bounded"])
class TestAdvantages:
    rewards = torch.tensor([0.0, 1.0, 0.5, 2.0, 3.0, 1.0])
    valid = torch.tensor([True, True, True, True, True, False])
    groups = torch.tensor([0, 0, 0, 1, 1, 2])

    def run(self, name: str, rewards: Tensor, valid: Tensor) -> Tensor:
        found = ADVANTAGES.get(name)
        batch = one_token_a_sample(step_rewards(rewards, valid, self.groups, found.BASELINE))
        return found()(changed(batch, values=torch.full((6,), 0.7)))[0]

    def test_it_says_what_it_compares_with(self, name: str) -> None:
        found = ADVANTAGES.get(name)
        assert found.BASELINE in ("group", "batch", "critic")
        assert (ADVANTAGES.stated(name, "BASELINE") or "group") == found.BASELINE

    def test_shape_dtype_and_detachment(self, name: str) -> None:
        advantages = self.run(name, self.rewards, self.valid)
        assert advantages.shape == (6,)
        assert advantages.dtype == torch.float32
        assert advantages.isfinite().all()
        assert not advantages.requires_grad

    def test_a_higher_reward_in_the_group_has_a_higher_advantage(self, name: str) -> None:
        first, second, third = self.run(name, self.rewards, self.valid)[:3].tolist()
        assert first < third < second

    def test_masked_samples_take_no_part(self, name: str) -> None:
        valid = torch.tensor([True, False, True, True, False, True])
        advantages = self.run(name, self.rewards, valid)
        changed = self.run(name, self.rewards.masked_fill(~valid, torch.nan), valid)
        assert torch.equal(advantages, changed)
        # Masked, or with a baseline of the group alone in it: 0.
        alone = [3, 5] if ADVANTAGES.get(name).BASELINE == "group" else []
        assert advantages[[1, 4, *alone]].tolist() == [0.0] * (2 + len(alone))
        assert advantages[[0, 2]].abs().min() > 0

    def test_advantages_of_the_groups_with_a_signal_add_up_to_nothing(self, name: str) -> None:
        """A baseline that left some of its samples out would move the weights also where nothing is to be learned."""
        if ADVANTAGES.get(name).BASELINE == "critic":  # which may be wrong about all of them
            return
        step = step_rewards(self.rewards, self.valid, self.groups, ADVANTAGES.get(name).BASELINE)
        advantages = self.run(name, self.rewards, self.valid)
        assert advantages[step.informative[self.groups]].sum().item() == pytest.approx(0.0, abs=1e-6)

    def test_equal_rewards_have_no_advantage(self, name: str) -> None:
        if ADVANTAGES.get(name).BASELINE != "critic":
            assert self.run(name, torch.full((6,), 0.1), self.valid).tolist() == [0.0] * 6

    def test_the_host_reads_nothing(self, name: str) -> None:
        step = step_rewards(torch.ones(3), torch.ones(3) > 0, torch.zeros(3).long())
        batch = on_meta(step=step, sample_id=(0, 1, 2), values=torch.empty(9, device="meta"))
        advantages, sums = ADVANTAGES.get(name)()(batch)
        assert advantages.is_meta
        summed(sums)


@pytest.mark.parametrize("name", [*LOSSES.names(), "mine.py:Reinforce"])
class TestLosses:
    def test_shape_dtype_and_sums(self, name: str) -> None:
        per_token, sums = run_loss(name, logprobs(0).requires_grad_(), logprobs(1), torch.randn(9))
        assert per_token.shape == (9,)
        assert per_token.dtype == torch.float32
        assert per_token.requires_grad
        for value in summed(sums).values():
            assert value.shape == ()
            assert not value.requires_grad
        for name_of_sum in ("actor/pg_clipfrac", "actor/pg_clipfrac_lower"):
            assert 0 <= summed(sums).get(name_of_sum, 0.0) <= MASK.sum()

    def test_nothing_passes_at_masked_positions(self, name: str) -> None:
        advantages = torch.randn(9, generator=torch.Generator().manual_seed(2))
        results = []
        for filler in (-1.0, 1e30, -torch.inf, torch.nan):
            current = logprobs(0).masked_fill(MASKED, filler).requires_grad_()
            old = logprobs(1).masked_fill(MASKED, -filler)
            per_token, sums = run_loss(name, current, old, advantages.masked_fill(MASKED, filler))
            per_token.sum().backward()
            assert per_token[MASKED].tolist() == [0.0] * 4
            assert current.grad[MASKED].tolist() == [0.0] * 4
            results.append((per_token.detach(), current.grad, *summed(sums).values()))
        for result in results[1:]:
            assert all(torch.equal(one, first) for one, first in zip(result, results[0], strict=True))

    def test_on_policy_it_is_the_policy_gradient(self, name: str) -> None:
        current = logprobs(0).requires_grad_()
        advantages = torch.tensor([9.0, 1.0, -2.0, 0.0, 9.0, 0.5, -1.0, 9.0, 9.0])
        run_loss(name, current, current.detach().clone(), advantages)[0].sum().backward()
        torch.testing.assert_close(current.grad, -advantages * MASK)

    def test_extreme_ratios_stay_finite(self, name: str) -> None:
        for shift in (-500.0, 500.0):
            current = (logprobs(1) + shift).requires_grad_()
            for advantage in (-1.0, 1.0):
                per_token, _ = run_loss(name, current, logprobs(1), torch.full((9,), advantage))
                (gradient,) = torch.autograd.grad(per_token.sum(), current)
                assert per_token.isfinite().all()
                assert gradient.isfinite().all()

    def test_the_host_reads_nothing(self, name: str) -> None:
        # A meta tensor has no values: a read raises, where on a GPU it would make the host wait.
        nowhere = torch.empty(9, device="meta")
        per_token, sums = LOSSES.get(name)()(on_meta(current_logprobs=nowhere.clone().requires_grad_()))
        per_token.sum().backward()
        summed(sums)

    def test_nothing_to_learn_from_is_no_loss(self, name: str) -> None:
        current = logprobs(0).requires_grad_()
        per_token, _ = run_loss(name, current, logprobs(1), torch.ones(9), torch.zeros(9))
        per_token.sum().backward()
        assert per_token.abs().sum() == 0
        assert current.grad.abs().sum() == 0


def on_meta(**changes: Tensor) -> TokenBatch:
    nowhere = torch.empty(9, device="meta")
    known = {"old_logprobs": nowhere, "inference_logprobs": nowhere, "advantages": nowhere} | changes
    return token_batch(SEQUENCE.to("meta"), nowhere, lengths=(4, 3, 2), **known)


def run_correction(name: str, old: Tensor, inference: Tensor) -> tuple[Tensor, Tensor]:
    """Weights, and which tokens are clipped."""
    batch = token_batch(SEQUENCE, MASK, old_logprobs=old, inference_logprobs=inference)
    weights, sums = correction(name)(batch)
    return weights, sums.get(CLIPPED, torch.zeros_like(batch.in_loss))


@pytest.mark.parametrize(
    "name", [*CORRECTIONS.names(), "mine.py:Close", "+".join([*CORRECTIONS.names(), "mine.py:Close"])]
)
class TestCorrections:
    def test_it_says_what_it_weighs(self, name: str) -> None:
        parts = [CORRECTIONS.get(part) for part in name.split("+")]
        assert all(part.LEVEL in ("token", "sequence") for part in parts)
        of_sequences = any(part.LEVEL == "sequence" for part in parts)
        assert level_of(correction(name)) == ("sequence" if of_sequences else "token")

    def test_weights_are_finite_and_never_negative(self, name: str) -> None:
        weights, clipped = run_correction(name, logprobs(0) + 500 * torch.linspace(-1, 1, 9), logprobs(1))
        assert weights.shape == clipped.shape == (9,)
        assert weights.dtype == torch.float32
        assert clipped.dtype == torch.bool
        assert weights.isfinite().all()
        assert (weights >= 0).all()

    def test_the_host_reads_nothing(self, name: str) -> None:
        batch = on_meta()
        weights, sums = correction(name)(batch)
        clipped = sums.pop(CLIPPED, torch.zeros_like(batch.in_loss))
        assert all(value.is_meta for value in (summed(sums) | mismatch_sums(batch, weights, clipped)).values())

    def test_agreement_has_weight_one(self, name: str) -> None:
        weights, clipped = run_correction(name, logprobs(0), logprobs(0))
        assert torch.equal(weights, MASK)
        assert not clipped.any()

    def test_masked_positions_have_weight_zero(self, name: str) -> None:
        noise = torch.full((9,), torch.nan)
        old = torch.where(MASKED, noise, logprobs(0))
        weights, clipped = run_correction(name, old, torch.where(MASKED, -noise, logprobs(1)))
        assert weights[MASKED].tolist() == [0.0] * 4
        assert not clipped[MASKED].any()
        assert torch.equal(weights, run_correction(name, logprobs(0), logprobs(1))[0])


@pytest.mark.parametrize("name", [*FILTERS.names(), "mine.py:Spread"])
class TestFilters:
    def test_rewards_that_differ_may_count_and_equal_ones_never_do(self, name: str) -> None:
        counts = FILTERS.get(name)()
        assert counts(torch.tensor([0.0, 1.0, 1.0, 0.0])) is True
        for rewards in ([], [1.0], [0.5, 0.5], [0.0] * 8):
            assert counts(torch.tensor(rewards)) is False


class TestOptions:
    """Of extensions, from flags."""

    def test_the_file_of_the_docs_takes_its_options(self) -> None:
        config = tiny_config(
            rl_correction="token_tis+mine.py:Close", rl_correction_args=("cap=3", "nats=0.2"),
            rl_advantage="mine.py:Bounded", rl_advantage_args=("limit=2",),
        )  # fmt: skip
        found = correction_of(config)
        assert isinstance(found, Composed)
        assert [part.cap if hasattr(part, "cap") else part.nats for part in found.parts] == [3.0, 0.2]
        assert advantage_of(config).limit == 2.0

    def test_a_function_will_do(self, mine: Path) -> None:
        (mine / "plain.py").write_text("def double(batch):\n    return 2 * batch.in_loss.float(), {}\n")
        loss = loss_of(tiny_config(rl_policy_loss="plain.py:double"))
        assert loss(token_batch([0, 0], [0, 1]))[0].tolist() == [0.0, 2.0]

    def test_flags_are_options_of_whoever_declares_them(self) -> None:
        loss = loss_of(tiny_config(grpo_clamp_eps_lower=0.1, grpo_clamp_eps_upper=0.3, rl_dual_clip=2.0))
        assert (loss.clamp_eps_lower, loss.clamp_eps_upper, loss.dual_clip) == (0.1, 0.3, 2.0)
        flags = {"rl_correction": "masked_is+veto", "rl_correction_lower": 0.1, "rl_correction_veto": 0.2}
        masked_is, veto = correction_of(tiny_config(**flags)).parts
        assert (masked_is.lower, masked_is.upper, veto.veto) == (0.1, 2.0, 0.2)

    @pytest.mark.parametrize(
        ("flags", "told"),
        [
            ({"rl_policy_loss_args": ("clamp_eps_lowr=0.1",)}, "'clamp_eps_lowr'; did you mean clamp_eps_lower"),
            ({"rl_policy_loss_args": ("clamp_eps_lower=2",)}, "clamp_eps_lower must be at most 1, got 2"),
            ({"rl_policy_loss_args": ("dual_clip=high",)}, "dual_clip is not a number, got 'high'"),
            ({"rl_advantage_args": ("epsilon",)}, "epsilon is not a number, got ''"),
            ({"rl_policy_loss": "mine.py:Reinforc"}, "did you mean Reinforce"),
            ({"rl_policy_loss": "mine.py:Reinforce", "rl_dual_clip": 3}, "'dual_clip' and would ignore --rl-dual-clip"),
            ({"rl_correction": "veto", "rl_correction_lower": 0.5}, "would ignore --rl-correction-lower"),
        ],
    )
    def test_what_cannot_be_is_refused_in_one_line(self, flags: dict[str, object], told: str) -> None:
        config = tiny_config(**flags)
        problems = []
        for chosen in (loss_of, correction_of, advantage_of):
            try:
                chosen(config)
            except ConfigError as error:
                problems += error.lines
        (line,) = problems
        assert told in line
        assert line.startswith("--rl-")
