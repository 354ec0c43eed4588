"""megatron-core's own dynamic engine, corrected where it would be wrong beside a trainer.

Each class repairs one thing and leaves the rest stock; `build_stock_engine` puts them together.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import torch
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
from megatron.core.inference.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)

from megatron_rl.inference.kv_cache import CacheShape
from megatron_rl.models import PolicyModel
from megatron_rl.platform.megatron import VERSION, inference_flag

PAGE_TOKENS = 64
"""Tokens in a page of the KV buffer; the stock engine pauses a request at every page border."""


class _ZeroedContext(DynamicInferenceContext):
    def allocate_all_tensors(self, *, is_init: bool) -> None:
        """Zeroed: with the garbage of torch.empty a masked cell gives 0 * NaN = NaN."""
        super().allocate_all_tensors(is_init=is_init)
        self.memory_buffer.zero_()

    def initialize_all_tensors(self) -> None:
        """The same under the name that it has from 0.17 on."""
        super().initialize_all_tensors()
        self.memory_buffer.zero_()


class _RealVocabulary(GPTInferenceWrapper):
    """Logits in fp32, and none for the padding of the vocabulary.

    Stock, padding columns are sampled from and count in the log-prob's denominator, and a bf16
    model is sampled from a bf16 softmax.
    """

    def __init__(self, policy: PolicyModel, *settings_and_context: Any) -> None:
        super().__init__(policy.gpt, *settings_and_context)
        self._vocab_size = policy.vocab_size

    def _forward(self, inference_input: dict[str, torch.Tensor | None]) -> torch.Tensor:
        logits = super()._forward(inference_input).float()
        logits[..., self._vocab_size :] = float("-inf")
        return logits


class _SeveralEndTokens(TextGenerationController):
    """Ends a request at any of several tokens; stock, a request knows a single one."""

    def __init__(self, wrapped: GPTInferenceWrapper, is_stop: torch.Tensor) -> None:
        super().__init__(wrapped, _NoText())
        self._is_stop = is_stop

    def _dynamic_step_context_bookkeeping(self) -> dict[str, torch.Tensor]:
        context = self.inference_wrapped_model.inference_context
        active = slice(context.paused_request_count, context.total_request_count)
        drawn = self._sampled_tokens_cuda[: active.stop - active.start]
        # A request ends when it drew its end token, so the end token becomes what it just drew.
        ends = torch.where(self._is_stop[drawn], drawn, -1)
        if VERSION < (0, 18):
            self._request_metadata["termination_id"][active] = ends
        else:
            context.active_request_metadata["termination_id"][: ends.numel()] = ends
        return super()._dynamic_step_context_bookkeeping()


class _NoText:
    """The tokenizer of an engine that is given token ids and asked for token ids."""

    eod = -1
    bos = None

    def detokenize(self, _token_ids: Sequence[int]) -> str:
        return ""


class _NobodyWaits:
    """The event loop of an engine that is stepped by hand.

    The stock engine announces every admission to coroutines that sleep until there is work. We
    have none, and a real loop that never runs would keep the announcements for ever.
    """

    def create_future(self) -> _NobodyWaits:
        return self

    def set_result(self, _result: object) -> None:
        """Also the future of every request."""

    def create_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        coroutine.close()

    def call_soon_threadsafe(self, function: Callable[..., None], *arguments: object) -> None:
        function(*arguments)


class StockEngine(DynamicInferenceEngine):
    """The stock engine without an event loop: `advance` does one step and returns."""

    _loop = _NobodyWaits()

    def advance(self) -> dict[str, Any]:
        """One forward pass over all requests that fit, and its bookkeeping.

        The coroutine only ever yields to let others run (``asyncio.sleep(0)``), so it can be driven
        from inside the rollouter's event loop too; the stock wrapper would start a thread there.
        """
        coroutine = self.async_step()
        with inference_flag():
            while True:
                try:
                    coroutine.send(None)
                except StopIteration as finished:
                    return finished.value

    def reseed(self, seed: int) -> None:
        """Restart the random numbers; stock, they start from ``config.inference_sampling_seed`` once."""
        self.controller.sampling_rng.manual_seed(seed)


def build_stock_engine(
    policy: PolicyModel,
    max_batch_size: int,
    max_sequence_length: int,
    prefill_token_budget: int,
    cache_budget_gb: float | None,
    is_stop: torch.Tensor,
) -> StockEngine:
    """An engine on the training model itself; ``is_stop`` [V] bool marks end tokens.

    Raises:
        EngineError: the budget does not hold one sequence.
    """
    pages = -(-max_sequence_length // PAGE_TOKENS)
    shape = CacheShape.of(policy.gpt, pages * PAGE_TOKENS, policy.dtype)
    requests = shape.slots_within(cache_budget_gb, max_batch_size)
    # Room for every sequence at full length and the page that padding writes to: nothing is ever
    # evicted, and an evicted request would be sampled again from its first token.
    buffer_bytes = shape.bytes_per_slot * requests + shape.bytes_per_slot // pages
    longest_step = max(prefill_token_budget, max_sequence_length, requests)
    sizes = {
        "max_sequence_length": max_sequence_length,
        "buffer_size_gb": buffer_bytes / 2**30,
        "max_requests": requests,
        # Stock rounds the tokens of a step up, also beyond a limit that is not round itself.
        "max_tokens": DynamicInferenceContext.round_up_tokens(longest_step),
        "block_size_tokens": PAGE_TOKENS,
        "materialize_only_last_token_logits": True,
    }
    # Whole prompts only: chunks give wrong prompt log-probs at their borders.
    if VERSION < (0, 17):
        return _engine_of_0_16(policy, shape, sizes, is_stop)
    from megatron.core.inference.config import InferenceConfig

    context = _ZeroedContext(policy.config, InferenceConfig(**sizes, enable_chunked_prefill=False))
    controller = _SeveralEndTokens(_RealVocabulary(policy, context), is_stop)
    with inference_flag():  # which the constructor sets and leaves on
        return StockEngine(controller, context)


def _engine_of_0_16(
    policy: PolicyModel, shape: CacheShape, sizes: dict[str, Any], is_stop: torch.Tensor
) -> StockEngine:
    from megatron.core.inference.model_inference_wrappers.inference_wrapper_config import InferenceWrapperConfig

    tensor_size = policy.config.tensor_model_parallel_size
    context = _ZeroedContext(
        params_dtype=policy.dtype,
        num_layers=shape.layers,
        kv_channels=shape.width,
        num_attention_heads=shape.groups * tensor_size,  # every rank has a group, also of fewer groups than ranks
        tensor_model_parallel_size=tensor_size,
        **sizes,
    )
    wrapper = InferenceWrapperConfig(
        hidden_size=policy.config.hidden_size,
        params_dtype=policy.dtype,
        inference_batch_times_seqlen_threshold=-1,
        padded_vocab_size=policy.padded_vocab_size,
    )
    controller = _SeveralEndTokens(_RealVocabulary(policy, wrapper, context), is_stop)
    return StockEngine(controller, context, random_seed=0, enable_chunked_prefill=False)
