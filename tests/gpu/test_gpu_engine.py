"""The rollout engine and the trainer on one GPU. Run with: bash tests/run.sh tests/gpu"""

from __future__ import annotations

import inspect

import pytest
import torch

from tests.support.tiny import VOCABULARY, tiny_config, tiny_policy

pytestmark = pytest.mark.gpu


def _engine(policy, graphs=False, **options):
    from megatron_rl.inference.engine import EngineOptions, GraphOptions
    from megatron_rl.inference.rollout_engine import RolloutEngine

    sizes = EngineOptions(16, 48, graphs=GraphOptions(1) if graphs else None, **options)
    return RolloutEngine(policy, sizes, [0], lambda ids, _: " ".join(map(str, ids)))


def _generate(policy, greedy: bool, engine=None):
    from megatron_rl.models.gpt import rollout_mode
    from megatron_rl.types import Request, SamplingParams, SourcedTask, Task

    engine = engine or _engine(policy)
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


@pytest.mark.parametrize("backend", ["sdpa", "triton_paged"])
def test_completions_are_those_of_an_engine_that_waits_for_every_step(one_rank, backend):
    """All steps are one graph of all rows, so that it does not matter when a row is found to have ended."""
    policy = tiny_policy(tiny_config(attention_backend=backend))
    waits, late = (
        {request.index: completions for request, completions in _generate(policy, False, engine)}
        for engine in (_engine(policy, graphs=True, overlap_steps=late) for late in (0, 2))
    )
    assert waits == late


def test_a_read_does_not_wait_for_what_comes_behind_its_look(one_rank):
    from megatron_rl.inference.batch_state import BatchState, OutputProcessor
    from megatron_rl.inference.sequence import SequenceGroup
    from tests.support.generation import request

    state = BatchState(2, 6, torch.zeros(VOCABULARY, dtype=torch.bool, device="cuda"))
    state.alive[1] = True
    state.count[0], state.tokens[0, :2] = 2, 7
    outputs, wide = OutputProcessor(state, (), str), torch.ones(8192, 8192, device="cuda")
    for products in (1, 40):  # with the first, kernels are loaded and memory is pinned
        sequences = SequenceGroup(0, request((4, 9), 2, max_new_tokens=6), [1, 2]).sequences
        for row, sequence in enumerate(sequences):
            sequence.row = row
        torch.cuda.synchronize()
        look = outputs.snapshot_flags(sequences)
        for _ in range(products):
            wide = wide @ wide
        end = torch.cuda.current_stream().record_event()
        assert [one.output_ids for one in outputs.finish(sequences, look)] == [(7, 7)]
    assert not end.query(), "the host has waited for the products"


def test_the_host_waits_for_nothing_between_a_read_and_the_end_of_a_burst(one_rank):
    """torch raises where an operation would wait for the device."""
    policy = tiny_policy()
    engine = _engine(policy)
    _generate(policy, False, engine)  # kernels are compiled

    def strictly(work):
        def watched(*given):
            torch.cuda.set_sync_debug_mode("error")
            try:
                result = work(*given)
                return iter(list(result)) if inspect.isgenerator(result) else result
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return watched

    runner = engine.runner
    for name in ("prefill", "decode", "move"):
        setattr(runner, name, strictly(getattr(runner, name)))
    assert len(_generate(policy, False, engine)) == 6
