"""What the variables of a script lead to, in the same order on all ranks."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from paceline.train.script.reach import ENTRIES_MAX, reach


class Thing:
    """An object of the script."""

    def __init__(self, part: Any = None) -> None:
        self.part = part

    def method(self) -> None:
        """Do nothing."""


def path_to(wanted: object) -> str:
    return next((each.path for each in reach().values() if each.value is wanted), "")


def _closure(thing: Thing) -> Callable[[], Thing]:
    return lambda: thing


def _generator(thing: Thing) -> Iterator[Thing]:
    while True:
        yield thing


def _suspended() -> Iterator[Thing]:
    generator = _generator(Thing())
    next(generator)
    return generator


HOLDERS: dict[str, Callable[[], object]] = {
    "holder": Thing,
    "holder.part": lambda: [Thing(Thing())][0],
    "holder['a'][1]": lambda: {"a": [0, Thing()]},
    "holder[2]": lambda: (0, 1, Thing()),
    "holder.thing": lambda: _closure(Thing()),
    "holder: thing": _suspended,
    "holder[1][0]": lambda: partial(print, Thing()),
    "holder.__self__": lambda: Thing().method,
}


@pytest.mark.parametrize("path", HOLDERS)
def test_variables_attributes_entries_and_closures_lead_to_an_object(path: str) -> None:
    holder = HOLDERS[path]()
    things = [each.path for each in reach().values() if type(each.value) is Thing]
    assert things[-1].endswith(f": {path}")
    assert holder is not None


def test_the_order_does_not_depend_on_the_collector() -> None:
    first = Thing()
    gc.collect()
    second, third = Thing(), Thing()
    gc.collect(0)
    things = [each.value for each in reach().values() if type(each.value) is Thing]
    assert things == [first, second, third]


def test_looking_keeps_no_value_alive() -> None:
    """The variables of a step, such as its outputs, may be most of the memory."""

    def step() -> weakref.ref[Thing]:
        outputs = Thing()
        assert path_to(outputs) == "step: outputs"
        gone = weakref.ref(outputs)
        del outputs
        assert gone() is None
        return gone

    assert step()() is None


def test_a_dict_that_the_script_has_from_locals_stays_as_it_is() -> None:
    rate = 0.1
    settings = locals()
    assert reach()
    assert settings["rate"] == rate


def test_long_containers_are_not_looked_into() -> None:
    wanted = Thing()
    lists = [[wanted, *range(ENTRIES_MAX)]]
    del wanted
    assert not any(type(each.value) is Thing for each in reach().values())
    assert lists


def test_a_dict_that_computes_its_items_is_not_asked() -> None:
    class Lazy(dict[str, object]):
        def items(self) -> Any:
            raise AssertionError("computed")

    lazy = Lazy(a=Thing())
    assert any(each.path.endswith("lazy['a']") for each in reach().values())
    assert lazy


def test_an_object_has_its_path_from_the_outermost_function() -> None:
    """A rank that joins is not in the inner function, which has a shorter name for the object."""
    trainer = Thing(Thing())

    def step() -> str:
        part = trainer.part
        return path_to(part)

    paths = [path_to(trainer.part), step()]
    assert paths == [paths[0]] * 2
    assert paths[0].endswith(": trainer.part")
