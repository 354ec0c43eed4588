"""Who is in which group, on four ranks with two for a copy of the model."""

from __future__ import annotations

from tests.support.ranks import run_ranks


def test_four_ranks_two_copies() -> None:
    places = run_ranks("tests.distributed.step_programs:place", 4, timeout=600, tensor_size=2)
    assert [place["tensor"] for place in places] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [place["model"] for place in places] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [place["data"] for place in places] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [place["indices"] for place in places] == [[0, 0], [1, 0], [0, 1], [1, 1]]
    assert all(place["sizes"] == [2, 2] for place in places)
    assert [place["is_main"] for place in places] == [True, False, False, False]
    assert [place["leads_model"] for place in places] == [True, False, True, False]
    assert [place["model_leader"] for place in places] == [0, 0, 2, 2]


def test_context_parallel_ranks_share_samples_and_are_rollout_replicas() -> None:
    """Each has a model of its own, so each generates; of a training replica they are neighbours."""
    places = run_ranks("tests.distributed.step_programs:members", 4, parallel={"context_parallel_size": 2})
    assert [place["context"] for place in places] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [place["data"] for place in places] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [place["rollout"] for place in places] == [[0, 1, 2, 3]] * 4
    assert [place["model"] for place in places] == [[0], [1], [2], [3]]
    assert [place["loss"] for place in places] == [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_losses_are_added_up_over_stages_and_not_over_context_parallel_ranks() -> None:
    parallel = {"context_parallel_size": 2, "pipeline_model_parallel_size": 2}
    places = run_ranks("tests.distributed.step_programs:members", 4, parallel=parallel)
    assert [place["loss"] for place in places] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [place["rollout"] for place in places] == [[0, 1], [0, 1], [2, 3], [2, 3]]
