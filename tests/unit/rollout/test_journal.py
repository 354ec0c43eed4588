"""The rollout journal: what it gives back, and what it refuses to."""

from __future__ import annotations

import contextlib
import errno
import gc
import resource
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.inference.staged import StagedRouting
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.rollout.journal import RolloutJournal, StepJournal
from megatron_rl.types import (
    Branch,
    Completion,
    Grade,
    Hints,
    Request,
    Rollout,
    RolloutGroup,
    SamplingParams,
    SourcedTask,
    Task,
)

HEADER = {"seed": 7, "weights": 2**62, "sampling": {"stop": ("a",)}}
STEP = 13


def request(index: int, task: str = "t", num_samples: int = 2, prompt: tuple[int, ...] = (1, 2)) -> Request:
    source = SourcedTask("toy", Task(f"{task}{index}", "ab"), epoch=1)
    return Request(source, prompt, num_samples, SamplingParams(), index)


def group(index: int) -> RolloutGroup:
    """Two samples, one of them a conversation whose grade failed; log-probs as fp32 gives them."""
    logprobs = tuple((torch.arange(1, 6) / -3.0).tolist())
    talk = Completion((5, 0, 7, 8, 70000), logprobs, "length", 3, ((2, 4),))
    plain = Completion((index, 0), logprobs[:2], "stop", 3, cached_tokens=1)
    failed = Grade(None, code="worker_died", message="twice")
    good = Grade(0.1, {"calls": 2.0}, status="correct", extracted="12", correct=True)
    return RolloutGroup(request(index).source, (1, 2), (Rollout(talk, "", failed), Rollout(plain, "", good)))


@pytest.fixture
def journal(tmp_path: Path, one_rank: ParallelGroups) -> RolloutJournal:
    return RolloutJournal(tmp_path, one_rank)


def record(journal: RolloutJournal, *indices: int, header: dict = HEADER) -> None:
    step = journal.open(STEP, header)
    for index in indices:
        step.add(index, group(index))
    step.close()


def test_groups_come_back_as_they_were(journal: RolloutJournal) -> None:
    record(journal, 3, 0)
    again = journal.open(STEP, HEADER)
    assert again.group_for(request(0)) == group(0)
    assert again.group_for(request(3)) == group(3)
    assert again.group_for(request(3)).rollouts[1].completion.cached_tokens == 0, "which says nothing of the answer"
    assert again.group_for(request(1)) is None
    again.add(1, group(1))
    again.close()
    assert journal.open(STEP, HEADER).group_for(request(1)) == group(1)


def branched(routing: bool = False) -> RolloutGroup:
    """Two samples of a harness, the first of two sequences; perhaps with experts, one byte each."""

    def drawn(*ids: int, prompt: int) -> Completion:
        experts = torch.randint(0, 99, (prompt + len(ids), 3, 2), dtype=torch.uint8) if routing else None
        return Completion(ids, (-0.5,) * len(ids), "stop", 3, routing=experts)

    branches = (Branch((9, 8, 5), drawn(7, 70000, prompt=3)), Branch((4,), drawn(6, prompt=1)))
    tree = Rollout(drawn(5, 6, prompt=2), "", Grade(1.0), (9, 8), branches)
    return RolloutGroup(request(0).source, (1, 2), (tree, Rollout(drawn(1, prompt=1), "", Grade(0.0), (3,))))


def test_samples_of_several_sequences_come_back(journal: RolloutJournal) -> None:
    step = journal.open(STEP, HEADER)
    step.add(0, branched())
    step.close()
    assert journal.open(STEP, HEADER).group_for(request(0)) == branched()


def test_the_experts_of_branches_come_back(journal: RolloutJournal) -> None:
    """And a group of which a branch has none is no answer to a request that wants them."""
    known = branched(routing=True)
    tree, plain = known.rollouts
    lacking = replace(tree.branches[1], completion=replace(tree.branches[1].completion, routing=None))
    step = journal.open(STEP, HEADER)
    step.add(0, known)
    step.add(1, replace(known, rollouts=(replace(tree, branches=(tree.branches[0], lacking)), plain)))
    step.close()
    again = journal.open(STEP, HEADER)
    found = again.group_for(replace(request(0), hints=Hints(wants_routing=True)))
    for rollout, wanted in zip(found.rollouts, known.rollouts, strict=True):
        for one, other in zip(rollout.completions, wanted.completions, strict=True):
            assert torch.equal(one.routing, other.routing)
    assert again.group_for(replace(request(0), index=1, hints=Hints(wants_routing=True))) is None
    assert again.group_for(request(0)) == known  # comparisons leave experts out


def test_a_stage_has_the_experts_of_its_own_layers_in_branches_too(one_rank: ParallelGroups) -> None:
    known = branched(routing=True)
    part = StagedRouting((0, 2), 3, one_rank).part(known)
    for rollout, wanted in zip(part.rollouts, known.rollouts, strict=True):
        for one, other in zip(rollout.completions, wanted.completions, strict=True):
            assert torch.equal(one.routing, other.routing[:, [0, 2]])


def test_the_experts_of_tokens_come_back(journal: RolloutJournal) -> None:
    """`--rl-router-replay`; one byte an expert, or two."""
    routing = torch.randint(0, 255, (7, 3, 2), dtype=torch.uint8), torch.randint(0, 2048, (4, 3, 2), dtype=torch.int16)
    known = group(0)
    rollouts = [
        replace(rollout, completion=replace(rollout.completion, routing=own))
        for rollout, own in zip(known.rollouts, routing, strict=True)
    ]
    step = journal.open(STEP, HEADER)
    step.add(0, replace(known, rollouts=tuple(rollouts)))
    step.add(1, group(1))
    step.close()
    again = journal.open(STEP, HEADER)
    wanting, plain = replace(request(0), hints=Hints(wants_routing=True)), request(0)
    for rollout, own in zip(again.group_for(wanting).rollouts, routing, strict=True):
        assert rollout.completion.routing.dtype == own.dtype
        assert torch.equal(rollout.completion.routing, own)
    # A start without the flag leaves them out, and what such a start has left is generated again.
    assert [rollout.completion.routing for rollout in again.group_for(plain).rollouts] == [None, None]
    assert again.group_for(request(1)) == group(1)
    assert again.group_for(replace(request(1), hints=Hints(wants_routing=True))) is None


@pytest.mark.parametrize(
    "other",
    [request(0, task="u"), request(0, num_samples=3), request(0, prompt=(1, 3))],
    ids=["task", "size", "prompt"],
)
def test_another_request_is_not_answered(journal: RolloutJournal, other: Request) -> None:
    record(journal, 0)
    assert journal.open(STEP, HEADER).group_for(other) is None


@pytest.mark.parametrize("change", [{"weights": 1}, {"seed": 8}, {"sampling": {"stop": ()}}])
def test_other_weights_or_settings_begin_anew(journal: RolloutJournal, change: dict, caplog) -> None:
    record(journal, 0)
    assert journal.open(STEP, HEADER | change).group_for(request(0)) is None
    assert "other weights or settings" in caplog.text
    # and what is written now counts for them
    record(journal, 1, header=HEADER | change)
    again = journal.open(STEP, HEADER | change)
    assert again.group_for(request(1)) == group(1)
    assert again.group_for(request(0)) is None


def test_every_way_a_file_can_be_torn(journal: RolloutJournal, tmp_path: Path) -> None:
    """Cut anywhere, the whole records before the cut count, and new ones can follow."""
    record(journal, 0, 1)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    starts = [0, *(at + 1 for at, byte in enumerate(whole[:-1]) if byte == ord("\n"))]
    assert len(starts) == 3
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        step = journal.open(STEP, HEADER)
        known = [index for index in (0, 1) if step.group_for(request(index)) is not None]
        assert known == [index for index, end in ((0, starts[2]), (1, len(whole))) if length >= end]
        step.add(2, group(2))
        step.close()
        assert journal.open(STEP, HEADER).group_for(request(2)) == group(2)


def test_a_flipped_bit_is_found(journal: RolloutJournal, tmp_path: Path) -> None:
    record(journal, 0)
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)
    assert journal.open(STEP, HEADER).group_for(request(0)) is None


def test_a_step_that_is_covered_is_forgotten(journal: RolloutJournal, tmp_path: Path) -> None:
    record(journal, 0)
    journal.open(STEP + 1, HEADER).close()
    (tmp_path / "step_notes.journal").touch()
    journal.forget(STEP)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_0000014.rank_0.journal", "step_notes.journal"]


def test_another_number_of_ranks_finds_the_groups(journal: RolloutJournal, tmp_path: Path, one_rank) -> None:
    """Group 5 of the step, of one rank, is dealt to the second of two; there it goes by the same number."""
    record(journal, 5)
    second = SimpleNamespace(rollout_rank=1, leads_model=True, model_group=one_rank.model_group)
    moved = RolloutJournal(tmp_path, second).open(STEP, HEADER)
    assert moved.group_for(request(5)) == group(5)
    moved.add(4, group(4))
    moved.close()
    assert len(list(tmp_path.iterdir())) == 2
    again = journal.open(STEP, HEADER)
    assert [again.group_for(request(index)) for index in (4, 5)] == [group(4), group(5)]


@pytest.mark.parametrize("ranks", [(0, 1), (1, 0)])
def test_of_two_records_the_one_with_grades_counts(
    journal: RolloutJournal, tmp_path: Path, one_rank, ranks: tuple[int, int]
) -> None:
    """A group whose grades failed was dealt to one rank, and to another one when it was graded again."""
    failed = group(0)
    good = replace(failed, rollouts=tuple(replace(r, grade=Grade(1.0)) for r in failed.rollouts))
    for rank, which in zip(ranks, (failed, good), strict=True):
        place = SimpleNamespace(rollout_rank=rank, leads_model=True, model_group=one_rank.model_group)
        step = RolloutJournal(tmp_path, place).open(STEP, HEADER)
        step.add(0, which)
        step.close()
    assert journal.open(STEP, HEADER).group_for(request(0)) == good


def test_a_full_disk_costs_the_journal_and_not_the_step(caplog) -> None:
    def full(data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    closed: list[int] = []
    step = StepJournal({}, SimpleNamespace(write=full, name="the journal", close=lambda: closed.append(1)))
    step.add(0, group(0))
    step.add(1, group(1))
    step.close()
    assert caplog.text.count("No space left") == 1
    assert closed == [1]


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """The kernel lets no file grow beyond ``size`` bytes meanwhile."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_is_full_when_a_step_begins_is_told_once(
    tmp_path: Path, one_rank: ParallelGroups, caplog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any byte of the header and of a group; what a later start finds is whole groups of the same header.

    Every file is closed: Python warns of one that it has to close itself.
    """
    warnings.simplefilter("error", ResourceWarning)
    unclosed: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", unclosed.append)
    record(RolloutJournal(tmp_path / "whole", one_rank), 0)
    (whole,) = (tmp_path / "whole").iterdir()
    data = whole.read_bytes()
    header = data.index(b"\n") + 1
    for size in (0, 1, header - 1, header, header + 1, len(data) - 1):
        journal = RolloutJournal(tmp_path / str(size), one_rank)
        caplog.clear()
        with largest_file(size):
            for step in (STEP, STEP + 1):
                begun = journal.open(step, HEADER)
                for index in range(2):
                    begun.add(index, group(index))
                begun.close()
        assert caplog.text.count("cannot be written (File too large): the run goes on without") == 1, size
        later = RolloutJournal(tmp_path / str(size), one_rank)
        begun = later.open(STEP, HEADER)
        assert begun.group_for(request(0)) is begun.group_for(request(1)) is None, size
        begun.add(1, group(1))
        begun.close()
        begun = later.open(STEP, HEADER)
        assert begun.group_for(request(1)) == group(1), size
        begun.close()
    gc.collect()
    assert not unclosed
