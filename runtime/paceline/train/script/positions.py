"""Counts that a loop keeps of its batches, on a rank that joins within a pass (S9).

`for i, batch in enumerate(loader)` counts the batches that the loader gives. A rank that joins is
not given those that are averaged already, so its `i` would begin at 0 where the others are at 40,
and `if i % 100 == 0` would be another step on it. So enumerate() is moved on before the loop gets
its first batch: it is asked for as many items as there are such batches, and the loader gives None
for each of them. The same is done for islice(), whose limit counts batches, and for zip().

This happens while the loop waits inside of `enumerate.__next__()`, which reads from its iterator
first and takes its number then. A generator that runs cannot be asked in this way. So where one is
between the loader and enumerate(), as in `enumerate(tqdm(loader))`, the log names the line.
"""

from __future__ import annotations

import gc
import inspect
import logging
from collections.abc import Callable, Iterator
from itertools import islice
from types import FrameType
from typing import Any, Final

log = logging.getLogger("paceline.rank")

READERS: Final = (enumerate, islice)
"""Iterators that read from one other iterator, and take their own count after that."""


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


def warn_of_counts(frame: FrameType | None, behind: int) -> None:
    """Warn if enumerate() counts the items of a generator that reads from a loader.

    Args:
        frame: Frame that reads from the iterator over the loader.
        behind: Number of batches of the pass that this rank is not given.
    """
    frames = []
    while frame is not None and frame.f_code.co_flags & inspect.CO_GENERATOR:
        frames.append(frame)
        frame = frame.f_back
    if not frames or frame is None:
        return
    for counter in [each for each in gc.get_objects() if type(each) is enumerate]:
        for source in gc.get_referents(counter):
            if inspect.isgenerator(source) and source.gi_frame in frames:
                log.warning(
                    "%s:%d: enumerate() counts from its start on this rank, which has joined, and "
                    "the others are %d batches on: a generator is between it and the loader. Put "
                    "enumerate() around the loader itself, such as tqdm(enumerate(loader)) "
                    "(docs/scripts.md)",
                    *(frame.f_code.co_filename, frame.f_lineno, behind),
                )
                return
