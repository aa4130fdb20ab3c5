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
from types import FrameType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any, Final

import torch

from paceline.worker.script_frames import belongs_to_script

OBJECTS_MAX: Final = 50_000
"""Objects that are looked at; a script with more has long lists of data."""
ENTRIES_MAX: Final = 4_096
"""Entries of a container that is looked into."""
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
    """Return what the variables of the script lead to, by `id`, nearest variables first.

    The main thread is in the script, or waits in a call of it.
    """
    found: dict[int, Reached] = {}
    level = list(_variables())
    while level and len(found) < OBJECTS_MAX:
        following: list[Reached] = []
        for each in level:
            if id(each.value) in found or each.value is None or isinstance(each.value, bool):
                continue
            found[id(each.value)] = each
            following += _within(each)
        level = following
    return found


def _variables() -> Iterator[Reached]:
    frames: list[FrameType] = []
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001
    while frame is not None:
        if belongs_to_script(frame.f_code.co_filename):
            frames.append(frame)
        frame = frame.f_back
    seen: set[int] = set()
    for frame in reversed(frames):
        name = frame.f_code.co_name
        if id(frame.f_globals) not in seen:
            seen.add(id(frame.f_globals))
            yield from _named(frame.f_globals, f"{frame.f_globals.get('__name__')}: ", None)
        if frame.f_locals is not frame.f_globals:
            yield from _named(frame.f_locals, f"{name}: ", None)


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
    if issubclass(kind, dict):
        if len(value) <= ENTRIES_MAX:
            yield from (
                Reached(each, f"{path}[{key!r}]", None)
                for key, each in list(value.items())
                if isinstance(key, str | int)
            )
    elif issubclass(kind, list | tuple):
        if len(value) <= ENTRIES_MAX:
            yield from (Reached(each, f"{path}[{at}]", None) for at, each in enumerate(value))
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
            yield from _named(value.gi_frame.f_locals, f"{path}: ", None)
    elif issubclass(kind, torch.nn.Module):
        for name, part in value.named_modules():
            inner = f"{path}.{name}" if name else path
            if type(part).__module__.partition(".")[0] not in CLOSED:
                public = {k: v for k, v in vars(part).items() if not k.startswith("_")}
                yield from _named(public, f"{inner}.", part)
    elif kind.__module__.partition(".")[0] not in CLOSED:
        try:
            attributes = object.__getattribute__(value, "__dict__")
        except AttributeError:
            return
        yield from _named(attributes, f"{path}.", value)
