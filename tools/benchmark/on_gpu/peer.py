"""Decode steps beside plain torch: a Hugging Face model of a static batch, captured whole as one CUDA graph.

It stands in for engines that cannot be installed beside this one: the same weights, rows and context, GEMMs by cuBLAS,
attention by torch (flash), no scheduler and no work of the host. Each step picks the likeliest token and writes its
keys over those of the step before, so that all steps attend to ``context`` tokens. Our step does more: it draws at
temperature 1, gives the log-prob of each token, and its time includes the host's read after each burst.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import Qwen2ForCausalLM, StaticCache

from megatron_rl.inference.graphs import CudaRecorder
from megatron_rl.models.gpt import build_model
from megatron_rl.platform.groups import seed_everything
from tools.benchmark.common import Shape, benchmark_config, random_prompts
from tools.benchmark.on_gpu.engines import GRAPHS, PROFILED, decode_rows
from tools.benchmark.on_gpu.measure import Bench, Row, guarded
from tools.benchmark.on_gpu.shapes import BF16, decode_bytes, ratio, roofline_ms
from tools.benchmark.twin import twin_on_device


class LastToken(StaticCache):
    """Keys and values of ``context`` tokens; each new token replaces the last one."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """Store the keys and values of one token, [rows, heads, 1, width]; return those of all tokens."""
        layer = self.layers[layer_idx]
        layer.keys[:, :, -1:] = key_states
        layer.values[:, :, -1:] = value_states
        return layer.keys, layer.values


class Decoding:
    """A static batch: ``step`` decodes one token for each row on buffers that stay where they are."""

    @torch.no_grad()
    def __init__(self, twin: Qwen2ForCausalLM, prompts: torch.Tensor, copies: int) -> None:
        """Read ``prompts``, [prompts, context] token ids, into the cache of ``copies`` rows each."""
        self._twin, context = twin, prompts.shape[1]
        read = twin(prompts, use_cache=True, logits_to_keep=1)
        self._cache = LastToken(config=twin.config, max_cache_len=context)
        for layer, known in zip(self._cache.layers, read.past_key_values.layers, strict=True):
            layer.keys = known.keys.repeat_interleave(copies, 0)
            layer.values = known.values.repeat_interleave(copies, 0)
        self.tokens = prompts[:, -1:].repeat_interleave(copies, 0)
        """[rows, 1] token ids: the last one of the context before a step, the next one after it."""
        self._positions = torch.full_like(self.tokens, context - 1)

    @torch.no_grad()
    def step(self) -> None:
        """Replace ``tokens`` by those that follow. Without a mask the flash kernel attends to all keys."""
        answer = self._twin(
            self.tokens, attention_mask={"full_attention": None}, position_ids=self._positions,
            past_key_values=self._cache, use_cache=True,
        )  # fmt: skip
        self.tokens.copy_(answer.logits.argmax(-1))


def peer(bench: Bench) -> Iterator[Row]:
    """The 0.5B and the 7B in bf16: milliseconds of our step and of plain torch's, and their ratio."""
    for shape in (bench.sizes.small, bench.sizes.middle):
        labels = {"model": shape.name, "format": BF16.name, "graphs": bench.platform.is_cuda}
        yield from guarded(_beside(bench, shape), labels)


def _beside(bench: Bench, shape: Shape) -> Iterator[Row]:
    context = bench.sizes.context
    flags = GRAPHS if bench.platform.is_cuda else ()
    ours = list(decode_rows(bench, shape, BF16, bench.sizes.batches, context, flags))
    bench.forget()
    twin = _twin(bench, shape)
    for row in ours:
        batch = row["batch"]
        distinct = min(batch, bench.sizes.distinct_prompts)
        prompts = torch.tensor(random_prompts(distinct, context, shape.vocab, seed=1), device=bench.device)
        step = _captured(bench, Decoding(twin, prompts, batch // distinct).step)
        theirs = 1e3 * bench.seconds(step, inner=bench.sizes.steps)
        least = roofline_ms(decode_bytes(shape, BF16, batch, context), bench.bandwidth)
        yield {"batch": batch, "context": context, "ours_ms": row["step_ms"], "theirs_ms": theirs,
               "ours_over_theirs": row["step_ms"] / theirs, "theirs_over_roofline": ratio(theirs, least)}  # fmt: skip
        if batch == max(rows["batch"] for rows in ours if rows["batch"] <= PROFILED):
            bench.profile(f"{shape.name} in plain torch, a step of {batch} rows of {context} tokens", step)
        del step
        bench.forget()


def _twin(bench: Bench, shape: Shape) -> Qwen2ForCausalLM:
    seed_everything(1)  # as `open_engine`: the same weights
    config = benchmark_config(shape, bench.sizes.context, "--bf16", *bench.flags)
    return twin_on_device(build_model(config, bench.platform, shape.vocab), bench.sizes.context)


def _captured(bench: Bench, step: Callable[[], None]) -> Callable[[], None]:
    """Return ``step`` as one CUDA graph; itself without CUDA."""
    if not bench.platform.is_cuda:
        return step
    recorder = CudaRecorder(bench.device)
    recorder.warm_up(step)
    return recorder.record(step)
