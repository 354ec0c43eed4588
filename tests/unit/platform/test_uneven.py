"""On gloo megatron gathers and reduce-scatters unequal parts too, which experts cut over ranks need."""

from __future__ import annotations

from tests.support.ranks import joined, run_ranks


def uneven() -> list[list[float]]:
    """What this rank gathers, gets of a sum, and gets of a sum of equal parts."""
    import torch
    import torch.distributed as dist
    from megatron.core.tensor_parallel import mappings

    import megatron_rl.platform  # noqa: F401  (what is tested)

    with joined() as (rank, _):
        group = dist.group.WORLD
        part = torch.tensor([1.0]) if rank == 0 else torch.tensor([2.0, 3.0, 4.0])
        whole = torch.arange(4.0) * (rank + 1)
        gathered = mappings.gather_from_sequence_parallel_region(part, group=group, output_split_sizes=[1, 3])
        scattered = mappings.reduce_scatter_to_sequence_parallel_region(whole, group=group, input_split_sizes=[1, 3])
        even = mappings.reduce_scatter_to_sequence_parallel_region(whole, group=group)
    return [gathered.tolist(), scattered.tolist(), even.tolist()]


def test_unequal_parts() -> None:
    """Sums of 0 1 2 3 and 0 2 4 6 are 0 3 6 9."""
    first, second = run_ranks("tests.unit.platform.test_uneven:uneven", 2)
    assert first == [[1, 2, 3, 4], [0], [0, 3]]
    assert second == [[1, 2, 3, 4], [3, 6, 9], [6, 9]]
