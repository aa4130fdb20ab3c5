"""Counts that a loop keeps of its batches, on a rank that joins within a pass (S9).

`for i, batch in enumerate(loader)` counts the batches that the loader gives. A rank that joins is
not given those that are averaged already, so its `i` would begin at 0 where the others are at 40,
and `if i % 100 == 0` would be another step on it. So enumerate() is moved on before the loop gets
its first batch: it is asked for as many items as there are such batches, and the loader gives None
for each of them. The same is done for islice(), whose limit counts batches, and for zip().

This happens while the loop waits inside of `enumerate.__next__()`, which reads from its iterator
first and takes its number then. A generator that runs cannot be asked in this way, nor can map() or
an iterator of the script's own class. So where one is between the loader and enumerate(), as in
`enumerate(tqdm(loader))`, the number of enumerate() is set where CPython keeps it.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import sys
from collections.abc import Callable, Iterator
from itertools import (
    accumulate,
    chain,
    count,
    dropwhile,
    filterfalse,
    islice,
    starmap,
    takewhile,
)
from types import FrameType
from typing import Any, Final

READERS: Final = (enumerate, islice)
"""Iterators that read from one other iterator, and take their own count after that."""

PASSING: Final = (map, filter, chain, starmap, takewhile, dropwhile, filterfalse, accumulate)
"""Iterators that count nothing, and cannot be asked for an item that is None."""
NUMBERS: Final = (count, type(iter(range(0))))
"""Iterators that give numbers, and read from nothing."""


def outermost_reader(source: Iterator[Any], *, is_loader: Callable[[Any], bool]) -> Any:
    """Return the iterator through which a loop reads, or `source` if nothing that counts does.

    Args:
        source: The iterator over a loader.
        is_loader: Returns True for iterators over loaders.
    """
    reader: Any = source
    while (above := _reader_of(reader, is_loader)) is not None:
        reader = above
    return reader


def _reader_of(source: Any, is_loader: Callable[[Any], bool]) -> Any:
    for each in gc.get_referrers(source):
        if type(each) in READERS:
            return each
        # An iterator before the first loader of a zip() has given its item already.
        if type(each) is tuple and (each[0] is source or is_loader(each[0])):
            for above in gc.get_referrers(each):
                if type(above) is zip:
                    return above
    return None


def counter_above(reader: Any, frame: FrameType | None) -> tuple[Any, FrameType] | None:
    """Return what counts the items of something between it and a loader.

    That is a generator, an object with a method `__next__` of its own, or an iterator such as
    map().

    Args:
        reader: What `outermost_reader` has returned.
        frame: Frame that reads from the iterator over the loader.

    Returns:
        An enumerate(), an islice(), or a zip() with numbers, and the frame of its loop; None if
        there is none.
    """
    frames, between = [], [reader]
    while frame is not None:
        if not frame.f_code.co_flags & inspect.CO_GENERATOR:
            if frame.f_code.co_name != "__next__":
                break
            between.append(frame.f_locals.get(frame.f_code.co_varnames[0]))
        frames.append(frame)
        frame = frame.f_back
    if frame is None:
        return None

    def leads_there(source: Any) -> bool:
        if inspect.isgenerator(source):
            return source.gi_frame in frames
        return any(source is each for each in between)

    iterators = [each for each in gc.get_objects() if type(each) in (*READERS, *PASSING, zip)]
    passing = [each for each in iterators if type(each) in PASSING]
    while known := [each for each in passing if any(map(leads_there, _sources_of(each)))]:
        between += known  # one may read from another
        passing = [each for each in passing if not leads_there(each)]
    for counter in iterators:
        sources = _sources_of(counter)
        counts = type(counter) in READERS or (
            type(counter) is zip and any(isinstance(each, NUMBERS) for each in sources)
        )
        if counts and any(map(leads_there, sources)):
            return counter, frame
    return None


def _sources_of(iterator: Any) -> list[Any]:
    """Return what an iterator reads from; zip() and map() keep that in a tuple."""
    held = gc.get_referents(iterator)
    return held + [each for inner in held if type(inner) is tuple for each in inner]


def number_of(counter: Any) -> int:
    """Return the number that an enumerate() gives next."""
    _, (_, number) = counter.__reduce__()
    return int(number)


def set_number(counter: Any, number: int) -> bool:
    """Set the number that an enumerate() gives next.

    It is the first field of the object, and is compared with what the object itself says.

    Args:
        counter: The enumerate().
        number: Its next number.

    Returns:
        False if this Python keeps the number elsewhere.
    """
    at = ctypes.c_ssize_t.from_address(id(counter) + object.__basicsize__)
    if sys.implementation.name != "cpython" or at.value != number_of(counter):
        return False
    at.value = number
    return number_of(counter) == number
