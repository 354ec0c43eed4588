"""Answers whose distribution changes token by token: biases by hand, and engine runs against the training forward."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from transformers import RepetitionPenaltyLogitsProcessor

from megatron_rl.inference.engine import EngineOptions
from megatron_rl.inference.guides import UNLIMITED, Guide
from megatron_rl.inference.rollout_engine import RolloutEngine
from megatron_rl.inference.sampler import SamplingTensors, draw, likeliest
from megatron_rl.models.gpt import PolicyModel, rollout_mode
from megatron_rl.platform.groups import current_groups
from megatron_rl.types import Completion, Constraints, Request
from tests.support.generation import (
    END,
    drain_with_pauses,
    generate,
    letters,
    ragged_requests,
    request,
    rollout_engine,
    tokens,
)
from tests.support.hugging_face import packed_logits
from tests.support.scoring import packed
from tests.support.tiny import VOCABULARY

INF = float("inf")


class Alternating:
    """Stands for llguidance: even and odd tokens take turns, and after six of them the answer ends."""

    def __init__(self, grammar: str) -> None:
        assert grammar == "alternating"
        self.num_seen = 0

    def consume_tokens(self, token_ids: Sequence[int]) -> None:
        self.num_seen += len(token_ids)

    def is_error(self) -> bool:
        return False

    def compute_bitmask(self) -> bytes:
        allowed = np.array([allows(self.num_seen, token) for token in range(VOCABULARY)])
        return np.packbits(allowed, bitorder="little").tobytes()


class Grammars:
    """As `inference.guides.Grammars`."""

    matcher = staticmethod(Alternating)


def allows(place: int, token: int) -> bool:
    return token == END if place == 6 else token != END and token % 2 == place % 2


def test_biases_by_hand() -> None:
    penalised = Guide(Constraints(presence_penalty=1.0, frequency_penalty=0.5, logit_bias=((0, 2.0),)), 4, [3])
    assert penalised.bias([]).tolist() == [2.0, 0.0, 0.0, 0.0]
    assert penalised.bias([1]).tolist() == [2.0, -1.5, 0.0, 0.0]
    assert penalised.bias([1, 0, 1]).tolist() == [0.5, -2.0, 0.0, 0.0]
    assert [penalised.holds_until(count) for count in (0, 3)] == [1, 4]
    longer = Guide(Constraints(min_tokens=2), 4, [3])
    assert [longer.bias([0] * count)[3].item() for count in range(3)] == [-INF, -INF, 0.0]
    assert [longer.holds_until(count) for count in range(3)] == [2, 2, UNLIMITED]
    endless = Guide(Constraints(ignores_end=True), 4, [3, 1])
    assert endless.bias([]).tolist() == [0.0, -INF, 0.0, -INF]
    assert endless.is_constant
    stuck = Guide(Constraints(min_tokens=9, logit_bias=((0, -INF), (1, -INF), (2, -INF))), 4, [3])
    assert stuck.bias([]).tolist() == [-INF, -INF, -INF, 0.0], "something can always be drawn"


def test_draws_of_biased_and_floored_rows() -> None:
    """Of .1 .4 .2 .3: with token 1 forbidden 1/6 0 1/3 1/2; with min-p 0.6 tokens 1 and 3, 4/7 and 3/7."""
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log().expand(2, -1)
    seeds = torch.zeros(2, dtype=torch.int64)
    bias = torch.tensor([[0.0, -INF, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    params = SamplingTensors(seeds, bias=bias, min_p=torch.tensor([0.0, 0.6]))
    cases = (0.1, [0, 1], [1 / 6, 4 / 7]), (0.4, [2, 1], [1 / 3, 4 / 7]), (1.0, [3, 3], [1 / 2, 3 / 7])
    for number, wanted, chances in cases:
        token, logprob = draw(logits, torch.full((2,), number), params)
        assert token.tolist() == wanted
        assert_close(logprob, torch.tensor(chances).log())


def test_a_repetition_penalty_is_that_of_transformers() -> None:
    """Over prompt and answer, however often a token is there."""
    logits = torch.randn(2, 6, generator=torch.Generator().manual_seed(1)) * 3
    guide = Guide(Constraints(repetition_penalty=1.7), 6, [5], prompt_ids=(1, 1, 3))
    assert guide.bias(()).tolist() == [0.0] * 6
    assert guide.divisor.tolist() == pytest.approx([1, 1.7, 1, 1.7, 1, 1])
    assert guide.holds_until(4) == 5
    guide.bias((0,))
    guide.bias((0, 3, 0))
    wanted = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[1, 1, 3, 0, 3, 0]]), logits[:1])
    params = SamplingTensors(torch.zeros(2, dtype=torch.int64), divisor=torch.stack([guide.divisor, torch.ones(6)]))
    ids, logprobs = likeliest(logits, params)
    assert_close(logprobs[0], wanted.log_softmax(-1)[0, ids[0]])
    assert_close(logprobs[1], logits[1].log_softmax(-1)[ids[1]])


@pytest.mark.parametrize("options", [{}, {"max_batch_size": 3}, {"decode_steps_per_sync": 1}])
def test_guided_answers_beside_others(policy: PolicyModel, options: dict[str, object]) -> None:
    """Those of the others are the same to the token, and log-probs are those of the masked distribution."""
    plain = ragged_requests(5, num_samples=2, max_new_tokens=14)
    guided = [
        request((5, 7), 2, 10, max_new_tokens=14, constraints=Constraints("alternating")),
        request((5, 7, 1), 1, 11, max_new_tokens=4, constraints=Constraints("alternating")),
        request((2,), 2, 12, max_new_tokens=14, constraints=Constraints(presence_penalty=2.0, frequency_penalty=1.0)),
        request((2, 8), 2, 13, max_new_tokens=14, constraints=Constraints(min_tokens=9)),
        request((4, 4), 2, 14, max_new_tokens=14, constraints=Constraints(ignores_end=True, repetition_penalty=1.5),
                temperature=0.7),
    ]  # fmt: skip
    alone = generate(policy, rollout_engine(policy, **options), plain)
    sizes = EngineOptions(**{"max_batch_size": 8, "max_sequence_length": 48} | options)
    engine = RolloutEngine(policy, sizes, (END,), letters, current_groups(), grammars=Grammars())
    wanted = [wanted for pair in zip(plain, guided, strict=True) for wanted in pair]
    groups = generate(policy, engine, wanted)
    assert tokens(groups[::2]) == tokens(alone)
    spelled, cut, _, longer, endless = groups[1::2]
    for completion in (*spelled, *cut):
        assert all(allows(place, token) for place, token in enumerate(completion.token_ids))
    assert {completion.finish_reason for completion in spelled} == {"stop"}
    assert {completion.finish_reason for completion in cut} == {"length"}
    assert all(END not in completion.token_ids[:9] for completion in longer)
    assert all(len(completion.token_ids) == 14 and END not in completion.token_ids for completion in endless)
    _compare(policy, guided, groups[1::2])


def test_guided_answers_go_on_after_an_interruption(policy: PolicyModel) -> None:
    wanted = [
        request((5, 7), 2, 0, max_new_tokens=14, constraints=Constraints("alternating")),
        request((2,), 2, 1, max_new_tokens=14, constraints=Constraints(
            presence_penalty=2.0, min_tokens=9, repetition_penalty=1.3
        )),
    ]  # fmt: skip
    engine = RolloutEngine(policy, EngineOptions(8, 48), (END,), letters, current_groups(), grammars=Grammars())
    at_once = generate(policy, engine, wanted, seed=3)
    with rollout_mode(policy):
        engine.begin(3, 0)
        for each in wanted:
            engine.submit(each)
        assert tokens(drain_with_pauses(engine, wanted, 3)) == tokens(at_once)


def _compare(policy: PolicyModel, wanted: Sequence[Request], groups: Sequence[Sequence[Completion]]) -> None:
    """Recorded log-probs with those of the training forward's logits, transformers' penalty and each guide's biases."""
    logits, at = packed_logits(policy, packed(wanted, groups))[:, :VOCABULARY].float(), 0
    for asked, group in zip(wanted, groups, strict=True):
        params = asked.sampling
        for completion in group:
            at += len(asked.prompt_ids)
            guide = Guide(params.constraints, VOCABULARY, [END], Alternating)
            for place, (token, logprob) in enumerate(
                zip(completion.token_ids, completion.inference_logprobs, strict=True)
            ):
                penalised = RepetitionPenaltyLogitsProcessor(params.constraints.repetition_penalty)
                seen = torch.tensor([[*asked.prompt_ids, *completion.token_ids[:place]]])
                biased = penalised(seen, logits[at + place - 1][None])[0] + guide.bias(completion.token_ids[:place])
                assert abs((biased / params.temperature).log_softmax(-1)[token].item() - logprob) < 1e-5
            at += len(completion.token_ids)


def test_an_answer_ends_at_token_ids(policy: PolicyModel) -> None:
    (group,) = generate(policy, rollout_engine(policy), [request((4, 9), 6, max_new_tokens=16)])
    ends = {completion.token_ids[5] for completion in group if len(completion.token_ids) > 6}
    assert ends
    cut = generate(policy, rollout_engine(policy), [request((4, 9), 6, max_new_tokens=16, stop_token_ids=tuple(ends))])
    for whole, part in zip(group, cut[0], strict=True):
        last = next((n for n, token in enumerate(whole.token_ids, 1) if token in ends), None)
        assert part.token_ids == whole.token_ids[:last]
        assert part.finish_reason == ("stop" if last else whole.finish_reason)
