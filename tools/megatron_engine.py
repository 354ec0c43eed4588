"""megatron-core's own dynamic engine behind our protocol: the oracle of the tests, a baseline of the benchmark.

The small classes each repair one thing that would be wrong beside a trainer, and leave the rest stock.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from collections.abc import Sequence as ListOf
from typing import Any

import torch
import torch.nn.functional as functional
from megatron.core.inference.contexts import dynamic_context
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
from megatron.core.inference.sampling_params import SamplingParams as StockSamplingParams
from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController

from megatron_rl.errors import EngineError
from megatron_rl.inference.engine import Engine, EngineOptions, EngineStatistics
from megatron_rl.inference.kv_cache import rows_within
from megatron_rl.inference.sampler import sample_seed
from megatron_rl.inference.sequence import Sequence, SequenceGroup
from megatron_rl.models.attention.self_attention import PlannedSelfAttention
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.platform.megatron import VERSION, inference_flag
from megatron_rl.types import Completed, Request

BLOCK_TOKENS = 64
"""Tokens in a block of the KV buffer; the stock engine pauses a request at every border between blocks."""


class McoreEngine(Engine):
    """The engine by megatron-core's DynamicInferenceEngine on the same GPTModel.

    Every sample is a request of its own, with its own prefill. The draws are a function of the seed and of the
    requests submitted so far; unlike the rollout engine's they also depend on what shares the batch, so they change
    with ``max_batch_size``.
    """

    def __init__(self, policy: PolicyModel, options: EngineOptions, stop_token_ids: ListOf[int]) -> None:
        self._options = options
        self._stop_ids = frozenset(stop_token_ids)
        is_stop = torch.zeros(policy.vocab_size, dtype=torch.bool, device=policy.device)
        is_stop[list(self._stop_ids)] = True
        self.stock = _stock_engine(policy, options, is_stop)
        self.max_batch_size = self.stock.context.max_requests
        self._sequences: dict[int, Sequence] = {}
        """By the number of the stock request."""
        self.begin(seed=0, policy_version=0)

    def begin(self, seed: int, policy_version: int) -> None:
        self.abort()
        self._policy_version, self._draw_key = policy_version, seed
        self._submitted = 0
        self.statistics = EngineStatistics()

    def submit(self, request: Request) -> None:
        """See `Engine.submit`.

        Raises:
            EngineError: the request does not fit, or asks for what the stock engine cannot do.
        """
        self._refuse(request)
        source = request.source
        # The tasks are part of the seed, so that data-parallel ranks draw different numbers.
        self._draw_key = sample_seed(self._draw_key, source.environment, source.task.id, source.epoch)
        self.stock.controller.sampling_rng.manual_seed(self._draw_key)
        for sequence in SequenceGroup(0, request, [0] * request.num_samples).sequences:
            self._sequences[self._submitted] = sequence
            sampling = StockSamplingParams(  # fresh for every request: the stock engine writes into it
                temperature=1.0,
                top_k=1 if request.sampling.greedy else 0,
                num_tokens_to_generate=request.sampling.max_new_tokens,
                return_log_probs=True,
                skip_prompt_log_probs=True,
                termination_id=-1,
            )
            self.stock.add_request(self._submitted, list(request.prompt_ids), sampling)
            self._submitted += 1

    @property
    def has_unfinished(self) -> bool:
        return bool(self._sequences)

    def abort(self) -> None:
        # Never suspend and resume: the stock engine then goes on with freed end-token storage.
        self.stock.reset()
        self._sequences.clear()

    @torch.inference_mode()
    def step(self) -> list[Completed]:
        """Admit who fits and draw one token for every running sample."""
        if not self._sequences:
            return []
        records = self.stock.advance()["finished_request_records"]
        done, padded = self.stock.context.batch_dimensions, self.stock.context.padded_batch_dimensions
        self.statistics.prefill_tokens += done.token_count - done.decode_req_count
        self.statistics.decode_steps += done.decode_req_count > 0
        self.statistics.decode_rows += padded.decode_req_count
        self.statistics.host_reads += 1
        completed = []
        for finished in (record.merge() for record in records):
            sequence = self._sequences.pop(finished.request_id)
            sequence.append(tuple(finished.generated_tokens), tuple(finished.generated_log_probs))
            sequence.finish("stop" if sequence.output_ids[-1] in self._stop_ids else "length")
            self.statistics.count_completion(sequence.num_generated)
            if not sequence.group.open_sequences:
                completed.append(sequence.group.completed(self._policy_version))
        return completed

    def _refuse(self, request: Request) -> None:
        self._options.check(request)
        sampling, task = request.sampling, request.source.task.id
        wanted = {
            f"--rl-temperature {sampling.temperature:g}": sampling.temperature != 1.0 and not sampling.greedy,
            f"--rl-top-k {sampling.top_k}": sampling.top_k > 0,
            f"--rl-top-p {sampling.top_p:g}": sampling.top_p < 1.0,
            f"--rl-stop-strings {' '.join(sampling.stop)}": bool(sampling.stop),
        }
        unsupported = [flag for flag, is_set in wanted.items() if is_set]
        if unsupported:
            raise EngineError(
                f"task {task!r} asks for {', '.join(unsupported)}: megatron-core's engine reports log-probs of "
                "the raw logits, not of what was sampled, and knows no stop strings; leave these flags out"
            )


# -- the stock engine, corrected -----------------------------------------------------------------


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

    def detokenize(self, _token_ids: ListOf[int]) -> str:
        return ""


class _NoEventLoop:
    """The stock engine announces every admission to coroutines that sleep until there is work. It is stepped by hand
    here, and a real loop that never runs would keep the announcements for ever."""

    def create_future(self) -> _NoEventLoop:
        return self

    def set_result(self, _result: object) -> None:
        """Resolve the future of every request too."""

    def create_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        coroutine.close()

    def call_soon_threadsafe(self, function: Callable[..., None], *arguments: object) -> None:
        function(*arguments)


class _SteppedEngine(DynamicInferenceEngine):
    """The stock engine without an event loop: `advance` does one step and returns."""

    _loop = _NoEventLoop()

    def advance(self) -> dict[str, Any]:
        """Run one forward pass over all requests that fit, and its bookkeeping.

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


def _stock_engine(policy: PolicyModel, options: EngineOptions, is_stop: torch.Tensor) -> _SteppedEngine:
    """An engine on the training model itself; ``is_stop`` [V] bool marks end tokens.

    Raises:
        EngineError: the budget does not hold one sequence.
    """
    PlannedSelfAttention.flash_decode_and_prefill = _attend_in_plain_torch
    if policy.device.type == "cpu":  # where Triton is installed, its kernel refuses CPU tensors; None does without
        dynamic_context.triton_append_key_value_cache = None
    blocks = -(-options.max_sequence_length // BLOCK_TOKENS)
    length = blocks * BLOCK_TOKENS
    sequence_bytes = policy.layout.cache_numbers(length) * policy.dtype.itemsize
    requests = rows_within(options.cache_budget_gb, sequence_bytes, length, options.max_batch_size)
    sizes = {
        "max_sequence_length": options.max_sequence_length,
        # Room for every sequence at full length and the block that padding writes to: nothing is ever
        # evicted, and an evicted request would be sampled again from its first token.
        "buffer_size_gb": (sequence_bytes * requests + sequence_bytes // blocks) / 2**30,
        "max_requests": requests,
        # Stock rounds the tokens of a step up, also beyond a limit that is not round itself.
        "max_tokens": DynamicInferenceContext.round_up_tokens(
            max(options.prefill_token_budget, options.max_sequence_length, requests)
        ),
        "block_size_tokens": BLOCK_TOKENS,
        "materialize_only_last_token_logits": True,
    }
    # Whole prompts only: chunks give wrong prompt log-probs at their borders.
    if VERSION < (0, 17):
        context, settings = _context_of_0_16(policy, sizes)
        options = {"random_seed": 0, "enable_chunked_prefill": False}
    else:
        from megatron.core.inference.config import InferenceConfig

        config = InferenceConfig(**sizes, enable_chunked_prefill=False)
        context, settings, options = DynamicInferenceContext(policy.config, config), (), {}
    context.memory_buffer.zero_()  # with the garbage of torch.empty a masked place gives 0 * NaN = NaN
    controller = _SeveralEndTokens(_RealVocabulary(policy, *settings, context), is_stop)
    with inference_flag():  # which the constructor sets and leaves on
        return _SteppedEngine(controller, context, **options)


def _context_of_0_16(policy: PolicyModel, sizes: dict[str, Any]) -> tuple[DynamicInferenceContext, tuple[Any]]:
    """The context, and the settings that the wrapper of the model then takes besides."""
    from megatron.core.inference.model_inference_wrappers.inference_wrapper_config import InferenceWrapperConfig

    layers, tensor_size = policy.layout.layers, policy.config.tensor_model_parallel_size
    context = DynamicInferenceContext(
        params_dtype=policy.dtype,
        num_layers=len(layers),
        kv_channels=layers[0].cache.key_width,
        num_attention_heads=layers[0].cache.heads * tensor_size,  # every rank has one, also of fewer than ranks
        tensor_model_parallel_size=tensor_size,
        **sizes,
    )
    settings = InferenceWrapperConfig(
        hidden_size=policy.config.hidden_size,
        params_dtype=policy.dtype,
        inference_batch_times_seqlen_threshold=-1,
        padded_vocab_size=policy.padded_vocab_size,
    )
    return context, (settings,)


def _attend_in_plain_torch(
    _attention: PlannedSelfAttention,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    max_query_length: int,
    max_key_length: int,
    cu_query_lengths: torch.Tensor,
    cu_key_lengths: torch.Tensor,
    key_lengths: torch.Tensor,
    block_table: torch.Tensor,
    is_decode_only: bool,
    softmax_offset: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run the kernel of megatron's own dynamic engine in plain torch: an oracle, not a fast path.

    Caches are paged, ``[pages, page_length, groups, D]``. Reads lengths on the host.
    """
    del softmax_offset  # of attention sinks, which this engine does not take; given from 0.19 on
    page_length = key_cache.shape[1]
    queries = query.reshape(-1, *query.shape[-2:])
    output = torch.zeros_like(queries)
    borders = list(range(queries.shape[0] + 1)) if is_decode_only else cu_query_lengths.tolist()
    for row, length in enumerate(key_lengths.tolist()[: len(borders) - 1]):
        start, end = borders[row], borders[row + 1]
        if end <= start or length == 0:
            continue
        pages = block_table[row, : -(-length // page_length)].long()
        keys = key_cache[pages].flatten(0, 1)[:length].transpose(0, 1)[None]
        values = value_cache[pages].flatten(0, 1)[:length].transpose(0, 1)[None]
        visible = torch.ones(end - start, length, dtype=torch.bool, device=query.device)
        rows = functional.scaled_dot_product_attention(
            queries[start:end].transpose(0, 1)[None],
            keys,
            values,
            attn_mask=visible.tril(length - (end - start)),
            enable_gqa=True,
        )
        output[start:end] = rows[0].transpose(0, 1)
    return output.view(query.shape)
