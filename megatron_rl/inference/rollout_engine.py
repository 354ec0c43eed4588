"""Dynamic batching on the training model: the loop around forward, sampling and bookkeeping.

    submit ──► Scheduler ──plan──► prefill (a prompt once per group) ──► first tokens
                 ▲  ▲                                                       │
       make_room │  └──release── host read ◄── k decode steps (device only) ◄┘

A decode step is tensor operations from end to end; the host reads once every ``k`` steps which
rows have finished. Slots are refilled as they empty. The scheduler and its books (`Storage`) know
tokens and positions, never a tensor; `CacheLayout.publish` tells the device what they decided.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from megatron_rl.attention.kv_numbers import KVNumbers
from megatron_rl.attention.product import FEWEST_KEYS, FEWEST_ROWS
from megatron_rl.inference.context import RolloutContext
from megatron_rl.inference.decode import DecodeBurst, Drawer, SamplingKinds
from megatron_rl.inference.engine import EngineStatistics
from megatron_rl.inference.graphs import GraphedDecode, with_graphs
from megatron_rl.inference.harvest import Harvest
from megatron_rl.inference.layout import make_layout
from megatron_rl.inference.ledger import Ledger
from megatron_rl.inference.options import EngineOptions
from megatron_rl.inference.pieces import Piece, Seat
from megatron_rl.inference.prefill import Prefill, Prompt
from megatron_rl.inference.sampler import sample_seed
from megatron_rl.inference.scheduler import Scheduler
from megatron_rl.inference.slot_state import SlotState
from megatron_rl.inference.waiting import FIRST_TURN, LATER_TURN, PREEMPTED, Waiting
from megatron_rl.models import PolicyModel, RolloutForward, ops_for
from megatron_rl.types import Completion, GeneratedGroup, GenerationRequest


class RolloutEngine:
    """The default `Engine`: continuous batching over slots, or pages, of a KV cache."""

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
        self._layout = make_layout(policy, options)
        self._cache, slots = self._layout.cache, self._layout.num_slots
        first_layer = policy.gpt.decoder.layers[0].layer_number
        self._context = RolloutContext(
            self._cache, policy.attention, policy.rope, first_layer, policy.dtype, ops_for(policy.device)
        )
        self._model = RolloutForward(policy, self._context)
        paged = policy.attention.cache.layout == "pages"
        self._state = SlotState(slots, options.max_sequence_length, policy.vocab_size, policy.device, paged)
        self._scheduler = Scheduler(
            slots, options.prefill_token_budget, self._layout.storage, options.steps_per_host_read
        )
        is_stop = torch.zeros(policy.vocab_size, dtype=torch.bool, device=policy.device)
        is_stop[list(stop_token_ids)] = True
        shared = tensor_group is not None and tensor_group.size() > 1
        drawer = Drawer(self._state, is_stop, tensor_group if shared else None)
        self._prefill = Prefill(self._context, self._cache, self._state, self._model, drawer)
        burst = DecodeBurst(self._context, self._state, self._model, drawer)
        self._decode = with_graphs(burst, self._state, policy, self._cache, options.num_cuda_graphs)
        self._harvest = Harvest(self._state, stop_token_ids, decode_text)
        self._requests = Ledger()
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
        new = request.sampling.max_new_tokens
        expected = max(1, min(new, request.expected_tokens or new))
        samples = deque(range(request.num_samples))
        urgency = LATER_TURN if request.turn else FIRST_TURN
        self._scheduler.add(Waiting(number, request.prompt_ids, samples, new, expected, urgency, request.goes_on))

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
        self._state.stop()

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
        self._put_back(self._scheduler.make_room())
        pieces = self._scheduler.plan()
        self._layout.publish()
        self._kinds = SamplingKinds.of(request.sampling for request in self._requests)
        if pieces:
            self._compute(pieces)
        if not self._scheduler.has_running:
            return []
        self._decode_burst()
        finished = self._collect()
        self._compact()
        return finished

    # -- device work ---------------------------------------------------------------------------

    def _compute(self, pieces: Sequence[Piece]) -> None:
        """Prefill, and the first tokens of those whose prompts are complete."""
        prompts = []
        for piece in pieces:
            request = self._requests[piece.request]
            seeds = tuple(self._sample_seed(request, sample) for sample in piece.samples)
            prompts.append(Prompt(piece, seeds, replace(request.sampling, max_new_tokens=piece.most_new)))
            self.statistics.prefill_tokens += piece.end - piece.start
            self.statistics.reused_tokens += piece.reused
            self.statistics.recomputed_tokens += piece.returning * (piece.end - piece.start)
        self._prefill(prompts, self._kinds)

    def _decode_burst(self) -> None:
        """Up to k steps on rows ``0 .. n - 1``; the host reads nothing."""
        running = self._scheduler.running()
        # A few idle rows at the tail keep the arithmetic of the batch's other sizes (see attention/product.py).
        rows = max(self._scheduler.num_rows, min(FEWEST_ROWS, self.num_slots))
        longest = max(seat.position for seat in running)
        steps = min(max(seat.remaining for seat in running), self._steps_per_read())
        if steps == 0:  # all ended with their first token
            return
        self._decode(rows, min(max(longest + 1, FEWEST_KEYS), self._cache.max_length), steps, self._kinds)
        self._scheduler.advance(steps)
        self.statistics.decode_steps += steps
        self.statistics.decode_rows += steps * rows

    def _steps_per_read(self) -> int:
        """How many steps until the host looks for rows that have ended.

        Looking costs little on a CPU, and rows that have ended are computed until then: there it looks as soon
        as a row in 8 may have ended, going by those that have. Stop strings are looked for in the text, which
        costs more than the rows.
        """
        most, seen = self._options.steps_per_host_read, self.statistics
        stops = any(request.sampling.stop for request in self._requests)
        if self._policy.device.type != "cpu" or stops or seen.completions == 0:
            return most
        return max(1, min(most, seen.decode_rows // (8 * seen.completions)))

    # -- host work -----------------------------------------------------------------------------

    def _collect(self) -> list[GeneratedGroup]:
        """The one host read; frees the rows that have ended."""
        watched = {s.slot: self._requests.watch(s.request, s.sample) for s in self._scheduler.running()}
        self.statistics.host_reads += 1
        groups = []
        for row in self._harvest(watched):
            prompt_ids = self._requests[self._scheduler.seat(row.slot).request].prompt_ids
            # The last token was drawn, but not fed.
            seat = self._scheduler.release(row.slot, prompt_ids + row.token_ids[:-1])
            completion = Completion(row.token_ids, row.logprobs, row.reason, self._policy_version)
            self.statistics.count_completion(len(row.token_ids))
            groups.append(self._requests.file(seat.request, seat.sample, completion))
        return [group for group in groups if group is not None]

    def _put_back(self, seats: Sequence[Seat]) -> None:
        """Pre-empted samples keep what they have said, and go on from there when their turn comes again."""
        said = self._harvest.said({seat.slot: seat.drawn for seat in seats})
        self._harvest.stop(list(said))
        self.statistics.host_reads += len(said) > 0
        self.statistics.preemptions += len(said)
        for seat in seats:
            tokens, logprobs = said[seat.slot]
            self._requests.keep(seat.request, seat.sample, tokens, logprobs)
            self._scheduler.add(
                Waiting(
                    seat.request, seat.tokens + tokens, deque([seat.sample]), seat.remaining, seat.remaining,
                    PREEMPTED, seat.goes_on, seat.said,
                )
            )  # fmt: skip

    def _compact(self) -> None:
        moves = self._scheduler.compaction()
        if not moves:
            return
        places = [slot for move in moves for slot in move]
        back = [slot for move in moves for slot in reversed(move)]
        source, destination = (torch.tensor(slots, device=self._state.device) for slots in (places, back))
        self._state.move(source, destination)  # rows change places, so what is idle stays idle
        length = self._scheduler.longest([slot for _, slot in moves])
        self._prefill.copy([self._layout.storage.move(moves, length)])

    def _sample_seed(self, request: GenerationRequest, sample_index: int) -> int:
        source = request.source
        number = request.first_sample + sample_index
        return sample_seed(self._seed, source.environment, source.task.id, source.epoch, number)

