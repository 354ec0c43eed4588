"""Memory of tensors that goes and comes back under the same objects."""

from __future__ import annotations

import torch

from megatron_rl.platform.device import as_bytes, release, restore, storages_of


def test_each_storage_once_and_none_that_is_excluded() -> None:
    one, two, three, empty = torch.zeros(4), torch.zeros(5), torch.zeros(6), torch.zeros(0)
    found = storages_of([one[1:], two, one, three, empty], without=[two[2:]])
    assert [storage.nbytes() for storage in found] == [16, 24]


def test_views_and_a_second_round() -> None:
    whole = torch.arange(12, dtype=torch.bfloat16).view(3, 4)
    row, (storage,) = whole[1], storages_of([whole])
    for _ in range(2):
        kept, size = as_bytes(storage).clone(), storage.nbytes()
        assert size == 24
        release(storage)
        assert row.untyped_storage().nbytes() == 0
        restore(storage, size).copy_(kept)
        assert row.tolist() == [4, 5, 6, 7]
        assert whole[2, 3] == 11
