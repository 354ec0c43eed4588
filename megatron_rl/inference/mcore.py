"""megatron-core's own dynamic engine behind our protocol: the oracle in tests, the baseline in benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.inference.sampling_params import SamplingParams as StockSamplingParams

from megatron_rl.errors import EngineError
from megatron_rl.inference.engine import EngineStatistics
from megatron_rl.inference.mcore_stock import build_stock_engine
from megatron_rl.inference.options import EngineOptions
from megatron_rl.inference.sampler import sample_seed
from megatron_rl.models import PolicyModel
from megatron_rl.types import Completion, GeneratedGroup, GenerationRequest, SamplingParams


@dataclass
class _Pending:
    request: GenerationRequest
    completions: dict[int, Completion] = field(default_factory=dict)


class McoreEngine:
    """`Engine` by megatron-core's DynamicInferenceEngine on the same GPTModel.

    Every sample is a request of its own, with its own prefill. The draws are a function of the
    seed and of the requests submitted so far; unlike the rollout engine's they also depend on
    what shares the batch, so they change with ``max_batch_size``.
    """

    def __init__(
        self, policy: PolicyModel, options: EngineOptions, stop_token_ids: Sequence[int]
    ) -> None:
        self._options = options
        self._stop_ids = frozenset(stop_token_ids)
        is_stop = torch.zeros(policy.vocab_size, dtype=torch.bool, device=policy.device)
        is_stop[list(self._stop_ids)] = True
        self._stock = build_stock_engine(
            policy,
            options.max_batch_size,
            options.max_sequence_length,
            options.prefill_token_budget,
            options.cache_budget_gb,
            is_stop,
        )
        self.num_slots = self._stock.context.max_requests
        self._pending: dict[int, _Pending] = {}
        # (group, sample index) of every stock request under way
        self._owner: dict[int, tuple[int, int]] = {}
        self.begin(seed=0, policy_version=0)

    def begin(self, seed: int, policy_version: int) -> None:
        """See `Engine.begin`."""
        self.abort()
        self._policy_version, self._draw_key = policy_version, seed
        self._next_group = self._next_request = 0
        self.statistics = EngineStatistics()

    def submit(self, request: GenerationRequest) -> None:
        """See `Engine.submit`.

        Raises:
            EngineError: the request does not fit, or asks for what the stock engine cannot do.
        """
        self._refuse(request)
        source = request.source
        # The tasks are part of the seed, so that data-parallel ranks draw different numbers.
        self._draw_key = sample_seed(self._draw_key, source.environment, source.task.id, source.epoch)
        self._stock.reseed(self._draw_key)
        for sample_index in range(request.num_samples):
            self._owner[self._next_request] = (self._next_group, sample_index)
            self._stock.add_request(
                self._next_request, list(request.prompt_ids), _stock_sampling(request.sampling)
            )
            self._next_request += 1
        self._pending[self._next_group] = _Pending(request)
        self._next_group += 1

    @property
    def has_unfinished(self) -> bool:
        """See `Engine.has_unfinished`."""
        return bool(self._pending)

    def abort(self) -> None:
        """See `Engine.abort`."""
        # Never suspend and resume: the stock engine then goes on with freed end-token storage.
        self._stock.reset()
        self._pending.clear()
        self._owner.clear()

    @property
    def cache_tensors(self) -> list[torch.Tensor]:
        """None: megatron-core's context owns its cache, and keeps it."""
        return []

    def forget_graphs(self) -> None:
        """There are none."""

    @torch.inference_mode()
    def step(self) -> list[GeneratedGroup]:
        """Admit who fits and draw one token for every running sample."""
        if not self._pending:
            return []
        finished = self._stock.advance()["finished_request_records"]
        self._count()
        delivered = [self._deliver(record.merge()) for record in finished]
        return [group for group in delivered if group is not None]

    def _deliver(self, stock_request: Any) -> GeneratedGroup | None:
        """File a finished sample; the group comes out when its last sample is in."""
        group_id, sample_index = self._owner.pop(stock_request.request_id)
        token_ids = tuple(stock_request.generated_tokens)
        pending = self._pending[group_id]
        pending.completions[sample_index] = Completion(
            token_ids=token_ids,
            inference_logprobs=tuple(stock_request.generated_log_probs),
            finish_reason="stop" if token_ids[-1] in self._stop_ids else "length",
            policy_version=self._policy_version,
        )
        self.statistics.count_completion(len(token_ids))
        if len(pending.completions) < pending.request.num_samples:
            return None
        del self._pending[group_id]
        ordered = tuple(pending.completions[i] for i in range(pending.request.num_samples))
        return GeneratedGroup(pending.request, ordered)

    def _count(self) -> None:
        done, padded = self._stock.context.batch_dimensions, self._stock.context.padded_batch_dimensions
        statistics = self.statistics
        statistics.prefill_tokens += done.token_count - done.decode_req_count
        statistics.decode_steps += done.decode_req_count > 0
        statistics.decode_rows += padded.decode_req_count
        statistics.host_reads += 1

    def _refuse(self, request: GenerationRequest) -> None:
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
                "the raw logits, not of what was sampled, and knows no stop strings; leave these flags out, "
                "or use --rl-inference-engine rollout"
            )


def _stock_sampling(sampling: SamplingParams) -> StockSamplingParams:
    """A fresh object for every request: the stock engine writes into it."""
    return StockSamplingParams(
        temperature=1.0,
        top_k=1 if sampling.greedy else 0,
        num_tokens_to_generate=sampling.max_new_tokens,
        return_log_probs=True,
        skip_prompt_log_probs=True,
        termination_id=-1,
    )
