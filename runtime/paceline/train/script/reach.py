"""Objects that the script of this process can reach, in an order that is the same on all ranks.

At the same spot of the same script, its functions have the same variables, and what these hold has
the same names. The order of Python's own list of objects says when they were last collected.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from inspect import CO_OPTIMIZED
from types import FrameType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any, Final

import torch

from paceline.worker.script_frames import belongs_to_script

OBJECTS_MAX: Final = 50_000
"""Objects that are looked at from one function; a script with more has long lists of data."""
ENTRIES_MAX: Final = 1_024
"""Entries of a container that is looked into."""
REFERENCES: Final = 3
"""References to the dict of a frame: the frame's, a variable's, and that of the question."""
FINAL: Final = (type, ModuleType, str, bytes, bytearray, int, float, complex, range, slice)
"""Types of objects that lead nowhere, with their subclasses."""
CLOSED: Final = frozenset({"torch", "numpy", "paceline", *sys.stdlib_module_names})
"""Packages whose objects are not looked into."""


@dataclass(frozen=True)
class Reached:
    """An object, and how the script reaches it first."""

    value: Any
    path: str
    """For people and as a key: `main: ema.shadow`."""
    owner: Any
    """Object with the attribute `path`; None for a variable, or an entry of a container."""


def reach() -> dict[int, Reached]:
    """Return what the variables of the script lead to, by `id`: outer functions first.

    So an object has the same path on a rank that is deeper in the script, where an inner function
    may have a shorter name for it. The main thread is in the script, or waits in a call of it.
    """
    reached: dict[int, Reached] = {}
    for variables in _variables():
        level, most = variables, len(reached) + OBJECTS_MAX
        while level and len(reached) < most:
            following: list[Reached] = []
            for each in level:
                if id(each.value) in reached:
                    continue
                reached[id(each.value)] = each
                following += _within(each)
            level = following
    return reached


def script_frames() -> list[FrameType]:
    """Return the running functions of the script in the main thread, the outermost first."""
    frames: list[FrameType] = []
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001
    while frame is not None:
        if belongs_to_script(frame.f_code.co_filename):
            frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def _variables() -> Iterator[list[Reached]]:
    """Yield the variables of each running function, the outermost first, behind its globals."""
    visited: set[int] = set()
    for frame in script_frames():
        name = frame.f_code.co_name
        if id(frame.f_globals) not in visited:
            visited.add(id(frame.f_globals))
            yield [*_named(frame.f_globals, f"{frame.f_globals.get('__name__')}: ", None)]
        yield [*_named(locals_of(frame), f"{name}: ", None)]


def locals_of(frame: FrameType) -> dict[str, Any]:
    """Return the variables of a running function, without keeping their values alive.

    Before Python 3.13 a frame keeps the dict that it gives, and so the batch and the outputs of
    this step until the function ends. A script that has called `locals()` has the same dict.
    """
    given = frame.f_locals
    if not frame.f_code.co_flags & CO_OPTIMIZED:
        return dict(given)  # the body of a module: its variables themselves
    variables = dict(given)
    if type(given) is dict and sys.getrefcount(given) <= REFERENCES:
        given.clear()
    return variables


def _named(values: dict[Any, Any], before: str, owner: Any) -> Iterator[Reached]:
    for name, value in list(values.items()):
        # Names with __ are those of Python itself, among them its modules.
        if not (isinstance(name, str) and name.startswith("__")):
            yield Reached(value, f"{before}{name}", owner)


def _within(reached: Reached) -> Iterator[Reached]:
    """Yield what an object holds; nothing for one that belongs to Python or torch."""
    value, path, kind = reached.value, reached.path, type(reached.value)
    if issubclass(kind, FINAL):
        return
    # The methods of dict and list themselves: a class of the script may compute what it gives.
    if issubclass(kind, dict):
        if dict.__len__(value) <= ENTRIES_MAX:
            for key, each in list(dict.items(value)):
                if type(key) in (str, int):
                    yield Reached(each, f"{path}[{key!r}]", None)
    elif issubclass(kind, list | tuple):
        base = list if issubclass(kind, list) else tuple
        if base.__len__(value) <= ENTRIES_MAX:
            entries = list(base.__iter__(value))
            yield from (Reached(each, f"{path}[{at}]", None) for at, each in enumerate(entries))
    elif kind is FunctionType:
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            if cell != type(cell)():
                yield Reached(cell.cell_contents, f"{path}.{name}", None)
    elif kind is MethodType:
        yield Reached(value.__self__, f"{path}.__self__", None)
    elif kind is partial:
        yield Reached((value.func, value.args, value.keywords), path, None)
    elif kind is GeneratorType:
        if value.gi_frame is not None:
            yield from _named(locals_of(value.gi_frame), f"{path}: ", None)
    elif issubclass(kind, torch.nn.Module):
        for name, part in value.named_modules():
            inner = f"{path}.{name}" if name else path
            if _package(type(part)) not in CLOSED:
                public = {k: v for k, v in vars(part).items() if not k.startswith("_")}
                yield from _named(public, f"{inner}.", part)
    elif _package(kind) not in CLOSED:
        yield from _named(attributes_of(value), f"{path}.", value)


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object itself, without those of its class."""
    try:
        attributes: dict[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return attributes


def leads_nowhere(value: Any) -> bool:
    """Return True for a plain value, and for an object of Python or torch."""
    kind = type(value)
    return issubclass(kind, FINAL) or (kind is not dict and _package(kind) in CLOSED)


def _package(kind: type) -> str:
    return str(getattr(kind, "__module__", "")).partition(".")[0]
