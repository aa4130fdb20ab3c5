"""Numbers and arrays that a script carries from one batch to the next, on a rank that joins (S9).

`step += 1`, `self.updates += 1` and `for step in range(n): batch = next(batches)` count batches. A
rank that joins is not given those that are averaged, so its own counts are behind. They are the
same on all ranks at the same place of the script, so it takes those of its donor: at the batch with
which it joins within a pass, or in the operation with which it joins between passes.

`counting` says which numbers these are, and `array_updates` which tensors and arrays. A sum such as
`total += loss.item()` is each rank's own. Within a pass a rank that joins takes it over with the
counts, so that an average has as many terms as it is divided by. Between passes it does so only
with what the donor's last pass has changed and nothing since: a sum of an evaluation is right by
itself.

The number of a `for` loop over a range belongs to the loop and cannot be set, so a rank whose loop
is elsewhere cannot join.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import weakref
from argparse import Namespace
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from inspect import CO_OPTIMIZED, GEN_CREATED, getgeneratorstate
from types import (
    CellType,
    FrameType,
    FunctionType,
    GeneratorType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from paceline.train.script.counting import Counting, counting_in, counting_of
from paceline.train.script.held_arrays import (
    Array,
    HeldArrays,
    Sent,
    SentArrays,
    fill,
    is_array,
    like,
    noted,
    settled_arrays,
)
from paceline.train.script.reach import (
    Reached,
    attributes_of,
    leads_nowhere,
    locals_of,
    script_frames,
)
from paceline.worker.script_engine import LeftBehindError
from paceline.worker.script_frames import belongs_to_script

NUMBERS: Final = (int, float, type(None))
"""Types of numbers of Python: None stands for no number yet."""
CONTAINERS: Final = (dict, Namespace, SimpleNamespace)
"""What a script puts its counts into, beside its own classes."""
SEQUENCES: Final[tuple[type, ...]] = (type(iter([])), type(iter(())), type(iter(range(0))))
"""Iterators that know their place."""
READING: Final = (Dataset, Sampler)
"""Classes whose objects count by themselves what is read: a rank that joins has read as much."""
FRAME: Final = "function "
LINE: Final = "line"
"""Key of the line at which a generator waits, among the numbers of its loops."""
Number = int | float | None
Counts = list[Any]
"""What `OwnCounts.read` returns, as plain data: for each object and function its name, its counts,
its sums, and the numbers of the loops over ranges or enumerate() in which it is; for a generator
also its line."""


@dataclass(frozen=True, slots=True)
class CarriedValues:
    """What a script carries at one moment."""

    numbers: Counts = field(default_factory=list)
    arrays: HeldArrays = field(default_factory=dict)
    resets: Mapping[str, Collection[str]] = field(default_factory=dict)
    """Names of arrays, by place, that the script sets anew, perhaps in each epoch."""


class ClosureVariables(dict[str, CellType]):
    """Variables that a function has of the function around it."""


@dataclass(slots=True)
class NumberHolder:
    """Something that holds numbers of the script: an object, a function, a module."""

    path: str
    owner: Any
    """The object or module, the frame of a function, or the cells of a function's variables."""
    values: Mapping[str, Any]
    names: set[str]
    """Names among these that the source counts."""
    counting: Counting
    arrays: set[str]
    """Names among these under which the source carries arrays."""
    generator: GeneratorType[Any, Any, Any] | None = None
    """The generator whose frame this is, if it is one that waits."""

    def items(self) -> Iterator[tuple[str, Any, Mapping[str, Any], str]]:
        """Yield path and value of what the source counts, what holds it, and its key there."""
        values, keys, of_others = self.values, self.counting.keys, self.counting.of_others
        for name in self.names:
            if name in values:
                yield name, values[name], values, name
        if not keys and not of_others:
            return
        for variable, value in list(values.items()):
            if isinstance(value, CONTAINERS) and not variable.startswith("__"):
                entries: dict[str, Any] = value if isinstance(value, dict) else vars(value)
                for key in keys if entries is value else of_others:
                    if key in entries:
                        yield f"{variable}[{key}]", entries[key], entries, key

    def numbers(self) -> Iterator[tuple[str, Any, Mapping[str, Any], str]]:
        """Yield the items that are numbers."""
        return (item for item in self.items() if _is_number(item[1]))

    def carries_array(self, holder: Mapping[str, Any], key: str) -> bool:
        """Return True if the source makes an array of this name from itself."""
        updates = self.counting.arrays
        if holder is self.values:
            return key in self.arrays
        return key in updates.keys or key in updates.of_others

    def iterators(self) -> list[tuple[str, Any]]:
        """Return the iterators that the script advances by next()."""
        values = self.values
        return [(name, values[name]) for name in self.counting.iterators if name in values]

    def loops(self) -> dict[str, int]:
        """Return the numbers of the loops in which a function is."""
        if not isinstance(self.owner, FrameType):
            return {}
        inside = [
            *_at(self.owner, self.counting.loops),
            *_at(self.owner, self.counting.enumerated),
        ]
        numbers = {name: self.values[name] for name in inside if type(self.values.get(name)) is int}
        return numbers | {LINE: self.owner.f_lineno} if self.generator is not None else numbers

    def put(self, changed: Mapping[str, Any]) -> None:
        """Set values."""
        owner = self.owner
        if isinstance(owner, FrameType):
            _set_variables(owner, changed)
            return
        for name, value in changed.items():
            if isinstance(owner, ClosureVariables):
                owner[name].cell_contents = value
            else:
                setattr(owner, name, value)


class OwnCounts:
    """Reads what the script in this process carries, and sets it. Main thread."""

    def __init__(self) -> None:
        self._owners: list[tuple[str, weakref.ref[Any], Counting]] = []
        """How the script reaches an object that may count, the object, and what its file counts."""

    def begin(self, reached: Mapping[int, Reached]) -> None:
        """Find the objects that count, when training begins and where this rank joins."""
        self._owners = []
        objects = {key: (each.path, each.value) for key, each in reached.items()}
        for path, value in list(objects.values()):
            if isinstance(value, torch.nn.Module):
                for name, part in value.named_modules():
                    objects.setdefault(id(part), (f"{path}.{name}", part))
        modules: dict[str, ModuleType] = {}
        for path, value in objects.values():
            if (module := _module_of(value)) is None:
                continue
            if module.__name__ != "__main__":  # whose body is a running function
                modules[module.__name__] = module
            if not isinstance(value, ModuleType):
                self._own(path, value, module)
        for name, module in modules.items():
            self._own(f"module {name}", module, module)

    def _own(self, path: str, value: Any, module: ModuleType) -> None:
        counting = counting_in(module.__file__ or "")
        may_count = False
        if not isinstance(value, FunctionType | type | ModuleType):
            kind: object = type(value)  # as a key of the cache
            attributes, used = attributes_of(value), _used_by(kind)
            names = {each for each in counting.attributes if each in used or each in attributes}
            arrays = counting.arrays
            held = {each for each in arrays.attributes if each in used or each in attributes}
            if isinstance(value, READING):
                names &= counting.of_others - counting.of_self
                held &= names & arrays.of_others
                arrays = replace(arrays, keys=set(), of_others=set())
                counting = replace(counting, keys=set(), of_others=set(), iterators=set())
            counting = replace(
                counting,
                attributes=names,
                iterators=counting.iterators & used,
                arrays=replace(arrays, attributes=held),
            )
            may_count = bool(names or held or counting.iterators)  # they may come later
        if may_count or any(_counts(place) for place in _places_of(path, value, counting)):
            with suppress(TypeError):  # an object without weak references
                self._owners.append((path, weakref.ref(value), counting))

    def read(self) -> CarriedValues:
        """Return the counts of objects and of running functions, the outermost first.

        The main thread is in the script, or waits in a call of it.
        """
        counts: Counts = []
        arrays: HeldArrays = {}
        resets: dict[str, set[str]] = {}
        for place in self._places():
            steady: dict[str, Any] = {}
            sums: dict[str, Any] = {}
            own: dict[str, Array] = {}
            for path, value, holder, key in place.items():
                if _is_number(value):
                    into = sums if key in place.counting.sums else steady
                    is_tensor = isinstance(value, torch.Tensor)
                    into[path] = value.detach().clone() if is_tensor else value
                elif is_array(value) and place.carries_array(holder, key):
                    own[path] = noted(value)
            if place.counting.iterators:
                for name, iterator in place.iterators():
                    if (at := _position(iterator)) is not None:
                        sums[f"next({name})"] = at
            counts.append([place.path, steady, sums, place.loops()])
            if own:
                arrays[place.path] = own
                resets[place.path] = place.counting.arrays.resets
        return CarriedValues(counts, arrays, resets)

    def take(self, counts: Counts, arrays: SentArrays) -> None:
        """Set the counts to those of another rank at the same place.

        It raises LeftBehindError if a loop over a range has another number here.

        Args:
            counts: The numbers that `read` has returned there, as plain data. If other functions
                run here, theirs are not set.
            arrays: The arrays that it has returned there.
        """
        theirs = {path: (steady | sums, loops) for path, steady, sums, loops in counts}
        places = list(self._places())
        running = [place.path for place in places if place.path.startswith(FRAME)]
        is_same = running == [path for path in theirs if path.startswith(FRAME)]
        for place in places:
            if place.path in theirs and (is_same or FRAME not in place.path):
                _take(place, *theirs[place.path])
                _take_arrays(place, arrays.get(place.path, {}))

    def last_number(self, counts: Counts, loop: FrameType) -> int | None:
        """Return the last number of a loop over enumerate() on another rank.

        Args:
            counts: What `read` has returned there, when the loop took a batch.
            loop: Frame of the same loop here, which takes a batch.

        Returns:
            The number; None if it is not known.
        """
        for name in _at(loop, counting_of(loop.f_code).enumerated):
            for path, _, _, loops in counts:
                if path.endswith(_name(loop)) and name in loops:
                    return int(loops[name])
        return None

    def _places(self) -> Iterator[NumberHolder]:
        for path, reference, counting in self._owners:
            if (owner := reference()) is not None:
                for place in _places_of(path, owner, counting):
                    yield from _with_generators(place)
        for depth, frame in enumerate(script_frames()):
            counting = counting_of(frame.f_code)
            yield from _with_generators(_running(f"{FRAME}{depth} {_name(frame)}", frame, counting))


def settled_in(now: CarriedValues, before: CarriedValues, after: CarriedValues) -> CarriedValues:
    """Return what a rank that joins between two passes does not have by itself.

    Args:
        now: What the script carries now.
        before: What it carried with the first batch of the last pass.
        after: What it carried at the end of that pass.

    Returns:
        The present values, with fewer sums and arrays.
    """
    return CarriedValues(
        settled(plain(now.numbers), before.numbers, after.numbers),
        settled_arrays(now.arrays, before.arrays, after.arrays, now.resets),
    )


def plain(counts: Counts) -> Counts:
    """Return counts as plain data: tensors as numbers."""
    return [[path, _plain(steady), _plain(sums), loops] for path, steady, sums, loops in counts]


def settled(counts: Counts, before: Counts, after: Counts) -> Counts:
    """Return counts without the sums that a rank which joins between two passes has by itself.

    Args:
        counts: The present ones, as plain data.
        before: Those with the first batch of the last pass.
        after: Those at its end.

    Returns:
        All counts, and those of the sums that the pass has changed and nothing since.
    """
    first = {path: _plain(sums) for path, _, sums, _ in before}
    last = {path: _plain(sums) for path, _, sums, _ in after}
    return [
        [
            path,
            steady,
            {
                name: value
                for name, value in sums.items()
                if first.get(path, {}).get(name) != value == last.get(path, {}).get(name)
            },
            loops,
        ]
        for path, steady, sums, loops in counts
    ]


# ---- places --------------------------------------------------------------------------------------


@cache
def _used_by(kind: type) -> frozenset[str]:
    """Return the names that the methods of a class use, and of those above it in the script."""
    bases = [base for base in kind.__mro__ if _module_of(base) is not None]
    functions = [each for base in bases for each in vars(base).values()]
    codes = [each.__code__ for each in functions if isinstance(each, FunctionType)]
    return frozenset(name for code in codes for name in code.co_names)


def _module_of(value: Any) -> ModuleType | None:
    """Return the module of the script that an object, its class or a function comes from."""
    if isinstance(value, ModuleType):
        module: ModuleType | None = value
    elif isinstance(value, FunctionType | type):
        module = sys.modules.get(value.__module__ or "")
    elif leads_nowhere(value):
        return None
    else:
        module = sys.modules.get(type(value).__module__)
    filename = getattr(module, "__file__", None) or ""
    return module if filename and belongs_to_script(filename) else None


def _places_of(path: str, owner: Any, counting: Counting) -> Iterator[NumberHolder]:
    """Yield what an object, a class, a function that waits or a module holds."""
    is_module = isinstance(owner, ModuleType)
    values = vars(owner) if is_module or isinstance(owner, type) else attributes_of(owner)
    names = counting.names if is_module else counting.attributes
    updates = counting.arrays
    arrays = updates.of_module() if is_module else updates.attributes
    yield NumberHolder(path, owner, values, names, counting, arrays)
    if isinstance(owner, FunctionType) and owner.__closure__:
        cells = ClosureVariables(zip(owner.__code__.co_freevars, owner.__closure__, strict=True))
        held = {name: cell.cell_contents for name, cell in cells.items() if cell != CellType()}
        inside = f"variables of {path}"
        yield NumberHolder(inside, cells, held, counting.names, counting, updates.shared)


def _counts(place: NumberHolder) -> bool:
    holds = any(_is_number(value) or is_array(value) for _, value, *_ in place.items())
    return holds or bool(place.iterators())


def _running(path: str, frame: FrameType, counting: Counting) -> NumberHolder:
    needed = counting.names or counting.of_others or counting.keys or counting.iterators
    inside = _at(frame, counting.loops) or _at(frame, counting.enumerated)
    values = _variables(frame) if needed or inside else {}
    return NumberHolder(path, frame, values, counting.names, counting, counting.held)


def _with_generators(place: NumberHolder) -> Iterator[NumberHolder]:
    """Yield a place, and the generators that its source advances and that wait now."""
    yield place
    for name, value in place.iterators() if place.counting.iterators else ():
        if type(value) is GeneratorType and not value.gi_running:
            frame = value.gi_frame
            if frame is not None and belongs_to_script(frame.f_code.co_filename):
                path = f"next({name}) of {place.path}, in {_name(frame)}"
                inner = _running(path, frame, counting_of(frame.f_code))
                inner.generator = value
                yield inner


def _name(frame: FrameType) -> str:
    return f"{frame.f_code.co_name}:{frame.f_code.co_firstlineno}"


def _variables(frame: FrameType) -> dict[str, Any]:
    return locals_of(frame) if frame.f_code.co_flags & CO_OPTIMIZED else frame.f_globals


def _set_variables(frame: FrameType, changed: Mapping[str, Any]) -> None:
    if not frame.f_code.co_flags & CO_OPTIMIZED:
        frame.f_globals.update(changed)
        return
    given = frame.f_locals
    given.update(changed)
    if sys.version_info < (3, 13):  # from then on `f_locals` writes through (PEP 667)
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))


def _at(frame: FrameType, loops: list[tuple[str, int, int]]) -> list[str]:
    """Return the variables of those loops that have the line at which a function is."""
    if not loops:
        return []
    line = frame.f_lineno or 0
    return [name for name, first, last in loops if first <= line <= last]


# ---- numbers -------------------------------------------------------------------------------------


def _is_number(value: Any) -> bool:
    if type(value) in NUMBERS:
        return True
    if isinstance(value, torch.Tensor):  # but a parameter belongs to an optimizer
        is_parameter = value.is_leaf and value.requires_grad
        return value.numel() == 1 and not value.is_complex() and not is_parameter
    return isinstance(value, np.number) and not isinstance(value, np.complexfloating)


def _plain(numbers: Mapping[str, Any]) -> dict[str, Number]:
    return {name: _number(value) for name, value in numbers.items()}


def _number(value: Any) -> Number:
    number: Number = value if type(value) in NUMBERS else value.item()
    return number


def _like(old: Any, new: Number) -> Any:
    """Return a number of the type that the script has for it here."""
    if new is None or type(old) in NUMBERS:
        return new
    if isinstance(old, torch.Tensor):
        return torch.full_like(old.detach(), new)
    return type(old)(new)


def _position(iterator: Any) -> Number:
    """Return where an iterator is; None if it is over, or of a kind that does not say."""
    if type(iterator) in SEQUENCES:
        state = iterator.__reduce__()
        return int(state[2]) if len(state) > 2 else None
    if type(iterator) is itertools.count:
        at: Any = iterator.__reduce__()[1][0]
        return _number(at) if type(at) in NUMBERS else None
    return None


def _take(place: NumberHolder, numbers: Mapping[str, Number], loops: Mapping[str, int]) -> None:
    """Set the numbers of a place to those of the same place of another rank."""
    if place.generator is not None:
        if not numbers and set(loops) == {LINE}:
            return
        _move(place, place.generator, loops[LINE])
    if isinstance(place.owner, FrameType):
        _check_loops(place.owner, place.values, loops)
    changed: dict[str, Any] = {}
    for path, value, holder, key in place.numbers():
        new = numbers.get(path, value)
        if new is value or new == _number(value):
            continue
        if holder is place.values:
            changed[key] = _like(value, new)
        elif isinstance(holder, dict):
            holder[key] = _like(value, new)
    for name, iterator in place.iterators():
        at = numbers.get(f"next({name})")
        if at is None or _position(iterator) in (None, at):
            continue
        if type(iterator) is itertools.count:
            changed[name] = itertools.count(at, *iterator.__reduce__()[1][1:])
        else:
            iterator.__setstate__(at)
    if changed:
        place.put(changed)


def _take_arrays(place: NumberHolder, arrays: Mapping[str, Sent]) -> None:
    """Set the arrays of a place to those of the same place of another rank."""
    changed: dict[str, Any] = {}
    for path, value, holder, key in list(place.items()) if arrays else ():
        if path not in arrays or not (value is None or is_array(value)):
            continue
        if key in place.counting.arrays.in_place and fill(value, arrays[path]):
            continue
        if holder is place.values:
            changed[key] = like(value, arrays[path])
        elif isinstance(holder, dict):
            holder[key] = like(value, arrays[path])
    if changed:
        place.put(changed)


def _move(place: NumberHolder, generator: GeneratorType[Any, Any, Any], line: int) -> None:
    """Bring a generator to the line at which that of another rank waits, if it has not begun."""
    frame: FrameType = place.owner
    if frame.f_lineno != line and getgeneratorstate(generator) == GEN_CREATED:
        next(generator, None)
    if generator.gi_frame is None or frame.f_lineno != line:
        raise LeftBehindError(
            f"{frame.f_code.co_filename}:{frame.f_lineno}: the generator {_name(frame)} is at this "
            f"line here and at line {line} on the other ranks, and it cannot be moved there"
        )
    place.values = _variables(frame)


def _check_loops(frame: FrameType, values: Mapping[str, Any], loops: Mapping[str, int]) -> None:
    for name in _at(frame, counting_of(frame.f_code).loops):
        if name in values and loops.get(name, values[name]) != values[name]:
            raise LeftBehindError(
                f"{frame.f_code.co_filename}:{frame.f_lineno}: the loop over `{name}` is at "
                f"{values[name]} here and at {loops[name]} on the other ranks, since it counts "
                "batches that this rank is not given"
            )
