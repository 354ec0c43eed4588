"""Which samples are shown of a step's rollouts, whichever ranks they are on."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.metrics.rollouts import MAX_CHARACTERS, TextSample, samples_of, shorten, worst_and_best
from tests.support.rollouts import drawn, graded_group, group_of, sample_of


def spelled(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


def found(groups: dict[int, list[float | None]]) -> list[TextSample]:
    """What a rank finds with groups of these rewards; sample i answers 10 + i."""
    graded = [graded_group(rewards, prompt_ids=(number,)) for number, rewards in groups.items()]
    return samples_of(graded, list(groups), spelled)


def shown(samples: Sequence[TextSample]) -> list[tuple[str, str, float, str]]:
    return [(one.which, one.prompt, one.reward, one.answer.split()[0]) for one in samples]


def test_the_lowest_reward_of_the_worst_group_and_the_highest_of_the_best() -> None:
    """Means 0.5, 0.25 and 0.75; a sample without a grade counts nowhere."""
    samples = found({0: [0.0, 1.0], 1: [0.25, None, 0.0, 0.5], 2: [0.5, 1.0]})
    assert shown(samples) == [("worst", "1", 0.0, "12"), ("best", "2", 1.0, "11")]
    assert [(one.group_mean, one.group_size, one.correct) for one in samples] == [(0.25, 4, False), (0.75, 2, True)]


def test_ranks_agree_on_the_first_of_equals() -> None:
    ranks = [found({2: [0.0, 0.0], 5: [1.0, 1.0]}), found({1: [0.0, 0.0], 3: [1.0, 1.0]}), found({})]
    chosen = [("worst", "1", 0.0, "10"), ("best", "3", 1.0, "10")]
    assert shown(worst_and_best([one for rank in ranks for one in rank])) == chosen
    assert shown(worst_and_best([one for rank in reversed(ranks) for one in rank])) == chosen


def test_of_groups_that_are_all_alike_one_is_shown() -> None:
    assert shown(worst_and_best(found({0: [1.0, 1.0], 1: [1.0, 1.0]}))) == [("best", "0", 1.0, "10")]


def test_without_a_grade_nothing_is_shown() -> None:
    assert worst_and_best(found({0: [None]})) == []


def test_of_a_harness_its_own_prompt_and_all_sequences_are_shown() -> None:
    tree = sample_of(1.0, ([7, 8], drawn([1, 2])), ([7, 8, 1, 9], drawn([3])), ([5], drawn([6])))
    *_, best = samples_of([group_of(tree)], [0], spelled)
    assert best.prompt == "7 8"
    assert best.answer == (
        "1 2\n[sequence 2, after 3 tokens of sequence 1]\n9 3\n[sequence 3, after 0 tokens of sequence 1]\n5 6"
    )


def test_of_long_texts_both_ends_are_kept() -> None:
    group = graded_group([1.0], lengths=[4 * MAX_CHARACTERS])
    sample, _ = samples_of([group], [0], lambda ids: "a" * len(ids) + "z")
    assert sample.answer.startswith("aa") and sample.answer.endswith("az")
    assert len(sample.answer) < MAX_CHARACTERS + 40


def test_one_line_without_control_characters() -> None:
    assert shorten(" a\nb\x1b[31m\u202ec ", 20, 20) == "a\u21b5b\ufffd[31m\ufffdc"
    assert shorten("0123456789", 2, 3) == "01 [...] 789"
