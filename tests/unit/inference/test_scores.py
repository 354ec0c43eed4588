"""Log-probs of the likeliest tokens and of prompts, against the training forward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from megatron_rl.models.gpt import PolicyModel
from megatron_rl.types import Hints, Request
from tests.support.generation import generate, ragged_requests, request, rollout_engine, tokens
from tests.support.hugging_face import packed_logits
from tests.support.scoring import packed
from tests.support.tiny import VOCABULARY


def scored(wanted: Request, top: int, prompt: bool = True) -> Request:
    return replace(wanted, hints=Hints(goes_on=True, top_logprobs=top, scores_prompt=prompt))


@pytest.mark.parametrize(
    "options", [{}, {"prefill_token_budget": 7, "max_batch_size": 2}, {"decode_steps_per_sync": 1, "max_batch_size": 3}]
)
def test_scores_beside_others(policy: PolicyModel, options: dict[str, object]) -> None:
    plain = ragged_requests(4, num_samples=2, max_new_tokens=12)
    prompt = tuple(range(4, 28))
    wanted = [
        scored(request(prompt, 1, 10, max_new_tokens=9), 3),
        scored(request(prompt, 1, 11, max_new_tokens=1, greedy=True), 20),
        scored(request(prompt[:5], 1, 12, max_new_tokens=8, temperature=0.5), 1, prompt=False),
        scored(request(prompt[:1], 1, 13, max_new_tokens=4), 2),
    ]
    alone = generate(policy, rollout_engine(policy, **options), plain)
    both = [each for pair in zip(wanted, plain, strict=True) for each in pair]
    groups = generate(policy, rollout_engine(policy, **options), both)
    assert tokens(groups[1::2]) == tokens(alone)
    assert all(completion.scores == () for group in groups[1::2] for completion in group)
    logits, at = packed_logits(policy, packed(wanted, groups[::2]))[:, :VOCABULARY].float(), 0
    for asked, (completion,) in zip(wanted, groups[::2], strict=True):
        read = len(asked.prompt_ids)
        of_prompt = logits[at : at + read - 1].log_softmax(-1)
        of_answer = logits[at + read - 1 : at + read - 1 + len(completion.token_ids)] / asked.sampling.temperature
        at += read + len(completion.token_ids)
        assert len(completion.prompt_scores) == (read - 1) * asked.hints.scores_prompt
        for score, token, known in zip(completion.prompt_scores, asked.prompt_ids[1:], of_prompt, strict=False):
            _check(score.logprob, score.top, known, token, 20)
        answers = zip(completion.scores, completion.token_ids, of_answer.log_softmax(-1), strict=True)
        for place, (score, token, known) in enumerate(answers):
            assert score.logprob == completion.inference_logprobs[place]
            _check(score.logprob, score.top, known, token, asked.hints.top_logprobs)


def _check(logprob: float, top: tuple[tuple[int, float], ...], known: torch.Tensor, token: int, count: int) -> None:
    assert abs(known[token].item() - logprob) < 1e-5
    values, ids = known.topk(count)
    assert [each for each, _ in top] == ids.tolist()
    assert_close(torch.tensor([value for _, value in top]), values, atol=1e-5, rtol=0)
