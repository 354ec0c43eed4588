"""Of a product of parameters, the ordinary suite has each value once."""

from __future__ import annotations

from types import SimpleNamespace

from tests.conftest import with_each_value_once


class Case:
    """What is asked of a pytest item."""

    def __init__(self, name: str, marked: bool = True, **params: object) -> None:
        self.nodeid, self._marked = f"{name}[{params}]", marked
        if params:
            self.callspec = SimpleNamespace(params=params)

    def get_closest_marker(self, name: str) -> bool:
        return self._marked and name == "each_value"


def test_each_value_stays_once() -> None:
    product = [Case("product", letter=letter, number=number) for letter in "abc" for number in (1, 2)]
    others = [Case("product, unmarked", marked=False, letter=letter) for letter in "aa"] + [Case("without parameters")]
    kept = with_each_value_once([*product, *others])
    assert kept == [product[0], product[3], product[4], *others]  # a1, b2, c1


def test_of_one_parameter_nothing_is_left_out() -> None:
    cases = [Case("one", number=number) for number in (1, 2, 3)]
    assert with_each_value_once(cases) == cases
