"""The parity gate on real rollouts: quiet when trainer and engine agree, and loud, by name, when they do not."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from megatron_rl.algorithms import StepRewards, TokenBatch
from megatron_rl.algorithms.mismatch import mismatch_metrics, mismatch_sums
from megatron_rl.errors import TrainingError
from megatron_rl.models.attention.kv_format import FP8, rounded_attention
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.quantization.rollout import RolloutQuantization
from megatron_rl.trainer.parity import ParityGate, ParityReport, agreement
from megatron_rl.trainer.scoring import Scorer
from tests.support.generation import rollout_engine
from tests.support.quantized import (
    QUANTIZING,
    disturb,
    quantizable_policy,
    roll_out,
    rollout_quantization,
    short_requests,
)
from tests.support.samples import rewards_of
from tests.support.tiny import tiny_config
from tests.support.tokens import changed

NO_LIMITS = {"rl_mismatch_max_kl": 1e9, "rl_mismatch_max_gap": 1e9}


class Case:
    """A tiny model, its quantised copies, an engine and a gate over them."""

    def __init__(
        self, groups: ParallelGroups, recipe: str = "int8", action: str = "warn", correction: str = "token_tis",
        fp8_cache: bool = False, emulated: bool = True, emulation_limit: float = 1e-3, **flags: object,
    ) -> None:  # fmt: skip
        self.policy: PolicyModel = quantizable_policy()
        self.quantization: RolloutQuantization = rollout_quantization(self.policy, recipe)
        self.engine = rollout_engine(self.policy, kv_cache_dtype=FP8 if fp8_cache else None)
        self.scorer = Scorer(self.policy, groups, temperature=1.0)
        rounded = None
        if fp8_cache:
            flags |= {"rl_kv_cache_dtype": "fp8", "rl_rollout_quantization": recipe}
            if emulated:
                layers, numbers = self.policy.gpt.decoder.layers, self.engine.kv_format
                rounded = functools.partial(rounded_attention, layers, numbers)
        self.config = tiny_config(rl_mismatch_action=action, rl_correction=correction, **flags)
        self.gate = ParityGate(self.config, self.scorer, self.quantization, groups.data_group, rounded)
        self.gate.emulation_limit = emulation_limit

    def roll_out(self) -> TokenBatch:
        return roll_out(self.policy, self.engine, self.quantization, short_requests(12))

    def check(self, *batches: TokenBatch, step: StepRewards | None = None) -> ParityReport:
        return self.gate.check([batches or (self.roll_out(),)], step)


class TestAgreement:
    @pytest.mark.parametrize("recipe", QUANTIZING)
    def test_the_trainer_reproduces_every_recipe(self, one_rank: ParallelGroups, recipe: str) -> None:
        report = Case(one_rank, recipe, emulation_limit=1e-4, **NO_LIMITS).check()
        assert report.problems == ()
        assert report.tokens > 50
        assert report.metrics["parity/emulation_gap_max"] < 1e-4
        assert report.metrics["parity/gap_mean"] > 1e-3, "nothing was quantised"
        assert report.metrics["parity/top1_agreement"] < 1
        assert report.metrics["parity/max"] >= report.metrics["parity/p95"] >= 0

    @pytest.mark.parametrize("recipe", QUANTIZING)
    def test_aligned_training_has_no_gap(self, one_rank: ParallelGroups, recipe: str) -> None:
        case = Case(one_rank, recipe)
        with case.quantization.linears.installed():
            report = case.check()
        assert report.problems == ()
        assert report.metrics["parity/max"] < 1e-4
        assert report.metrics["parity/top1_agreement"] == 1.0

    def test_unquantised_rollouts_are_checked_too(self, one_rank: ParallelGroups) -> None:
        report = Case(one_rank, "none").check()
        assert report.problems == ()
        assert report.metrics["parity/max"] < 1e-5
        assert "parity/top1_agreement" not in report.metrics

    def test_the_layers_are_plain_again_after_a_check(self, one_rank: ParallelGroups) -> None:
        case = Case(one_rank)
        batch = case.roll_out()
        case.check(batch)
        assert all("forward" not in layer.module.__dict__ for layer in case.quantization.linears.layers)

    def test_several_micro_batches_are_one_sample(self, one_rank: ParallelGroups) -> None:
        case = Case(one_rank)
        batch = case.roll_out()
        once, twice = case.check(batch), case.check(batch, batch)
        assert twice.tokens == 2 * once.tokens
        assert twice.metrics == pytest.approx(once.metrics, rel=1e-6)

    def test_by_hand(self, one_rank: ParallelGroups) -> None:
        case = Case(one_rank)
        batch = case.roll_out()
        ((scored, _),) = case.scorer.logprobs_and_top([batch])
        batch = replace(batch, inference_logprobs=scored - 0.5 * batch.loss_mask)
        report = case.check(batch)
        k3 = 1.6487213 - 1 - 0.5  # the ratio is e^0.5
        for name, value in (("log_ratio_mean", 0.5), ("gap_mean", 0.5), ("max", 0.5), ("k3_kl", k3), ("p95", 0.5)):
            assert report.metrics[f"parity/{name}"] == pytest.approx(value, rel=1e-4), name
        assert report.metrics["parity/log_ratio_std"] < 1e-3
        assert "KL of rollout and trainer with int8" in report.problems[0]
        assert "--rl-mismatch-max-kl 0.02" in report.problems[0]
        assert "--rl-mismatch-max-gap 0.15" in report.problems[1]

    def test_tokens_of_older_weights_say_nothing(self, one_rank: ParallelGroups) -> None:
        """Half of the tokens are a version older, and are a nat off."""
        case = Case(one_rank)
        batch = case.roll_out()
        older = torch.arange(batch.versions.numel()) % 2 == 0
        step = replace(rewards_of([]), policy_version=1)
        moved = changed(
            batch, versions=(~older).long(), inference_logprobs=batch.inference_logprobs - older * batch.loss_mask
        )
        alone = replace(batch, loss_mask=batch.loss_mask * ~older)
        assert case.check(moved, step=step).metrics == case.check(alone).metrics
        assert case.check(moved).problems != ()

    def test_log_probs_that_are_no_numbers_are_a_problem(self, one_rank: ParallelGroups) -> None:
        case = Case(one_rank)
        batch = case.roll_out()
        poisoned = torch.where(batch.loss_mask > 0, torch.nan, batch.inference_logprobs)
        report = case.check(replace(batch, inference_logprobs=poisoned))
        assert len(report.problems) >= 2


class TestOtherWeights:
    """The mismatch limits are off: what is found is found by comparing copies, or by the emulation."""

    def stale(self, one_rank: ParallelGroups, action: str) -> tuple[Case, ParityReport]:
        case = Case(one_rank, action=action, emulation_limit=1e9, **NO_LIMITS)
        case.roll_out()
        disturb(case.policy, 0.1)  # an update that nobody announced
        return case, case.check()

    def test_stale_copies_are_a_warning(self, one_rank: ParallelGroups, caplog: pytest.LogCaptureFixture) -> None:
        case, report = self.stale(one_rank, "warn")
        assert len(report.problems) == 1
        assert "quantised copies of other weights in 8 layers, layers.0." in report.problems[0]
        with caplog.at_level(logging.WARNING):
            assert case.gate.act_on(report) is False
        assert "copies of other weights" in caplog.text
        assert case.quantization.recipe == "int8"

    def test_or_the_end_of_the_run(self, one_rank: ParallelGroups) -> None:
        case, report = self.stale(one_rank, "stop")
        with pytest.raises(TrainingError, match=r"copies of other weights.*--rl-mismatch-action warn"):
            case.gate.act_on(report)
        assert case.quantization.recipe == "int8"

    def test_or_the_next_safer_recipe_until_there_is_none(self, one_rank: ParallelGroups) -> None:
        case, report = self.stale(one_rank, "fallback")
        for safer in ("int8_smooth", "none"):
            assert case.gate.act_on(report) is True
            assert case.quantization.recipe == safer
            assert case.gate.is_due(7), "the new recipe is not checked"
        with pytest.raises(TrainingError, match="copies of other weights"):
            case.gate.act_on(report)

    def test_announced_updates_are_not_stale(self, one_rank: ParallelGroups) -> None:
        case = Case(one_rank, emulation_limit=1e-4, **NO_LIMITS)
        case.roll_out()
        disturb(case.policy, 0.1)
        case.quantization.weights_changed()
        assert case.check().problems == ()

    def test_one_negated_copy_is_found(self, one_rank: ParallelGroups) -> None:
        case = Case(one_rank, emulation_limit=1e9, **NO_LIMITS)
        case.roll_out()
        layer = case.quantization.linears.layers[3]
        layer.recipe.encode(-layer.module.weight.detach(), layer.weight)
        batch = case.roll_out()
        assert f"in 1 layers, {layer.name} first" in case.check(batch).problems[0]
        assert case.check().problems == ()

    @pytest.mark.parametrize(("apart", "found"), [(0.5, 0), (2.0, 1)])
    def test_where_rounding_differs_the_mismatch_bounds_the_emulation(
        self, one_rank: ParallelGroups, monkeypatch: pytest.MonkeyPatch, apart: float, found: int
    ) -> None:
        """``apart``: the emulation's gap in units of the mismatch."""
        case = Case(one_rank, emulation_limit=0.0, **NO_LIMITS)
        case.gate.rounds_alike = False
        batch = case.roll_out()
        own, drawn = case.scorer.logprobs_and_top([batch]), batch.inference_logprobs
        scored = iter((own, [(drawn + apart * (each - drawn), top) for each, top in own]))
        monkeypatch.setattr(case.scorer, "logprobs_and_top", lambda update: next(scored))
        assert ["another format" in problem for problem in case.check(batch).problems] == [True] * found

    def test_a_broken_forward_pass_has_other_likeliest_tokens(
        self, one_rank: ParallelGroups, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        case = Case(one_rank, emulation_limit=1e9, **NO_LIMITS)
        batch = case.roll_out()
        linears = case.quantization.linears

        def refresh() -> None:
            for layer in linears.layers:
                layer.recipe.encode(-layer.module.weight.detach(), layer.weight)

        honest = case.check(batch).metrics["parity/top1_agreement"]
        monkeypatch.setattr(linears, "refresh", refresh)
        assert case.check(batch).metrics["parity/top1_agreement"] < honest - 0.2

    def test_the_agreement_is_that_of_the_tokens_before(self, one_rank: ParallelGroups) -> None:
        case = Case(one_rank)
        batch = case.roll_out()
        top = torch.zeros_like(batch.samples.token_ids)
        assert agreement([top], [top], [batch], one_rank.data_group) == 1.0
        in_loss = batch.loss_mask > 0
        predicts = torch.zeros_like(in_loss)
        predicts[:-1] = in_loss[1:]
        assert agreement([top], [top + (~predicts).long()], [batch], one_rank.data_group) == 1.0
        assert agreement([top], [top + predicts.long()], [batch], one_rank.data_group) == 0.0
        first = torch.zeros_like(predicts)
        first[predicts.nonzero()[0]] = True
        agreed = agreement([top], [top + first.long()], [batch], one_rank.data_group)
        assert agreed == pytest.approx(1 - 1 / int(in_loss.sum()))


class TestKVCache:
    """An fp8 cache is part of what the trainer repeats: the tight limit stays tight."""

    @pytest.mark.parametrize("recipe", ["none", "int8", "fp8"])
    def test_the_trainer_reproduces_it(self, one_rank: ParallelGroups, recipe: str) -> None:
        report = Case(one_rank, recipe, emulation_limit=1e-4, **NO_LIMITS, fp8_cache=True).check()
        assert report.problems == ()
        assert report.recipe == f"{recipe}, fp8 KV cache"
        assert report.metrics["parity/gap_mean"] > 1e-3, "nothing was rounded"
        assert report.metrics["parity/emulation_gap_max"] < 1e-4
        assert report.lines()[0].startswith(f"parity of rollout ({recipe}, fp8 KV cache) and trainer over")

    def test_without_the_emulation_the_limit_would_be_broken(self, one_rank: ParallelGroups) -> None:
        case = Case(one_rank, "int8", emulation_limit=1e-4, fp8_cache=True, emulated=False, **NO_LIMITS)
        assert "it computed in another format" in case.check().problems[0]

    def test_falling_back_leaves_it_and_the_end_names_it(self, one_rank: ParallelGroups) -> None:
        case = Case(one_rank, "int8", action="fallback", fp8_cache=True, rl_mismatch_max_gap=1e-9)
        report = case.check()
        for safer in ("int8_smooth", "none"):
            assert case.gate.act_on(report) is True
            assert case.quantization.recipe == safer
        assert case.check().recipe == "none, fp8 KV cache"
        with pytest.raises(TrainingError, match="or --rl-kv-cache-dtype auto, or go on"):
            case.gate.act_on(report)


class TestWhen:
    def test_before_the_first_update_of_every_recipe(self, one_rank: ParallelGroups) -> None:
        case = Case(one_rank)
        assert case.gate.is_due(1)
        case.check()
        assert [step for step in range(1, 20) if case.gate.is_due(step)] == []
        case.quantization.fall_back()
        assert case.gate.is_due(5)

    def test_and_at_the_interval(self, one_rank: ParallelGroups) -> None:
        case = Case(one_rank, rl_mismatch_interval=5)
        assert case.gate.is_due(3)
        case.check()
        assert [step for step in range(1, 20) if case.gate.is_due(step)] == [5, 10, 15]

    def test_without_tokens_nothing_has_been_checked(self, one_rank: ParallelGroups) -> None:
        case = Case(one_rank, action="stop", emulation_limit=0.0, rl_mismatch_max_kl=1e-9, rl_mismatch_max_gap=1e-9)
        batch = case.roll_out()
        without_loss = replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
        for report in (case.gate.check([], None), case.gate.check([[], []], None), case.check(without_loss)):
            assert (report.tokens, report.metrics, report.problems) == (0, {}, ())
            assert report.lines() == []
            assert case.gate.act_on(report) is False
            assert case.gate.is_due(2), "no verdict was taken for one"

    def test_the_log_has_both_comparisons(self, one_rank: ParallelGroups) -> None:
        first, second = Case(one_rank).check().lines()
        assert first.startswith("parity of rollout (int8) and trainer over")
        assert "top-1 agreement" in second
        assert len(Case(one_rank, "none").check().lines()) == 1


def corrected(gap: float, left: float) -> Mapping[str, float]:
    """A step's metrics, as far as they are about the correction."""
    return {"rollout_corr/abs_log_ratio_mean": gap, "rollout_corr/residual_gap": left}


class TestCorrections:
    @pytest.mark.parametrize("left", [0.0, 0.01, 0.1, 0.12])
    @pytest.mark.parametrize("action", ["warn", "stop", "fallback"])
    def test_one_that_shrinks_the_gap_or_leaves_it_is_right(
        self, one_rank: ParallelGroups, caplog: pytest.LogCaptureFixture, action: str, left: float
    ) -> None:
        Case(one_rank, action=action).gate.judge_correction(corrected(0.1, left), 1)
        assert [record for record in caplog.records if record.name.endswith("trainer.parity")] == []

    @pytest.mark.parametrize("action", ["stop", "fallback"])
    def test_an_inverted_one_ends_the_run(self, one_rank: ParallelGroups, action: str) -> None:
        with pytest.raises(TrainingError, match=r"--rl-correction token_tis leaves a mean log-prob gap of 0\.2 "):
            Case(one_rank, action=action).gate.judge_correction(corrected(0.1, 0.2), 1)

    def test_or_is_a_warning(self, one_rank: ParallelGroups, caplog: pytest.LogCaptureFixture) -> None:
        Case(one_rank).gate.judge_correction(corrected(0.1, 0.2), 1)
        assert "its weights point the wrong way" in caplog.text

    @pytest.mark.parametrize(("is_exact", "gap"), [(True, 1e-9), (True, 0.0), (False, 1e-9)])
    def test_a_gap_where_the_mode_promises_none_names_the_step(
        self, one_rank: ParallelGroups, caplog: pytest.LogCaptureFixture, is_exact: bool, gap: float
    ) -> None:
        case = Case(one_rank)
        gate = ParityGate(case.config, case.scorer, case.quantization, one_rank.data_group, is_exact=is_exact)
        gate.judge_correction({"training/rollout_logprob_gap_max": gap}, 7)
        told = "step 7: log-probs of rollouts and trainer differ by up to 1e-09" in caplog.text
        assert told == (is_exact and gap > 0)

    def test_rounding_is_no_mismatch(self, one_rank: ParallelGroups) -> None:
        Case(one_rank, action="stop").gate.judge_correction(corrected(1e-7, 5e-6), 1)
        Case(one_rank, action="stop").gate.judge_correction({}, 1)

    def test_weights_of_whole_sequences_are_not_compared_by_token(self, one_rank: ParallelGroups) -> None:
        Case(one_rank, action="stop", correction="sequence_tis").gate.judge_correction(corrected(0.1, 0.9), 1)

    def test_the_metrics_of_inverted_weights_are_those_that_are_found(self, one_rank: ParallelGroups) -> None:
        case = Case(one_rank, action="stop")
        batch = case.roll_out()
        ((scored, _),) = case.scorer.logprobs_and_top([batch])
        for direction in (1.0, -1.0):
            weights = torch.exp(direction * (scored - batch.inference_logprobs)) * batch.loss_mask
            nothing_clipped = torch.zeros_like(batch.in_loss)
            metrics = mismatch_metrics(mismatch_sums(replace(batch, old_logprobs=scored), weights, nothing_clipped))
            if direction > 0:
                case.gate.judge_correction(metrics, 1)
                continue
            with pytest.raises(TrainingError, match="point the wrong way"):
                case.gate.judge_correction(metrics, 1)
