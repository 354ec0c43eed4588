"""Dynamic batching on the training model: the loop around forward, sampling and bookkeeping.

    submit ──► Scheduler ──admit──► prefill (a prompt once per group) ──► first tokens
                   ▲                                                        │
                   └──release── host read ◄── k decode steps (device only) ◄┘

A decode step is tensor operations from end to end; the host reads once every ``k`` steps which
rows have finished. Slots are refilled as they empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron_rl.attention.kv_numbers import KVNumbers
from megatron_rl.attention.product import FEWEST_KEYS, FEWEST_ROWS
from megatron_rl.inference.context import RolloutContext
from megatron_rl.inference.decode import DecodeBurst, Drawer, SamplingKinds
from megatron_rl.inference.engine import EngineStatistics
from megatron_rl.inference.graphs import GraphedDecode, with_graphs
from megatron_rl.inference.harvest import Harvest
from megatron_rl.inference.kv_cache import Cache, CacheShape
from megatron_rl.inference.ledger import Ledger
from megatron_rl.inference.options import EngineOptions
from megatron_rl.inference.paged_cache import PagedCache
from megatron_rl.inference.prefill import Prefill, Prompt
from megatron_rl.inference.sampler import sample_seed
from megatron_rl.inference.scheduler import Admission, Scheduler
from megatron_rl.inference.slot_cache import SlotCache
from megatron_rl.inference.slot_state import SlotState
from megatron_rl.models import PolicyModel, RolloutForward
from megatron_rl.types import Completion, GeneratedGroup, GenerationRequest


class RolloutEngine:
    """The default `Engine`: continuous batching over slots of a contiguous KV cache."""

    def __init__(
        self,
        policy: PolicyModel,
        options: EngineOptions,
        stop_token_ids: Sequence[int],
        decode_text: Callable[[Sequence[int]], str],
        tensor_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._policy = policy
        self._options = options
        # Prefill pads the shortest prompts to FEWEST_KEYS, so the cache must have room for those.
        stored = options.kv_cache_dtype or policy.dtype
        shape = CacheShape.of(policy.gpt, max(options.max_sequence_length, FEWEST_KEYS), stored)
        slots = shape.slots_within(options.cache_budget_gb, options.max_batch_size)
        self._cache = _make_cache(policy, shape, slots, options)
        first_layer = policy.gpt.decoder.layers[0].layer_number
        self._context = RolloutContext(self._cache, policy.attention, policy.rope, first_layer, policy.dtype)
        self._model = RolloutForward(policy, self._context)
        self._state = SlotState(slots, options.max_sequence_length, policy.vocab_size, policy.device)
        self._scheduler = Scheduler(slots, options.prefill_token_budget)
        is_stop = torch.zeros(policy.vocab_size, dtype=torch.bool, device=policy.device)
        is_stop[list(stop_token_ids)] = True
        shared = tensor_group is not None and tensor_group.size() > 1
        drawer = Drawer(self._state, is_stop, tensor_group if shared else None)
        self._prefill = Prefill(self._context, self._cache, self._state, self._model, drawer)
        burst = DecodeBurst(self._context, self._state, self._model, drawer)
        self._decode = with_graphs(burst, self._state, policy, self._cache, options.num_cuda_graphs)
        self._harvest = Harvest(self._state, stop_token_ids, decode_text)
        self._requests = Ledger()
        # What the host knows of each slot without reading the device: both move by one a step.
        self._position = [0] * slots
        self._remaining = [0] * slots
        self.num_slots = slots
        self.begin(seed=0, policy_version=0)

    # -- Engine --------------------------------------------------------------------------------

    def begin(self, seed: int, policy_version: int) -> None:
        """See `Engine.begin`."""
        self.abort()
        self._cache.numbers.begin()
        self._seed, self._policy_version = seed, policy_version
        self.statistics = EngineStatistics()

    def submit(self, request: GenerationRequest) -> None:
        """See `Engine.submit`.

        Raises:
            EngineError: see `EngineOptions.check`.
        """
        self._options.check(request)
        number = self._requests.add(request)
        self._scheduler.add(number, len(request.prompt_ids), request.num_samples)

    @property
    def kv_numbers(self) -> KVNumbers:
        """What the KV cache does to keys and values."""
        return self._cache.numbers

    @property
    def has_unfinished(self) -> bool:
        """See `Engine.has_unfinished`."""
        return len(self._requests) > 0

    def abort(self) -> None:
        """See `Engine.abort`."""
        self._scheduler.clear()
        self._requests.clear()

    @property
    def cache_tensors(self) -> list[torch.Tensor]:
        """See `Engine.cache_tensors`."""
        return [*self._cache.keys, *self._cache.values]

    def forget_graphs(self) -> None:
        """See `Engine.forget_graphs`."""
        if isinstance(self._decode, GraphedDecode):
            self._decode.forget()

    @torch.inference_mode()
    def step(self) -> list[GeneratedGroup]:
        """Seat who fits, decode up to k tokens a row, read once what has finished."""
        admissions = self._scheduler.admit()
        self._kinds = SamplingKinds.of(request.sampling for request in self._requests)
        if admissions:
            self._enter(admissions)
        if self._scheduler.num_running == 0:
            return []
        self._decode_burst()
        finished = self._collect()
        self._compact()
        return finished

    # -- device work ---------------------------------------------------------------------------

    def _enter(self, admissions: Sequence[Admission]) -> None:
        """Prefill the prompts of those who were admitted, each once."""
        prompts = []
        for admission in admissions:
            request = self._requests[admission.request]
            seeds = tuple(self._sample_seed(request, sample) for sample in admission.samples)
            prompts.append(Prompt(request.prompt_ids, admission.slots, seeds, request.sampling))
            for slot in admission.slots:
                self._position[slot] = len(request.prompt_ids)
                self._remaining[slot] = request.sampling.max_new_tokens - 1
        self._prefill(prompts, self._kinds)
        self.statistics.prefill_tokens += sum(len(prompt.token_ids) for prompt in prompts)

    def _decode_burst(self) -> None:
        """Up to k steps on rows ``0 .. n - 1``; the host reads nothing."""
        occupied = self._scheduler.occupied()
        # A few idle rows at the tail keep the arithmetic of the batch's other sizes (see attention/product.py).
        rows = max(self._scheduler.num_rows, min(FEWEST_ROWS, self.num_slots))
        longest = max(self._position[slot] for slot in occupied)
        steps = min(max(self._remaining[slot] for slot in occupied), self._steps_per_read())
        if steps == 0:  # all ended with their first token
            return
        self._decode(rows, min(max(longest + 1, FEWEST_KEYS), self._cache.shape.max_length), steps, self._kinds)
        for slot in occupied:
            self._position[slot] += steps
            self._remaining[slot] -= steps
        self.statistics.decode_steps += steps
        self.statistics.decode_rows += steps * rows

    def _steps_per_read(self) -> int:
        """How many steps until the host looks for rows that have ended.

        Looking costs little on a CPU, and rows that have ended are computed until then: there it looks as soon
        as a row in 16 may have ended, going by those that have. Stop strings are looked for in the text, which
        costs more than the rows.
        """
        most, seen = self._options.steps_per_host_read, self.statistics
        stops = any(request.sampling.stop for request in self._requests)
        if self._policy.device.type != "cpu" or stops or seen.completions == 0:
            return most
        return max(1, min(most, seen.decode_rows // (16 * seen.completions)))

    # -- host work -----------------------------------------------------------------------------

    def _collect(self) -> list[GeneratedGroup]:
        """The one host read; frees the rows that have ended."""
        ended = self._harvest({slot: self._request_in(slot).sampling.stop for slot in self._scheduler.occupied()})
        self.statistics.host_reads += 1
        groups = []
        for row in ended:
            completion = Completion(row.token_ids, row.logprobs, row.reason, self._policy_version)
            self.statistics.count_completion(len(row.token_ids))
            groups.append(self._requests.file(*self._scheduler.occupant(row.slot), completion))
        self._scheduler.release([row.slot for row in ended])
        return [group for group in groups if group is not None]

    def _compact(self) -> None:
        moves = self._scheduler.compaction()
        if not moves:
            return
        source = torch.tensor([a for a, _ in moves], device=self._state.device)
        destination = torch.tensor([b for _, b in moves], device=self._state.device)
        self._state.move(source, destination)
        for old, new in moves:
            self._position[new], self._remaining[new] = self._position[old], self._remaining[old]
        self._cache.move(source, destination, max(self._position[slot] for _, slot in moves))

    def _request_in(self, slot: int) -> GenerationRequest:
        return self._requests[self._scheduler.occupant(slot)[0]]

    def _sample_seed(self, request: GenerationRequest, sample_index: int) -> int:
        source = request.source
        number = request.first_sample + sample_index
        return sample_seed(self._seed, source.environment, source.task.id, source.epoch, number)


def _make_cache(policy: PolicyModel, shape: CacheShape, slots: int, options: EngineOptions) -> Cache:
    numbers = policy.dtype, policy.device, options.kv_cache_dtype
    if policy.attention.cache.layout == "slots":
        return SlotCache(shape, slots, *numbers)
    return PagedCache(shape, slots, options.page_length, *numbers)
