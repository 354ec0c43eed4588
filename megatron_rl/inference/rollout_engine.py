"""Continuous batching on the training model: a step is schedule ─► run ─► postprocess.

    submit ──► Scheduler ──chunks──► ModelRunner.prefill (a prompt once per group) ──► first tokens
                 ▲  ▲                                                                      │
       make_room │  └── free ── OutputProcessor: one host read ◄── k decode steps ◄────────┘

A decode step is tensor operations from end to end; the host reads once every ``k`` steps which sequences have ended.
On a GPU it reads behind the first of these steps, and does the rest of its work while the others run. Rows are filled
again as they become free. Scheduler, `BlockManager` and output processor hold references to the same
`Sequence` objects: where a sample is and what is known of it stands there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from collections.abc import Sequence as ListOf
from dataclasses import replace

import torch

from megatron_rl.arithmetic import FEWEST_KEYS, FEWEST_ROWS
from megatron_rl.inference.batch_state import BatchState, DecodeText, Look, OutputProcessor
from megatron_rl.inference.context import RolloutContext
from megatron_rl.inference.engine import Engine, EngineLoad, EngineOptions, EngineStatistics
from megatron_rl.inference.graphs import drop_unequal_graphs, graphs_of, possible_graphs
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
    """The default `Engine`: continuous batching over a KV cache of rows or of blocks."""

    def __init__(
        self, policy: PolicyModel, options: EngineOptions, stop_token_ids: ListOf[int], decode_text: DecodeText,
        groups: ParallelGroups | None = None, messages: StageMessages | None = None, grammars: Grammars | None = None,
    ) -> None:  # fmt: skip
        """``groups``: None is one rank. ``messages``: to the other pipeline stages, of which this is a lane.

        ``grammars`` are for requests with constraints.
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
        self.runner.graphs = graphs_of(self.runner, policy, options.graphs)
        self._is_staged = messages is not None
        self._lockstep_group = groups.lockstep_group if groups is not None and groups.shares_experts else None
        if self._lockstep_group is not None and not self._is_staged:
            drop_unequal_graphs([self.runner], self.max_batch_size, self._lockstep_group)
        self._outputs = OutputProcessor(state, stop_token_ids, decode_text)
        agrees = self._is_staged or self._lockstep_group is not None  # with others, on every step
        self._steps_not_awaited = 0 if agrees else _steps_not_awaited(options, policy.device)
        self._is_behind = False
        """Of the last steps the host does not know yet which rows ended in them."""
        self._grammars, self._end_ids = grammars, stop_token_ids
        self._groups: dict[int, SequenceGroup] = {}
        self._cancelled: set[int] = set()
        """Calls to be dropped when the next step begins; a lane of pipeline stages may be amid one."""
        self._paused: Generator[None, None, list[Completed]] | None = None
        self.begin(seed=0, policy_version=0)

    # -- a step: schedule, run, postprocess ----------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[Completed]:
        """Admit sequences, draw up to k tokens a row, read once which have ended.

        Collective over the ranks that share experts, while one of them has unfinished requests.
        """
        while (complete := self.advance()) is None:
            pass
        return complete

    def advance(self) -> list[Completed] | None:
        """Begin a step, or go on with it where it paused; None when it pauses, and what is complete when it ends."""
        self._paused = self._paused or self._step()
        try:
            next(self._paused)
        except StopIteration as end:
            self._paused = None
            return end.value
        return None

    def _step(self) -> Generator[None, None, list[Completed]]:
        """Do a step, and pause where another pipeline stage has to work first."""
        chunks, running, own = self._schedule()
        of_all = own if self._lockstep_group is None else own.of_all(self._lockstep_group)
        decode = own if self.runner.graphs is None else of_all  # graphs are replayed by all ranks alike
        behind = self._behind(running, decode.steps)
        for sequence in running:
            sequence.num_generated += min(decode.steps, sequence.remaining)
        if not of_all.prefills and not of_all.steps:
            yield  # no rank has anything here: other lanes go on

        self.runner.context.shared_rows = None
        yield from self.runner.prefill(chunks, own.modes)
        yield from self.runner.join(of_all.prefills - own.prefills)
        self.runner.context.shared_rows = self._shared_rows(of_all)
        awaited = decode.steps - behind
        if awaited:
            yield from self.runner.decode(decode.rows, decode.key_length, awaited, decode.modes)
        yield from self.runner.join(of_all.steps - decode.steps)
        look = self._outputs.look(running) if running else None
        if behind:
            yield from self.runner.decode(decode.rows, decode.key_length + awaited, behind, decode.modes)
        self._is_behind = behind > 0
        return [] if look is None else self._postprocess(running, look)

    def _schedule(self) -> tuple[list[Chunk], list[Sequence], Passes]:
        """Make room and admit sequences; returns what of prompts is computed now, who decodes, and in which passes."""
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
        """Plan up to k decode steps of rows ``0 .. n - 1``, of which the last runs; none where prompts end all."""
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
        """Steps that may pass before the host reads; none where it has to see a first token, which comes before."""
        begun = {id(sequence) for chunk in chunks if chunk.is_last for sequence in chunk.sequences}
        left = (s.holds_until(s.num_generated - (id(s) in begun)) - s.num_generated for s in running)
        return min(left, default=0)

    def _shared_rows(self, of_all: Passes) -> int | None:
        """See `RolloutPlan`: with graphs all ranks have as many."""
        if self._lockstep_group is None:
            return 0 if self._is_staged else None
        return of_all.rows if self.runner.graphs is None else 0

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
            self.runner.state.idle(rows)

    def _steps_per_read(self, chunks: ListOf[Chunk], running: ListOf[Sequence]) -> int:
        """Return how many steps to do until the host looks for rows that have ended.

        Looking costs little on a CPU, and rows that have ended are computed until then: there it looks as soon
        as a row in 8 may have ended, going by those that have. Stop strings are looked for in the text, which
        costs more than the rows. Who reads along gets the first token at once, and on a CPU that is not busy each.
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

    def _behind(self, running: ListOf[Sequence], steps: int) -> int:
        """Return how many of the last of ``steps`` the host does not wait for, so that it plans while they run.

        A row that ends in them is found a burst later. So none where all rows end, and for the last rows of a rollout:
        a burst more, to see that they had ended, would cost more than the wait. And none where the host looks closer.
        """
        load = self._scheduler.load
        ends = load.running + load.waiting <= FEWEST_ROWS or max((s.remaining for s in running), default=0) <= steps
        if self._steps_not_awaited == 0 or ends or any(group.is_awaited for group in self._groups.values()):
            return 0
        return min(self._steps_not_awaited, steps - 1)

    def _postprocess(self, running: ListOf[Sequence], look: Look) -> list[Completed]:
        """Read once, free the rows that have ended and close holes; returns the requests that are complete."""
        self.statistics.host_reads += 1
        finished = self._outputs.finish(running, look)
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
        """Read the experts while the rows still hold them; the last token was not fed, so it has none."""
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
        # A sample may have several conversations: without the prompt they would draw the same numbers.
        is_own = request.prompt_ids == (source.prompt_ids or request.prompt_ids)
        more = [] if is_own else [fingerprint(request.prompt_ids)]
        more += [place.branch] if place.branch else []
        group = SequenceGroup(self._submitted, request, [sample_seed(*key, sample, *more) for sample in samples])
        if request.sampling.constraints is not None:  # first: a request that is refused leaves nothing behind
            self._constrain(group, request.sampling.constraints)
        if request.hints.top_logprobs:
            self.runner.state.make_room_for_scores()
        self._groups[group.number] = group
        self._submitted += 1
        for sequence in group.open_sequences:
            self._scheduler.add(sequence)

    def _constrain(self, group: SequenceGroup, constraints: Constraints) -> None:
        matcher = None if self._grammars is None else self._grammars.matcher
        ends = {*self._end_ids, *group.request.sampling.stop_token_ids}
        self.runner.state.make_room_for_biases(constraints.repetition_penalty != 1)
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
        """Tokens that the unfinished requests will probably draw."""
        requests = [group.request for group in self._groups.values()]
        return sum(r.num_samples * (r.hints.expected_tokens or r.sampling.max_new_tokens) for r in requests)

    @property
    def is_under_way(self) -> bool:
        """Return whether it is amid a step."""
        return self._paused is not None

    def unfinished_tokens(self, wanted: Callable[[Request], bool]) -> list[tuple[Request, tuple[int, ...]]]:
        running = [] if self._is_behind else self._scheduler.running
        shown = [s for s in running if s.sample == 0 and wanted(s.request)]
        return [(s.request, ids) for s, ids in zip(shown, self._outputs.so_far(shown), strict=True)]

    def load(self) -> EngineLoad:
        return self._scheduler.load

    @torch.inference_mode()
    def interrupt(self) -> list[Request]:
        running, complete = self._scheduler.running, list[Completed]()
        if self._is_behind and running:
            complete = self._postprocess(running, self._outputs.look(running))
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


def _steps_not_awaited(options: EngineOptions, device: torch.device) -> int:
    """See `EngineOptions`. To be preempted, or to have its experts read, a sequence must be known to its last token."""
    if options.kv_overcommit > 1 or options.records_routing:
        return 0
    if options.steps_not_awaited is None:
        return options.decode_steps_per_sync // 4 if device.type == "cuda" else 0
    return options.steps_not_awaited
