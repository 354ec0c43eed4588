"""Dynamic batching on the training model: the loop around forward, sampling and bookkeeping.

    submit ──► Scheduler ──admit──► prefill (a prompt once per group) ──► first tokens
                   ▲                                                        │
                   └──release── host read ◄── k decode steps (device only) ◄┘

A decode step is tensor operations from end to end; the host reads once every ``k`` steps which
rows have finished. Slots are refilled as they empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from megatron_rl.attention.sdpa import FEWEST_KEYS, FEWEST_ROWS
from megatron_rl.errors import EngineError
from megatron_rl.inference.context import RolloutContext
from megatron_rl.inference.engine import EngineStatistics
from megatron_rl.inference.kv_cache import CacheShape, SlotCache
from megatron_rl.inference.sampler import SamplingTensors, draw, sample_seed, uniform
from megatron_rl.inference.scheduler import Admission, Scheduler
from megatron_rl.inference.slot_state import SlotState
from megatron_rl.inference.stop_strings import truncate_at_stop
from megatron_rl.models import PolicyModel, RolloutForward
from megatron_rl.types import Completion, FinishReason, GeneratedGroup, GenerationRequest


@dataclass(frozen=True)
class EngineOptions:
    """Sizes of the rollout engine."""

    max_batch_size: int
    max_sequence_length: int
    steps_per_host_read: int = 8
    prefill_token_budget: int = 8192
    cache_budget_gb: float | None = None

    def check(self, request: GenerationRequest) -> None:
        """Refuse what no engine of these sizes can finish.

        Raises:
            EngineError: nothing is asked for, or prompt and answer exceed the maximum sequence length.
        """
        prompt, new = len(request.prompt_ids), request.sampling.max_new_tokens
        if min(prompt, new, request.num_samples) < 1:
            raise EngineError(
                f"task {request.source.task.id!r}: {prompt} prompt tokens, {new} new ones and "
                f"{request.num_samples} samples; each must be at least 1"
            )
        if prompt + new > self.max_sequence_length:
            raise EngineError(
                f"task {request.source.task.id!r}: {prompt} prompt tokens and {new} new ones do not fit "
                f"--inference-max-seq-length {self.max_sequence_length}; raise it, or lower --rl-max-new-tokens"
            )


@dataclass
class _Pending:
    request: GenerationRequest
    completions: dict[int, Completion] = field(default_factory=dict)


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
        self._decode_text = decode_text
        self._stop_ids = frozenset(stop_token_ids)
        self._tensor_group = tensor_group if tensor_group is not None and tensor_group.size() > 1 else None
        # Prefill pads the shortest prompts to FEWEST_KEYS, so the cache must have room for those.
        shape = CacheShape.of(policy.gpt, max(options.max_sequence_length, FEWEST_KEYS), policy.dtype)
        slots = shape.slots_within(options.cache_budget_gb, options.max_batch_size)
        self._cache = SlotCache(shape, slots, policy.dtype, policy.device)
        first_layer = policy.gpt.decoder.layers[0].layer_number
        self._context = RolloutContext(self._cache, policy.rope, first_layer, policy.dtype)
        self._model = RolloutForward(policy, self._context)
        self._state = SlotState(slots, options.max_sequence_length, policy.vocab_size, policy.device)
        self._scheduler = Scheduler(slots, options.prefill_token_budget)
        self._is_stop = torch.zeros(policy.vocab_size, dtype=torch.bool, device=policy.device)
        self._is_stop[list(self._stop_ids)] = True
        self._pending: dict[int, _Pending] = {}
        # What the host knows of each slot without reading the device: both move by one a step.
        self._position = [0] * slots
        self._remaining = [0] * slots
        self.num_slots = slots
        self.begin(seed=0, policy_version=0)

    # -- Engine --------------------------------------------------------------------------------

    def begin(self, seed: int, policy_version: int) -> None:
        """See `Engine.begin`."""
        self.abort()
        self._seed, self._policy_version, self._next_request = seed, policy_version, 0
        self.statistics = EngineStatistics()

    def submit(self, request: GenerationRequest) -> None:
        """See `Engine.submit`.

        Raises:
            EngineError: see `EngineOptions.check`.
        """
        self._options.check(request)
        self._pending[self._next_request] = _Pending(request)
        self._scheduler.add(self._next_request, len(request.prompt_ids), request.num_samples)
        self._next_request += 1

    @property
    def has_unfinished(self) -> bool:
        """See `Engine.has_unfinished`."""
        return bool(self._pending)

    def abort(self) -> None:
        """See `Engine.abort`."""
        self._scheduler.clear()
        self._pending.clear()

    @torch.inference_mode()
    def step(self) -> list[GeneratedGroup]:
        """Seat who fits, decode up to k tokens a row, read once what has finished."""
        admissions = self._scheduler.admit()
        params = [pending.request.sampling for pending in self._pending.values()]
        self._any_greedy = any(p.greedy for p in params)
        self._any_filter = any(p.top_k > 0 or p.top_p < 1.0 for p in params)
        self._any_tempered = any(p.temperature != 1.0 for p in params)
        if admissions:
            self._prefill(admissions)
        if self._scheduler.num_running == 0:
            return []
        self._decode_burst()
        finished = self._collect()
        self._compact()
        return finished

    # -- device work ---------------------------------------------------------------------------

    def _prefill(self, admissions: Sequence[Admission]) -> None:
        requests = [self._pending[a.request].request for a in admissions]
        lengths = [len(r.prompt_ids) for r in requests]
        device, state = self._policy.device, self._state

        def to_device(values: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        seats = [
            (slot, source, sample_index)
            for source, admission in enumerate(admissions)
            for slot, sample_index in zip(admission.slots, admission.samples, strict=True)
        ]
        slots = to_device([slot for slot, _, _ in seats])
        source = to_device([source for _, source, _ in seats])
        borders = [0]
        for length in lengths:
            borders.append(borders[-1] + length)
        positions = to_device([p for length in lengths for p in range(length)])
        self._context.begin_prefill(lengths, to_device(borders, torch.int32), positions, slots, source)
        ids = to_device([token for r in requests for token in r.prompt_ids])
        logits = self._forward(ids, positions).index_select(0, source)
        state.seat(
            slots,
            to_device(lengths).index_select(0, source),
            to_device([self._sample_seed(requests[s], i) for _, s, i in seats]),
            [requests[s].sampling for _, s, _ in seats],
        )
        sampling = self._sampling(slots)
        token, logprob = self._draw(logits, uniform(sampling.seeds, state.position[slots] + 1), sampling)
        state.record(slots, token[None], logprob[None], self._is_stop)
        for slot, source_index, _ in seats:
            self._position[slot] = lengths[source_index]
            self._remaining[slot] = requests[source_index].sampling.max_new_tokens - 1
        self.statistics.prefill_tokens += borders[-1]

    def _decode_burst(self) -> None:
        """Up to k steps on rows ``0 .. n - 1``; the host reads nothing."""
        occupied = self._scheduler.occupied()
        # A few idle rows at the tail keep the arithmetic of the batch's other sizes (see sdpa.py).
        rows = max(self._scheduler.num_rows, min(FEWEST_ROWS, self.num_slots))
        longest = max(self._position[slot] for slot in occupied)
        steps = max(self._remaining[slot] for slot in occupied)
        if steps == 0:  # all ended with their first token
            return
        steps = min(steps, self._steps_per_read())
        positions = self._state.positions_ahead(rows, steps, min(longest + steps, self._cache.shape.max_length))
        sampling = self._sampling(slice(0, rows))
        numbers = uniform(sampling.seeds, positions + 1)
        drawn: list[tuple[torch.Tensor, torch.Tensor]] = []
        token = self._state.token[:rows]
        self._context.begin_decode(positions, min(max(longest + 1, FEWEST_KEYS), self._cache.shape.max_length))
        for step in range(steps):
            if step:
                self._context.begin_step(step)
            logits = self._forward(token, positions[step])
            drawn.append(self._draw(logits, numbers[step], sampling))
            token = drawn[-1][0]
        tokens, logprobs = (torch.stack(column) for column in zip(*drawn, strict=True))
        self._state.record(slice(0, rows), tokens, logprobs, self._is_stop)
        for slot in occupied:
            self._position[slot] += steps
            self._remaining[slot] -= steps
        self.statistics.decode_steps += steps
        self.statistics.decode_rows += steps * rows

    def _forward(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """``[N]`` ids and positions -> ``[rows, V]`` fp32 logits over the real vocabulary."""
        return self._model.forward(token_ids, positions)

    def _steps_per_read(self) -> int:
        """How many steps until the host looks for rows that have ended.

        Looking costs little on a CPU, and rows that have ended are computed until then: there it looks as soon
        as a row in 8 may have ended, going by those that have. Stop strings are looked for in the text, which
        costs more than the rows.
        """
        most, seen = self._options.steps_per_host_read, self.statistics
        if self._policy.device.type != "cpu" or any(p.request.sampling.stop for p in self._pending.values()):
            return most
        if seen.completions == 0:
            return most
        return max(1, min(most, seen.decode_rows // (8 * seen.completions)))

    def _sampling(self, rows: slice | torch.Tensor) -> SamplingTensors:
        return self._state.sampling(rows, self._any_greedy, self._any_filter, self._any_tempered)

    def _draw(
        self, logits: torch.Tensor, numbers: torch.Tensor, sampling: SamplingTensors
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The next tokens [N] and their log-probs, the same on all ranks."""
        token, logprob = draw(logits, numbers, sampling)
        if self._tensor_group is not None:
            # The ranks computed the same logits; if rounding ever made them differ, one draws for
            # all, because ranks that disagree on an end token would wait for each other for ever.
            source = dist.get_global_rank(self._tensor_group, 0)
            dist.broadcast(token, source, group=self._tensor_group)
            dist.broadcast(logprob, source, group=self._tensor_group)
        return token, logprob

    # -- host work -----------------------------------------------------------------------------

    def _collect(self) -> list[GeneratedGroup]:
        """The one host read: which rows have ended, and what they said."""
        rows, state = self._scheduler.num_rows, self._state
        alive, counts = torch.stack((state.alive[:rows].long(), state.count[:rows])).tolist()
        self.statistics.host_reads += 1
        occupied = self._scheduler.occupied()
        watched = [slot for slot in occupied if not alive[slot] or self._request_in(slot).sampling.stop]
        if not watched:
            return []
        longest = max(counts[slot] for slot in watched)
        picked = torch.tensor(watched, device=state.device)
        tokens = state.tokens[picked, :longest].tolist()
        logprobs = state.logprobs[picked, :longest].tolist()
        finished: list[int] = []
        groups: list[GeneratedGroup] = []
        for slot, row_tokens, row_logprobs in zip(watched, tokens, logprobs, strict=True):
            ids, reason = self._ending(slot, row_tokens[: counts[slot]], bool(alive[slot]))
            if reason is None:
                continue
            finished.append(slot)
            completion = Completion(
                tuple(ids), tuple(row_logprobs[: len(ids)]), reason, self._policy_version
            )
            groups.extend(self._deliver(slot, completion))
        if finished:
            self._scheduler.release(finished)
            state.alive[torch.tensor(finished, device=state.device)] = False
        return groups

    def _ending(
        self, slot: int, ids: list[int], alive: bool
    ) -> tuple[list[int], FinishReason | None]:
        """Why the row ended, and its tokens up to there; None while it goes on."""
        stop = self._request_in(slot).sampling.stop
        if stop:
            kept = truncate_at_stop(ids, stop, self._decode_text)
            if kept is not None:
                return ids[:kept], "stop_string"
        if alive:
            return ids, None
        return ids, "stop" if ids[-1] in self._stop_ids else "length"

    def _deliver(self, slot: int, completion: Completion) -> list[GeneratedGroup]:
        """File a completion; the group comes out when its last sample is in."""
        request_id, sample_index = self._scheduler.occupant(slot)
        pending = self._pending[request_id]
        pending.completions[sample_index] = completion
        self.statistics.count_completion(len(completion.token_ids))
        if len(pending.completions) < pending.request.num_samples:
            return []
        del self._pending[request_id]
        ordered = tuple(pending.completions[i] for i in range(pending.request.num_samples))
        return [GeneratedGroup(pending.request, ordered)]

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
        return self._pending[self._scheduler.occupant(slot)[0]].request

    def _sample_seed(self, request: GenerationRequest, sample_index: int) -> int:
        source = request.source
        number = request.first_sample + sample_index
        return sample_seed(self._seed, source.environment, source.task.id, source.epoch, number)
