"""Options: declared as keyword arguments, checked by name and type."""

from __future__ import annotations

import math

import pytest

from megatron_rl.environments.base import Environment
from megatron_rl.environments.loader import find_environment
from megatron_rl.errors import ConfigError


class Plain(Environment):
    """The first line.

    And more.
    """

    name = "plain"

    def tasks(self, split):
        return ()

    def grade(self, task, transcript):
        return 0.0


class Sized(Plain):
    name = "sized"

    def __init__(self, path, *, size: int = 3, share: float = 0.5, label: str | None = None) -> None:
        if size < 0:
            raise ValueError("size is negative")
        self.given = (path, size, share, label)


class Coloured(Sized):
    name = "coloured"

    def __init__(self, *, colour: str = "red", **options: object) -> None:
        super().__init__(**options)
        self.colour = colour


def problems(environment, options):
    with pytest.raises(ConfigError) as error:
        environment.from_options(options)
    return error.value.lines


def test_options_reach_the_constructor():
    assert Sized.from_options({"path": "p", "size": 1, "share": 1, "label": 7}).given == ("p", 1, 1, 7)
    made = Coloured.from_options({"path": "p", "colour": "blue", "size": 9})
    assert (made.colour, made.given[1]) == ("blue", 9)
    assert isinstance(Plain.from_options({}), Plain)


def test_unknown_options_name_the_nearest():
    assert problems(Coloured, {"path": "p", "sise": 1}) == [
        "coloured has no option 'sise'; did you mean 'size'?"
    ]
    assert problems(Plain, {"x": 1}) == ["plain has no option 'x'; none exists"]


@pytest.mark.parametrize(("option", "value"), [("size", 1.5), ("size", True), ("size", "1"), ("share", "x")])
def test_types_follow_the_defaults(option, value):
    [problem] = problems(Sized, {"path": "p", option: value})
    assert f"option {option!r} of sized is {value!r}" in problem


def test_all_problems_come_at_once():
    assert len(problems(Sized, {"size": "1", "colour": 1})) == 3


def test_a_refusal_by_the_environment_is_a_config_error():
    assert problems(Sized, {"path": "p", "size": -1}) == [
        "sized cannot be set up with its options: ValueError: size is negative"
    ]


def test_description_is_the_first_line():
    assert Plain.description() == "The first line."
    assert Sized.description() == ""


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        *(("grade_deadline", value, "give seconds, above 0 and up to 600") for value in (-1, 601, math.nan, "5", None)),
        *(("max_turns", value, "a whole number from 1 to 1,000,000") for value in (0, -1, 2.0, True, "3", 10**9)),
        *((name, 1, "it must be true or false") for name in ("in_process", "evaluation_only", "needs_sandbox")),
    ],
)
def test_attributes_of_a_class_have_the_bounds_of_the_list(name, value, wanted):
    """``grade_deadline = -1`` killed every grade, and ``max_turns = 0`` asked for a turn all the same."""
    [line] = problems(type("Odd", (Plain,), {name: value}), {})
    assert line.startswith(f"plain has {name} {value!r}; ") and wanted in line
    assert getattr(type("Fine", (Plain,), {name: getattr(Plain, name)}).from_options({}), name) == getattr(Plain, name)


def test_a_name_of_a_class_has_the_bound_of_the_list(monkeypatch):
    monkeypatch.setattr(Plain, "name", "a" * 5000)
    with pytest.raises(ConfigError, match="to match .*, at most 100 characters") as refused:
        find_environment(f"{__name__}:Plain")
    assert len(str(refused.value)) < 500
