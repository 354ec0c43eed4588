"""Continuous batching on the training model: a step is schedule ─► run ─► postprocess.

    submit ──► Scheduler ──chunks──► ModelRunner.prefill (a prompt once per group) ──► first tokens
                ▲  ▲                                                                      │
      make_room │  └── free ── OutputProcessor: one host read ◄── k decode steps ◄────────┘

Decode steps are tensor operations only; every ``k`` steps the host reads which sequences have ended. On a GPU the last
steps run while the host processes that read. Free rows are refilled. Scheduler, `BlockManager` and output processor
share the `Sequence` objects, which hold the state of each sample.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from collections.abc import Sequence as ListOf
from dataclasses import replace

import torch

from megatron_rl.arithmetic import FEWEST_KEYS, FEWEST_ROWS
from megatron_rl.inference.batch_state import BatchState, DecodeText, OutputProcessor, PendingFlags
from megatron_rl.inference.context import RolloutContext
from megatron_rl.inference.engine import Engine, EngineLoad, EngineOptions, EngineStatistics
from megatron_rl.inference.graphs import build_graphs, drop_unequal_graphs, possible_graphs
from megatron_rl.inference.guides import Grammars, Guide
from megatron_rl.inference.kv_cache import build_cache
from megatron_rl.inference.model_runner import ModelRunner
from megatron_rl.inference.passes import Passes
from megatron_rl.inference.sampler import Sampler, SamplingModes, fingerprint, sample_seed
from megatron_rl.inference.scheduler import Chunk, Scheduler
from megatron_rl.inference.sequence import Sequence, SequenceGroup, SequenceStatus
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.models.rollout_ops import RolloutOps
from megatron_rl.platform.collectives import OneStage, StageMessages
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.types import Completed, Constraints, Request


class RolloutEngine(Engine):
    """The default `Engine`: continuous batching with a KV cache of rows or of blocks."""

    def __init__(
        self, policy: PolicyModel, options: EngineOptions, stop_token_ids: ListOf[int], decode_text: DecodeText,
        groups: ParallelGroups | None = None, messages: StageMessages | None = None, grammars: Grammars | None = None,
    ) -> None:  # fmt: skip
        """``groups``: None is one rank. ``messages``: to the other pipeline stages, if this is one of their lanes.

        ``grammars`` compile the constraints of requests.
        """
        self._options = options = possible_graphs(options, policy, None if messages else groups)
        self.cache, self._blocks, self.max_batch_size = build_cache(policy, options)
        self.kv_format = self.cache.format
        self._scheduler = Scheduler(
            self.max_batch_size, options.prefill_token_budget, self._blocks, options.decode_steps_per_sync
        )
        is_stop = torch.zeros(policy.vocab_size, dtype=torch.bool, device=policy.device)
        is_stop[list(stop_token_ids)] = True
        paged = policy.attention.cache.layout == "blocks"
        state = BatchState(self.max_batch_size, options.max_sequence_length, is_stop, paged)
        context = RolloutContext(policy, self.cache, RolloutOps(fused=policy.device.type == "cuda"))
        sampler = Sampler(None if groups is None else groups.tensor_group, policy.padded_vocab_size)
        self.runner = ModelRunner(policy, context, state, sampler, messages or OneStage())
        self.runner.graphs = build_graphs(self.runner, policy, options.graphs)
        self._is_staged = messages is not None
        self._lockstep_group = groups.lockstep_group if groups is not None and groups.shares_experts else None
        if self._lockstep_group is not None and not self._is_staged:
            drop_unequal_graphs([self.runner], self.max_batch_size, self._lockstep_group)
        self._outputs = OutputProcessor(state, stop_token_ids, decode_text)
        agrees = self._is_staged or self._lockstep_group is not None  # with others, on every step
        self._overlap_steps = 0 if agrees else _overlap_steps(options, policy.device)
        self._has_pending_steps = False
        """True while decode steps run whose ended rows the host does not know."""
        self._grammars, self._end_ids = grammars, stop_token_ids
        self._groups: dict[int, SequenceGroup] = {}
        self._cancelled: set[int] = set()
        """Calls to drop when the next step begins; a lane of pipeline stages may be within one."""
        self._paused: Generator[None, None, list[Completed]] | None = None
        self.begin(seed=0, policy_version=0)

    # -- a step: schedule, run, postprocess ----------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[Completed]:
        """Draw up to k tokens per row, read once which rows ended; collective over busy expert-parallel ranks."""
        while (complete := self.advance()) is None:
            pass
        return complete

    def advance(self) -> list[Completed] | None:
        """Start or resume a step; return None if it pauses, and the completed requests when it ends."""
        self._paused = self._paused or self._step()
        try:
            next(self._paused)
        except StopIteration as end:
            self._paused = None
            return end.value
        return None

    def _step(self) -> Generator[None, None, list[Completed]]:
        """Do a step; yields while it waits for another pipeline stage."""
        chunks, running, own = self._schedule()
        largest = own if self._lockstep_group is None else own.max_over_ranks(self._lockstep_group)
        decode = own if self.runner.graphs is None else largest  # graphs are replayed by all ranks alike
        overlap = self._overlap(running, decode.steps)
        for sequence in running:
            sequence.num_generated += min(decode.steps, sequence.remaining)
        if not largest.prefills and not largest.steps:
            yield  # no rank has anything here: other lanes go on

        self.runner.context.max_tokens_per_ep_rank = None
        yield from self.runner.prefill(chunks, own.modes)
        yield from self.runner.run_dummy_passes(largest.prefills - own.prefills)
        self.runner.context.max_tokens_per_ep_rank = self._max_tokens_per_ep_rank(largest)
        awaited = decode.steps - overlap
        if awaited:
            yield from self.runner.decode(decode.rows, decode.key_length, awaited, decode.modes)
        yield from self.runner.run_dummy_passes(largest.steps - decode.steps)
        pending = self._outputs.snapshot_flags(running) if running else None
        if overlap:
            yield from self.runner.decode(decode.rows, decode.key_length + awaited, overlap, decode.modes)
        self._has_pending_steps = overlap > 0
        return [] if pending is None else self._postprocess(running, pending)

    def _schedule(self) -> tuple[list[Chunk], list[Sequence], Passes]:
        """Preempt and admit sequences; return the prompt chunks to compute, the sequences to decode, and the passes."""
        self._drop_cancelled()
        preempted = self._scheduler.make_room()
        self._outputs.save(preempted)
        self.statistics.host_reads += len(preempted) > 0
        self.statistics.preemptions += len(preempted)
        chunks = self._scheduler.plan()
        table = self._blocks.changed_table()
        if table is not None:
            self.cache.set_block_table(table)
        for chunk in chunks:
            self.statistics.prefill_tokens += chunk.num_tokens
            self.statistics.reused_tokens += chunk.reused
            for sequence in chunk.sequences if chunk.reused and not chunk.sequences[0].preempted else ():
                sequence.output = replace(sequence.output, cached_tokens=chunk.reused)
            self.statistics.recomputed_tokens += chunk.sequences[0].preempted * chunk.num_tokens
        running = self._scheduler.running
        return chunks, running, self._passes(chunks, running)

    def _passes(self, chunks: ListOf[Chunk], running: ListOf[Sequence]) -> Passes:
        """Plan up to k decode steps of the rows up to the last running one; none if all end with their first token."""
        prefills = len(self.runner.passes(chunks))
        modes = SamplingModes.of(group.request for group in self._groups.values())
        steps = min(max((sequence.remaining for sequence in running), default=0), self._steps_per_read(chunks, running))
        if modes.biased or modes.scored:
            steps = min(steps, self._steps_unread(chunks, running))
        if steps == 0:
            return Passes(prefills, modes=modes)
        # A few idle rows at the tail keep the arithmetic of the batch's other sizes (see arithmetic.py).
        rows = max(running[-1].row + 1, min(FEWEST_ROWS, self.max_batch_size))
        longest = max(sequence.position for sequence in running)
        self.statistics.decode_steps += steps
        self.statistics.decode_rows += steps * rows
        return Passes(prefills, rows, min(max(longest + 1, FEWEST_KEYS), self.cache.max_length), steps, modes)

    @staticmethod
    def _steps_unread(chunks: ListOf[Chunk], running: ListOf[Sequence]) -> int:
        """Return the steps until a bias or score needs a host read; 0 if a first token does."""
        begun = {id(sequence) for chunk in chunks if chunk.is_last for sequence in chunk.sequences}
        left = (s.holds_until(s.num_generated - (id(s) in begun)) - s.num_generated for s in running)
        return min(left, default=0)

    def _max_tokens_per_ep_rank(self, largest: Passes) -> int | None:
        """See `RolloutPlan.max_tokens_per_ep_rank`; with graphs all ranks have the same number."""
        if self._lockstep_group is None:
            return 0 if self._is_staged else None
        return largest.rows if self.runner.graphs is None else 0

    def _drop_cancelled(self) -> None:
        cancelled = [group for group in self._groups.values() if group.request.place.call in self._cancelled]
        self._cancelled.clear()
        for group in cancelled:
            del self._groups[group.number]
        unfinished = [sequence for group in cancelled for sequence in group.open_sequences]
        rows = [sequence.row for sequence in unfinished if sequence.status is not SequenceStatus.WAITING]
        for sequence in unfinished:
            self._scheduler.drop(sequence)
        if rows:
            self.runner.state.mark_idle(rows)

    def _steps_per_read(self, chunks: ListOf[Chunk], running: ListOf[Sequence]) -> int:
        """Return the number of decode steps until the host reads which rows have ended.

        A read is cheap on a CPU, and ended rows are computed until then: there it comes when about 1 in 8 rows may have
        ended, judged by the rate so far. Stop strings are searched in text, which costs more than the rows. Streaming
        requests are read after their first token, and on a CPU with few rows after every token.
        """
        is_calm = self.cache.device.type == "cpu" and len(running) <= FEWEST_ROWS
        begun = (sequence for chunk in chunks if chunk.is_last for sequence in chunk.sequences)
        if any(sequence.request.hints.streams for sequence in (running if is_calm else begun)):
            return 1
        most, seen = self._options.decode_steps_per_sync, self.statistics
        stops = any(group.request.sampling.stop for group in self._groups.values())
        if self.cache.device.type != "cpu" or stops or seen.completions == 0:
            return most
        return max(1, min(most, seen.decode_rows // (8 * seen.completions)))

    def _overlap(self, running: ListOf[Sequence], steps: int) -> int:
        """Return how many of the last ``steps`` run while the host processes the read before them.

        Rows that end in them are found only at the next read. So 0 if all rows end, or few are left, where another
        round of steps costs more than the wait; and 0 if a request needs every read.
        """
        load = self._scheduler.load
        ends = load.running + load.waiting <= FEWEST_ROWS or max((s.remaining for s in running), default=0) <= steps
        if self._overlap_steps == 0 or ends or any(group.needs_every_read for group in self._groups.values()):
            return 0
        return min(self._overlap_steps, steps - 1)

    def _postprocess(self, running: ListOf[Sequence], pending: PendingFlags) -> list[Completed]:
        """Read once, free ended rows and close holes; return the completed requests."""
        self.statistics.host_reads += 1
        finished = self._outputs.finish(running, pending)
        self._read_routing([sequence for sequence in finished if sequence.request.hints.wants_routing])
        self.runner.copy_states([pair for sequence in finished for pair in self._scheduler.free(sequence)])
        for sequence in finished:
            self.statistics.count_completion(sequence.num_drawn)
        complete = [group for group in dict.fromkeys(s.group for s in finished) if not group.open_sequences]
        for group in complete:
            del self._groups[group.number]
        moves, copies = self._scheduler.compact()
        if moves:
            self.runner.move(moves, copies)
        return [group.completed(self._policy_version) for group in complete]

    def _read_routing(self, finished: ListOf[Sequence]) -> None:
        """Read the experts before the rows are reused; the last token was not fed, so it has none."""
        if not finished:
            return
        self.statistics.host_reads += 1
        lengths = [len(sequence.prefill_ids) - 1 for sequence in finished]
        routing = self.cache.routing_of([sequence.row for sequence in finished], lengths)
        for sequence, known in zip(finished, routing, strict=True):
            unknown = known.new_full((1, *known.shape[1:]), torch.iinfo(known.dtype).max)
            sequence.output = replace(sequence.output, routing=torch.cat((known, unknown)))

    # -- what else an `Engine` does ------------------------------------------------------------

    def begin(self, seed: int, policy_version: int) -> None:
        self.abort()
        self.cache.format.begin()
        self._seed, self._policy_version, self._submitted = seed, policy_version, 0
        self.statistics = EngineStatistics()

    def submit(self, request: Request) -> None:
        """See `Engine.submit`.

        Raises:
            EngineError: see `EngineOptions.check`.
            ConfigError: its grammar cannot be compiled.
        """
        self._options.check(request)
        source, place = request.source, request.place
        samples = range(place.first_sample, place.first_sample + request.num_samples)
        key = self._seed, source.environment, source.task.id, source.epoch
        # Conversations of one sample need different random numbers, so later prompts are part of the seed.
        is_own = request.prompt_ids == (source.prompt_ids or request.prompt_ids)
        more = [] if is_own else [fingerprint(request.prompt_ids)]
        more += [place.branch] if place.branch else []
        group = SequenceGroup(self._submitted, request, [sample_seed(*key, sample, *more) for sample in samples])
        if request.sampling.constraints is not None:  # first: a request that is refused leaves nothing behind
            self._constrain(group, request.sampling.constraints)
        if request.hints.top_logprobs:
            self.runner.state.allocate_scores()
        self._groups[group.number] = group
        self._submitted += 1
        for sequence in group.open_sequences:
            self._scheduler.add(sequence)

    def _constrain(self, group: SequenceGroup, constraints: Constraints) -> None:
        matcher = None if self._grammars is None else self._grammars.matcher
        ends = {*self._end_ids, *group.request.sampling.stop_token_ids}
        self.runner.state.allocate_biases(constraints.repetition_penalty != 1)
        for sequence in group.open_sequences:
            vocab_size = self.runner.state.is_stop.numel()
            sequence.guide = Guide(constraints, vocab_size, ends, matcher, group.request.prompt_ids)

    def cancel(self, calls: Collection[int]) -> None:
        self._cancelled.update(calls)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._groups)

    @property
    def expected_tokens(self) -> int:
        """Expected number of tokens of the unfinished requests."""
        requests = [group.request for group in self._groups.values()]
        return sum(r.num_samples * (r.hints.expected_tokens or r.sampling.max_new_tokens) for r in requests)

    @property
    def is_paused(self) -> bool:
        """Return whether a step is paused."""
        return self._paused is not None

    def unfinished_tokens(self, wanted: Callable[[Request], bool]) -> list[tuple[Request, tuple[int, ...]]]:
        running = [] if self._has_pending_steps else self._scheduler.running
        shown = [s for s in running if s.sample == 0 and wanted(s.request)]
        return [(s.request, ids) for s, ids in zip(shown, self._outputs.so_far(shown), strict=True)]

    def load(self) -> EngineLoad:
        return self._scheduler.load

    @torch.inference_mode()
    def interrupt(self) -> list[Request]:
        running, complete = self._scheduler.running, list[Completed]()
        if self._has_pending_steps and running:
            complete = self._postprocess(running, self._outputs.snapshot_flags(running))
            running = self._scheduler.running
        self._outputs.save(running)  # one read: their tokens are on the device alone
        self.statistics.host_reads += len(running) > 0
        for sequence in (sequence for group in self._groups.values() for sequence in group.open_sequences):
            if sequence.num_drawn:
                self.statistics.count_completion(sequence.num_drawn)
        requests = [group.unfinished(self._policy_version) for group in self._groups.values()]
        self.abort()
        return [replace(request, so_far=completions) for request, completions in complete] + requests

    def abort(self) -> None:
        self._scheduler.clear()
        self._groups.clear()
        self._cancelled.clear()
        self._paused = None
        self.runner.reset()

    @property
    def cache_tensors(self) -> list[torch.Tensor]:
        return self.cache.tensors

    def forget_graphs(self) -> None:
        if self.runner.graphs is not None:
            self.runner.graphs.forget()


def _overlap_steps(options: EngineOptions, device: torch.device) -> int:
    """Resolve the option. 0 if preemption or routing needs every token of a sequence on the host."""
    if options.kv_overcommit > 1 or options.records_routing:
        return 0
    if options.overlap_steps is None:
        return options.decode_steps_per_sync // 4 if device.type == "cuda" else 0
    return options.overlap_steps
