"""Planted faults: which changes are made, and where."""

from __future__ import annotations

import collections

import pytest

from tools.planted_faults import PER_FILE, ROOT, choose, find_faults

CHANGES = [
    ("x = a < b", "comparison", "x = a <= b"),
    ("x = a is None", "comparison", "x = a is not None"),
    ("x = a - b", "sign", "x = a + b"),
    ("x = n // 2", "sign", "x = n * 2"),
    ("x = 3", "constant", "x = 4"),
    ("x = 0.5", "constant", "x = 0.75"),
    ("x = True", "constant", "x = False"),
    ("x = a[:n]", "index", "x = a[:(n) + 1]"),
    ("f(x)", "omitted", "pass"),
    ("a.x = b", "omitted", "pass"),
    ("x += y", "omitted", "pass"),
    ("é = 'ß'; x = a < b", "comparison", "é = 'ß'; x = a <= b"),
]


@pytest.mark.parametrize(("source", "kind", "changed"), CHANGES, ids=[source for source, _, _ in CHANGES])
def test_one_change(source: str, kind: str, changed: str):
    faults = [fault for fault in find_faults("f.py", source) if fault.kind == kind]
    assert [fault.plant(source) for fault in faults] == [changed]


UNCHANGED = ["x = 'a' + b", "def f(a: Literal[3]): ...", "if TYPE_CHECKING:\n    x = 3", "x = y"]


@pytest.mark.parametrize("source", UNCHANGED)
def test_nothing_to_change(source: str):
    assert find_faults("f.py", source) == []


def test_a_seed_always_chooses_the_same_faults_that_can_be_compiled():
    chosen = choose(ROOT, 50, 7)
    assert chosen == choose(ROOT, 50, 7) != choose(ROOT, 50, 8)
    assert set(collections.Counter(fault.kind for fault in chosen).values()) == {10}
    assert max(collections.Counter(fault.path for fault in chosen).values()) <= PER_FILE
    for fault in chosen:
        compile(fault.plant((ROOT / fault.path).read_text()), fault.path, "exec")
