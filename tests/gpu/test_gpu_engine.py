"""The rollout engine and the trainer on one GPU. Run with: bash tests/run.sh tests/gpu"""

from __future__ import annotations

import pytest
import torch

from tests.support.tiny import VOCABULARY, tiny_config, tiny_policy

pytestmark = pytest.mark.gpu


def _generate(policy, greedy: bool):
    from megatron_rl.inference.engine import EngineOptions
    from megatron_rl.inference.rollout_engine import RolloutEngine
    from megatron_rl.models.gpt import rollout_mode
    from megatron_rl.types import Request, SamplingParams, SourcedTask, Task

    engine = RolloutEngine(policy, EngineOptions(16, 48), [0], lambda ids: " ".join(map(str, ids)))
    engine.begin(seed=3, policy_version=0)
    params = SamplingParams(max_new_tokens=24, greedy=greedy)
    for index in range(6):
        prompt = tuple(1 + (index * 7 + i) % (VOCABULARY - 1) for i in range(3 + index))
        source = SourcedTask("toy", Task(str(index), "unused"))
        engine.submit(Request(source, prompt, 4, params, index))
    groups = []
    with rollout_mode(policy):
        while engine.has_unfinished:
            groups += engine.step()
    return groups


def _trainer_logprobs(policy, groups, one_rank):
    from megatron_rl.trainer.packing import collate
    from megatron_rl.trainer.scoring import Scorer
    from tests.support.samples import make_sample

    samples = [
        make_sample(
            request.prompt_ids + completion.token_ids,
            len(request.prompt_ids),
            inference_logprobs=torch.tensor((0.0,) * len(request.prompt_ids) + completion.inference_logprobs),
        )
        for request, completions in groups
        for completion in completions
    ]
    batch = collate(samples, policy.device)
    scores = Scorer(policy, one_rank, 1.0).logprobs([batch])[0]
    return (scores - batch.inference_logprobs)[batch.loss_mask > 0].abs()


@pytest.mark.parametrize(("bf16", "tolerance"), [(False, 1e-3), (True, 0.15)])
def test_log_probs_of_engine_and_trainer_agree(one_rank, bf16, tolerance):
    """fp32 matrix products on a GPU may use TF32; bf16 rounds activations: the tolerances say so."""
    policy = tiny_policy(tiny_config(bf16=bf16))
    gap = _trainer_logprobs(policy, _generate(policy, greedy=False), one_rank)
    assert gap.max() < tolerance


def test_greedy_decoding_is_the_argmax_of_a_full_forward_pass(one_rank):
    from megatron_rl.models.attention.plan import PackedPlan

    policy = tiny_policy()
    for request, completions in _generate(policy, greedy=True)[:3]:
        ids = torch.tensor(request.prompt_ids + completions[0].token_ids, device=policy.device)
        positions = torch.arange(len(ids), device=policy.device)
        borders = torch.tensor([0, len(ids)], dtype=torch.int32, device=policy.device)
        plan = PackedPlan.build([len(ids)], borders, positions, policy.ropes, policy.dtype, policy.attention.packed)
        with torch.no_grad():
            logits = policy.gpt(ids[None], positions[None], None, packed_seq_params=plan)[0]
        prompt = len(request.prompt_ids)
        best = logits[prompt - 1 : -1, :VOCABULARY].argmax(-1)
        assert best.tolist() == list(completions[0].token_ids)
