"""Random workloads over the twin of the engine: all sequences are served, and none attends to the cells of another."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.support.scheduling import Sizes, Twin, Wanted, answer


def random_sizes(draw: random.Random) -> Sizes:
    rows, longest = draw.randint(1, 9), draw.randint(20, 90)
    sizes = Sizes(
        rows, budget=draw.choice([1, 7, 16, 40, 500]), steps=draw.randint(1, 9), longest=longest,
        block_size=draw.choice([0, 1, 4, 16, 100]), reuse=draw.random() < 0.8,
    )  # fmt: skip
    if not sizes.block_size:
        return sizes
    # Often no more than one sequence fits.
    blocks = sizes.blocks_per_row + draw.choice([0, 0, 1, 3, rows * sizes.blocks_per_row])
    return replace(sizes, blocks=blocks, overcommit=draw.choice([1.0, 1.0, 1.5, 4.0, 100.0]))


def random_request(draw: random.Random, sizes: Sizes, common: tuple[int, ...]) -> Wanted:
    room = sizes.longest - 1
    head = common[: draw.randint(0, min(room - 1, len(common)))]
    tail = tuple(draw.randrange(9) for _ in range(draw.randint(1, max(1, min(room - len(head), 12)))))
    prompt = head + tail
    limit = draw.randint(1, sizes.longest - len(prompt))
    samples = draw.randint(1, 2 * sizes.rows)
    lengths = [draw.randint(1, limit) for _ in range(samples)]
    return Wanted(prompt, limit, lengths, draw.choice([None, draw.randint(1, limit)]), goes_on=draw.random() < 0.5)


def later_turn(draw: random.Random, sizes: Sizes, twin: Twin, request: int) -> Wanted | None:
    """One of the samples of a request hears something and speaks again."""
    before = twin.wanted[request]
    heard = tuple(draw.randrange(9) for _ in range(draw.randint(1, 6)))
    prompt = before.prompt + before.answers[draw.randrange(len(before.lengths))] + heard
    limit = sizes.longest - len(prompt)
    return Wanted(prompt, limit, [draw.randint(1, limit)], later_turn=True) if limit > 0 else None


def served(sizes: Sizes, seed: int, count: int = 12, cancelled: float = 0.0) -> Twin:
    """Requests in dribs, some of which go on; all has to be finished in the end but what is ``cancelled``.

    That is a request in a step, with this probability.
    """
    cancels = random.Random(f"cancels {seed}")
    draw, twin = random.Random(seed), Twin(sizes)
    common = tuple(draw.randrange(9) for _ in range(60))
    arriving = [random_request(draw, sizes, common) for _ in range(count)]
    for _ in range(100_000):
        while arriving and draw.random() < 0.6:
            twin.add(arriving.pop())
        left = [number for number in range(len(twin.wanted)) if number not in twin.dropped]
        if left and cancels.random() < cancelled:
            twin.drop(cancels.choice(left))
        for request in twin.step():
            turn = later_turn(draw, sizes, twin, request) if len(twin.wanted) < 3 * count else None
            if turn is not None:
                twin.add(turn)
        if not arriving and not twin.unfinished:
            break
    assert not twin.unfinished, "somebody waits for ever"
    for number, wanted in enumerate(twin.wanted):
        said = {sample: answer(number, sample, length) for sample, length in enumerate(wanted.lengths)}
        assert wanted.answers == said or number in twin.dropped and wanted.answers.items() <= said.items()
    return twin


@pytest.mark.parametrize("seed", range(60))
def test_everybody_is_served(seed: int) -> None:
    sizes = random_sizes(random.Random(seed))
    twin = served(sizes, seed, cancelled=0.2 * (seed % 2))
    assert sizes.reuse or twin.reused == 0
    assert sizes.overcommit > 1 or twin.preempted == 0, "without over-commit nobody has to leave"
    assert not twin.scheduler.running
    if sizes.block_size:
        assert twin.blocks.pool.held == 0, "blocks are lost"
        assert set(twin.blocks.table) == {0}


def test_the_random_workloads_meet_everything() -> None:
    """Otherwise the test above would show nothing."""
    twins = [served(random_sizes(random.Random(seed)), seed) for seed in range(40)]
    assert sum(twin.preempted > 0 for twin in twins) >= 4
    assert sum(twin.reused > 0 for twin in twins) >= 8
    assert {bool(twin.sizes.block_size) for twin in twins if twin.reused} == {False, True}


def crowded(overcommit: float, expected: int | None) -> tuple[Twin, int]:
    """128 answers of 60 tokens on average, 200 at most; pages for 8 of the longest, rows for 32. Also the bursts."""
    draw = random.Random(3)
    twin = Twin(Sizes(32, 2000, 8, longest=256, block_size=16, blocks=16 * 8, overcommit=overcommit))
    for _ in range(16):
        prompt = tuple(draw.randrange(1000) for _ in range(40))
        lengths = [min(200, 1 + int(draw.expovariate(1 / 60))) for _ in range(8)]
        twin.add(Wanted(prompt, 200, lengths, expected))
    bursts = 0
    while twin.unfinished:
        twin.step()
        bursts += 1
    return twin, bursts


def test_over_commit_fills_the_rows_and_wastes_none() -> None:
    twins = {}
    for overcommit, expected in ((1.0, None), (2.0, None), (1.5, 60)):
        twins[overcommit], bursts = crowded(overcommit, expected)
        written = sum(length for wanted in twins[overcommit].wanted for length in wanted.lengths)
        # Rows that end within a burst are computed to its end; rows that wait for pages must not be computed at all.
        assert twins[overcommit].decoded_rows < 1.2 * written
        assert bursts < {1.0: 140, 2.0: 80, 1.5: 70}[overcommit]
    assert twins[1.0].preempted == twins[2.0].preempted == 0
    assert 0 < twins[1.5].preempted < 20


@pytest.mark.parametrize("block_size", [0, 16])
def test_later_turns_waste_few_rows(block_size: int) -> None:
    """64 turns of 16 conversations, each silent for about as long as it speaks: half the rows idle."""
    draw, twin = random.Random(5), Twin(Sizes(16, steps=8, longest=200, block_size=block_size))
    due = [(draw.randrange(6), tuple(draw.randrange(1000) for _ in range(32))) for _ in range(16)]
    step = 0
    while due or twin.unfinished:
        for prompt in [prompt for when, prompt in due if when == step]:
            twin.add(Wanted(prompt, 24, [draw.randint(12, 24)], later_turn=len(prompt) > 32, goes_on=True))
        due = [entry for entry in due if entry[0] > step]
        for said in (twin.wanted[number] for number in twin.step()):
            if len(twin.wanted) + len(due) < 4 * 16:
                heard = tuple(draw.randrange(1000) for _ in range(8))
                due.append((step + 1 + draw.randrange(6), said.prompt + said.answers[0] + heard))
        step += 1
    written = sum(len(wanted.answers[0]) - 1 for wanted in twin.wanted)
    assert twin.decoded_rows < 1.25 * written
    assert twin.reused > 0.7 * (twin.reused + twin.prefilled)


@pytest.mark.parametrize("block_size", [0, 1, 4, 16])
def test_states_are_resumed_where_they_stand(block_size: int) -> None:
    """`Twin` compares the tokens of each state with the beginning of the prompt that goes on from it."""
    reused = 0
    for seed in range(20):
        draw = random.Random(seed)
        sizes = replace(random_sizes(draw), reuse=True, block_size=block_size, blocks=0)
        twin = served(replace(sizes, snapshots=draw.choice([1, sizes.rows])), seed, cancelled=0.2 * (seed % 2))
        reused += twin.reused
    assert reused > 100
