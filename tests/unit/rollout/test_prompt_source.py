"""Which task comes next."""

from __future__ import annotations

from collections import Counter

import pytest

from megatron_rl.errors import ConfigError, EnvironmentFault
from megatron_rl.rollout.prompt_source import PromptSource, TaskPool
from megatron_rl.types import Task


def pool(name: str, count: int, weight: float = 1.0) -> TaskPool:
    """Tasks ``0`` to ``count - 1``; task i's prompt is i + 1 tokens long."""
    return TaskPool(name, [Task(str(index), "x" * (index + 1)) for index in range(count)], weight)


def source(*pools: TaskPool, longest: int = 100, seed: int = 0) -> PromptSource:
    return PromptSource(pools, lambda task, _: [5] * len(task.prompt), longest, seed)


def ids(prompts: PromptSource, count: int) -> list[str]:
    return [draw.task.id for draw in prompts.draw(count)]


def test_an_epoch_has_every_task_once() -> None:
    prompts = source(pool("a", 20))
    epochs = [prompts.draw(20) for _ in range(3)]
    for number, draws in enumerate(epochs):
        assert sorted(int(draw.task.id) for draw in draws) == list(range(20))
        assert {draw.epoch for draw in draws} == {number}
    orders = [[draw.task.id for draw in draws] for draws in epochs]
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_the_seed_and_the_environment_fix_the_order() -> None:
    assert ids(source(pool("a", 20)), 20) == ids(source(pool("a", 20)), 20)
    assert ids(source(pool("a", 20)), 20) != ids(source(pool("a", 20), seed=1), 20)
    assert ids(source(pool("a", 20)), 20) != ids(source(pool("b", 20)), 20)


def test_a_draw_has_the_prompt_of_its_task() -> None:
    for draw in source(pool("a", 5)).draw(5):
        assert draw.prompt_ids == (5,) * (int(draw.task.id) + 1)
        assert draw.environment == "a"


def test_weights_three_to_one() -> None:
    prompts = source(pool("a", 50, weight=3.0), pool("b", 7, weight=1.0))
    draws = prompts.draw(400)
    assert Counter(draw.environment for draw in draws) == {"a": 300, "b": 100}
    for end in range(4, 401, 4):  # not only in the long run
        assert Counter(draw.environment for draw in draws[:end])["a"] == 3 * end // 4


def test_evaluation_only_environments_are_never_drawn() -> None:
    prompts = source(pool("a", 3), pool("evaluation_only", 3, weight=0.0))
    assert {draw.environment for draw in prompts.draw(20)} == {"a"}
    assert prompts.state_dict() == {"a": 20}


@pytest.mark.parametrize("before", [0, 7, 20, 33])
def test_a_resumed_source_goes_on_identically(before: int) -> None:
    """Also in the middle of an epoch, in a fresh process: through the state alone."""
    pools = (pool("a", 20, weight=2.0), pool("b", 3))
    first, resumed = source(*pools), source(*pools)
    first.draw(before)
    resumed.load_state_dict(first.state_dict())
    assert resumed.draw(50) == first.draw(50)


def test_a_source_that_returns_draws_and_counts_the_same_again() -> None:
    """Every prompt of b is too long: six misses in a row are its end, unless they are the same ones again."""
    too_long = TaskPool("b", [Task(str(index), "x" * 9) for index in range(3)], 0.5)
    prompts = source(pool("a", 5), too_long, longest=5)
    prompts.draw(2)
    position = prompts.position()
    first, skipped, state = prompts.draw(5), prompts.skipped, prompts.state_dict()
    assert skipped > position[3]
    for _ in range(6):
        prompts.return_to(position)
        assert (prompts.draw(5), prompts.skipped, prompts.state_dict()) == (first, skipped, state)


def test_an_environment_added_on_resume_starts_at_its_beginning() -> None:
    first = source(pool("a", 5))
    first.draw(3)
    resumed = source(pool("a", 5), pool("new", 5))
    resumed.load_state_dict(first.state_dict())
    assert resumed.state_dict() == {"a": 3, "new": 0}


def drawn_from(prompts: PromptSource, count: int) -> Counter[str]:
    return Counter(draw.environment for draw in prompts.draw(count))


def test_an_environment_added_on_resume_gets_its_share_and_no_more() -> None:
    """And so do changed weights: 40 draws were of ``a`` alone, of the next 40 half are."""
    first = source(pool("a", 5))
    first.draw(40)
    resumed = source(pool("a", 5), pool("new", 5))
    resumed.load_state_dict(first.state_dict())
    assert drawn_from(resumed, 40) == {"a": 20, "new": 20}
    weighted = source(pool("a", 5, weight=3.0), pool("new", 5))
    weighted.load_state_dict(resumed.state_dict())
    assert drawn_from(weighted, 40) == {"a": 30, "new": 10}
    again = source(pool("a", 5, weight=3.0), pool("new", 5))
    again.load_state_dict(weighted.state_dict())
    assert again.draw(13) == weighted.draw(13), "what came before the change is not in the state, nor needed"


def test_too_long_prompts_are_skipped_and_counted() -> None:
    prompts = source(pool("a", 10), longest=4)
    draws = prompts.draw(8)
    assert Counter(len(draw.prompt_ids) for draw in draws) == {1: 2, 2: 2, 3: 2, 4: 2}
    assert 6 <= prompts.skipped <= 12
    # Skipped ones count in the cursor, otherwise a resumed run would draw others.
    assert prompts.state_dict() == {"a": 8 + prompts.skipped}


def test_no_prompt_that_fits_is_an_error_that_names_the_flags() -> None:
    with pytest.raises(EnvironmentFault, match="'a'.*0 tokens.*--inference-max-seq-length.*--rl-max-new-tokens"):
        source(pool("a", 10), longest=0).draw(1)


def test_one_environment_without_a_fitting_prompt_is_an_error_too() -> None:
    """Beside a healthy one it would be drawn for ever without effect."""
    hopeless = TaskPool("hopeless", [Task(str(index), "x" * 50) for index in range(3)], 1.0)
    with pytest.raises(EnvironmentFault, match="'hopeless'"):
        source(pool("a", 10), hopeless, longest=20).draw(1000)


def test_nothing_to_draw_from() -> None:
    with pytest.raises(ConfigError, match="'b' has no training tasks"):
        source(pool("a", 3), pool("b", 0))
