"""Latent attention in rollouts: over the latents themselves, or over whole heads, it says what the trainer says."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from megatron_rl.families import LayerKind
from megatron_rl.models.attention.plan import PackedPlan
from megatron_rl.models.blocks import latent as block
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.platform.device import storages_of
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.trainer.parity import ParityGate
from megatron_rl.trainer.scoring import Scorer
from megatron_rl.types import Completion, Request
from tests.support.generation import generate, largest_gap, ragged_requests, randomise_vectors, rollout_engine, tokens
from tests.support.quantized import roll_out, rollout_quantization
from tests.support.scoring import gaps, packed
from tests.support.tape import taped
from tests.support.tiny import LATENT, tiny_config, tiny_policy

KEY = LATENT["kv_lora_rank"] + LATENT["qk_pos_emb_head_dim"]
CLOSE = 1e-5


def latent(**changes: object) -> PolicyModel:
    policy = tiny_policy(tiny_config(**LATENT | changes))
    randomise_vectors(policy)
    return policy


@pytest.fixture(scope="module", params=["sdpa", "paged"])
def policy(request: pytest.FixtureRequest, one_rank: ParallelGroups) -> PolicyModel:
    """Over slots and over pages."""
    return latent(attention_backend=request.param)


def wanted() -> list[Request]:
    """Two samples each of prompts that are prefilled once."""
    return ragged_requests(7, num_samples=2, max_new_tokens=20)


def gap(policy: PolicyModel, groups: ParallelGroups, done: list[tuple[Completion, ...]]) -> float:
    """The largest between trainer and engine."""
    return gaps(policy, groups, packed(wanted(), done), 1.0).max().item()


def test_absorbed_decode_is_the_trainers_forward_pass(policy: PolicyModel, one_rank: ParallelGroups) -> None:
    engine = rollout_engine(policy, max_batch_size=6)
    done = generate(policy, engine, wanted())
    assert gap(policy, one_rank, done) < CLOSE
    for keys, values in zip(engine.cache.keys, engine.cache.values, strict=True):
        assert (keys.shape[-1], values.shape[-1]) == (KEY, LATENT["kv_lora_rank"])
        assert values.data_ptr() == keys.data_ptr(), "values are no memory of their own"
    assert len(storages_of(engine.cache.tensors)) == policy.config.num_layers


def test_whole_heads_in_the_cache_say_the_same(policy: PolicyModel, one_rank: ParallelGroups) -> None:
    plain = latent(attention_backend=policy.attention.cache_name, rl_mla_absorb=False, no_rl_mla_absorb=True)
    engine = rollout_engine(plain, max_batch_size=6)
    done = generate(plain, engine, wanted())
    assert gap(plain, one_rank, done) < CLOSE
    heads = LATENT["qk_head_dim"] + LATENT["qk_pos_emb_head_dim"], LATENT["v_head_dim"]
    assert (engine.cache.keys[0].shape[-1], engine.cache.values[0].shape[-1]) == heads
    absorbed = generate(policy, rollout_engine(policy, max_batch_size=6), wanted())
    assert tokens(absorbed) == tokens(done)
    assert largest_gap(absorbed, done) < CLOSE


def test_prompts_that_go_on_from_the_cache(policy: PolicyModel) -> None:
    """Several tokens at a time that attend to latents of others: by prefixes that are reused, and in small parts."""
    whole = generate(policy, rollout_engine(policy, prefix_reuse=False), wanted())
    engine = rollout_engine(policy, prefill_token_budget=4)
    for _ in range(2):
        again = generate(policy, engine, wanted())
        assert tokens(again) == tokens(whole)
        assert largest_gap(again, whole) < CLOSE


def test_replays_of_a_decode_step_draw_the_same(policy: PolicyModel) -> None:
    eager = generate(policy, rollout_engine(policy), wanted())
    engine = rollout_engine(policy)
    recorder = taped(engine, policy, (4, 8))
    done = generate(policy, engine, wanted())
    assert recorder.replayed == engine.statistics.decode_steps > 0
    assert tokens(done) == tokens(eager)
    assert largest_gap(done, eager) < CLOSE



class Absorption:
    """A model, its rollout, and what the mismatch check says of the two ways to compute attention."""

    def __init__(self, groups: ParallelGroups, recipe: str = "none", **changes: object) -> None:
        config = tiny_config(**LATENT | changes)
        self.policy = latent(**changes)
        quantization = rollout_quantization(self.policy, recipe)
        self.batch = roll_out(self.policy, rollout_engine(self.policy), quantization, wanted())
        self.scorer = Scorer(self.policy, groups, 1.0)
        absorbed = partial(block.absorbed_attention, self.policy.layers)
        self.gate = ParityGate(config, self.scorer, quantization, groups.data_group, absorbed=absorbed)

    def measured(self) -> dict[str, float]:
        """The metrics of the check."""
        return self.gate.check([[self.batch]], None).metrics

    def logprobs(self) -> torch.Tensor:
        """The trainer's, of the sampled tokens."""
        (logprobs,) = self.scorer.logprobs([self.batch])
        return logprobs[self.batch.in_loss]


def absorbed_by_hand(policy: PolicyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the trainer's attention: sequence by sequence over latents, whatever heads it is given."""
    attentions = {layer.layer_number: layer.self_attention for layer in policy.layers}
    latents: dict[int, torch.Tensor] = {}
    for number, attention in attentions.items():
        attention.kv_layernorm.register_forward_hook(lambda *seen, at=number: latents.update({at: seen[-1][:, 0]}))

    def attend(
        plan: PackedPlan, layer: int, query: torch.Tensor, key: torch.Tensor, _: torch.Tensor, kind: LayerKind
    ) -> torch.Tensor:
        whole, width = LATENT["qk_head_dim"], query.shape[-1]
        weight = attentions[layer].linear_kv_up_proj.weight.unflatten(0, (4, -1))
        found = []
        for c, q, k in zip(*(x.split(plan.lengths) for x in (latents[layer], query[:, 0], key[:, 0])), strict=True):
            of_latents = torch.einsum("qhd,hdc->hqc", q[..., :whole], weight[:, :whole]) @ c.T
            of_positions = torch.einsum("qhd,kd->hqk", q[..., whole:], k[:, 0, whole:])
            scores = (of_latents + of_positions).float() / width**0.5
            scores += torch.full_like(scores, float("-inf")).triu(1)
            means = scores.softmax(-1).to(c.dtype) @ c
            found.append(torch.einsum("hqc,hdc->qhd", means, weight[:, whole:]).flatten(1))
        return torch.cat(found)[:, None]

    monkeypatch.setattr(PackedPlan, "attend", attend)


def test_absorption_in_fp32_is_rounding_alone(one_rank: ParallelGroups, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Absorption(one_rank)
    assert case.measured()["parity/absorption_gap_max"] < CLOSE
    whole = case.logprobs()
    absorbed_by_hand(case.policy, monkeypatch)
    assert (case.logprobs() - whole).abs().max() < CLOSE


def test_the_mismatch_of_absorption_in_bf16(one_rank: ParallelGroups, monkeypatch: pytest.MonkeyPatch) -> None:
    """About that of the same written out, and about all that engine and trainer differ by."""
    case = Absorption(one_rank, bf16=True)
    metrics, whole = case.measured(), case.logprobs()
    assert metrics["parity/absorption_gap_max"] > metrics["parity/absorption_gap_mean"] > 1e-3
    absorbed_by_hand(case.policy, monkeypatch)
    by_hand = (case.logprobs() - whole).abs().mean().item()
    assert metrics["parity/absorption_gap_mean"] == pytest.approx(by_hand, rel=0.4)
    assert metrics["parity/absorption_gap_mean"] == pytest.approx(metrics["parity/gap_mean"], rel=0.4)


def test_quantized_rollouts_are_repeated_absorbed(one_rank: ParallelGroups) -> None:
    """With whole heads the gap would be 1.6e-3: other last bits are rounded to other codes."""
    metrics = Absorption(one_rank, "int8").measured()
    assert metrics["parity/emulation_gap_max"] < CLOSE < 0.01 < metrics["parity/max"]


def test_a_wrong_absorption_is_seen(one_rank: ParallelGroups, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next row of the expansion in place of each, in the check alone: the rollout was right."""
    case, honest = Absorption(one_rank, bf16=True), block.effective_operands

    def moved(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        weight, kept = honest(*given)
        return weight.roll(1, 0), kept

    monkeypatch.setattr(block, "effective_operands", moved)
    metrics = case.measured()
    assert metrics["parity/gap_mean"] < 0.05 < 0.5 < metrics["parity/absorption_gap_mean"]
