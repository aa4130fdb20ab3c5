"""Counts that a script keeps by itself, on a rank that joins (S9).

`step += 1`, `self.updates += 1` and `for step in range(n): batch = next(batches)` count batches. A
rank that joins is not given those that are averaged, so its own counts are behind. They are the
same on all ranks at the same place of the script, so it takes those of its donor: at the batch with
which it joins within a pass, or in the operation with which it joins between passes.

A count is a variable, an attribute, or an entry of a dict in a variable that the script's source
increases or decreases by a constant number, and that is not made from the rank or a seed. The
number of a `for` loop over a range belongs to the loop and cannot be set, so a rank whose loop is
elsewhere cannot join.
"""

from __future__ import annotations

import ast
import ctypes
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

from paceline.train.script.reach import Reached, leads_nowhere, locals_of, script_frames
from paceline.worker.script_engine import LeftBehindError
from paceline.worker.script_frames import belongs_to_script

RANGES: Final = ("range", "trange")
"""Functions whose loops count alike on all ranks."""
RANGE_ARGUMENTS_MAX: Final = 2
"""With a step, as in `range(rank, n, size)`, ranks share the numbers."""
RANKS_OWN: Final = ("rank", "seed")
"""Parts of the names of what differs between ranks: such a count is left as it is."""
FRAME: Final = "function "
Counts = list[Any]
"""What `OwnCounts.read` returns, as plain data: for each object and running function its name, its
counts, and the numbers of the loops over ranges in which it is."""


@dataclass(slots=True)
class Counting:
    """What the source of one file counts."""

    names: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    keys: set[str] = field(default_factory=set)
    loops: list[tuple[str, int, int]] = field(default_factory=list)
    """Variable of a loop over a range, and the first and last line of its body."""


@cache
def counting_in(filename: str) -> Counting:
    """Return what a file of the script counts; nothing if it cannot be read."""
    found = Counting()
    try:
        tree = ast.parse(Path(filename).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return found
    own = _of_the_rank(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.For) and isinstance(node.target, ast.Name) and _is_range(node.iter):
            last = node.body[-1].end_lineno or node.body[-1].lineno
            found.loops.append((node.target.id, node.body[0].lineno, last))
        match _counted(node):
            case ast.Name(id=name) if name not in own:
                found.names.add(name)
            case ast.Attribute(attr=name) if name not in own:
                found.attributes.add(name)
            case ast.Subscript(slice=ast.Constant(value=str(name))) if name not in own:
                found.keys.add(name)
    return found


def _of_the_rank(tree: ast.AST) -> set[str]:
    """Return names that are set from the rank, or whose word says that ranks may differ in them."""
    names = set()
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        words = [*map(_word, ast.walk(value))] if isinstance(value, ast.AST) else []
        for name in filter(None, map(_word, targets)):
            if any(part in word for part in RANKS_OWN for word in [name, *words]):
                names.add(name)
    return names


def _word(node: ast.AST | None) -> str:
    match node:
        case ast.Name(id=word) | ast.Attribute(attr=word):
            return word
        case ast.Subscript(slice=ast.Constant(value=str(word))):
            return word
    return ""


def _counted(node: ast.AST) -> ast.expr | None:
    """Return what a statement increases by a constant, as `x += 1` and `x = x + 1` do."""
    match node:
        case ast.AugAssign(target=target, op=ast.Add() | ast.Sub(), value=ast.Constant(value=by)):
            return target if type(by) is int else None
        case ast.Assign(
            targets=[target],
            value=ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=ast.Constant(value=by)),
        ):
            is_same = type(by) is int and ast.unparse(target) == ast.unparse(left)
            return target if is_same else None
    return None


def _is_range(source: ast.expr) -> bool:
    for node in ast.walk(source):
        match node:
            case ast.Call(func=ast.Name(id=name), args=arguments) if name in RANGES:
                return len(arguments) <= RANGE_ARGUMENTS_MAX
    return False


class OwnCounts:
    """Reads the counts of the script in this process, and sets them. Main thread."""

    def __init__(self) -> None:
        self._owners: dict[str, weakref.ref[Any]] = {}
        """Objects of the script with attributes that it counts by, by how it reaches them."""

    def begin(self, reached: Mapping[int, Reached]) -> None:
        """Find the objects that count, when training begins and where this rank joins."""
        self._owners = {}
        for each in reached.values():
            if not _attributes(each.value):
                continue
            with suppress(TypeError):  # an object without weak references
                self._owners[each.path] = weakref.ref(each.value)

    def read(self) -> Counts:
        """Return the counts of objects and of running functions, the outermost first.

        The main thread is in the script, or waits in a call of it.
        """
        counts: Counts = [[path, _values(owner), {}] for path, owner in self._living()]
        for frame in script_frames():
            counting = counting_in(frame.f_code.co_filename)
            running, found = _loops_at(frame, counting), {}
            loops: dict[str, int] = {}
            if running or _may_count(frame.f_code):
                values = _variables(frame)
                found = {path: value for path, value, _, _ in _counts_in(values, counting)}
                loops = {name: values[name] for name in running if _is_int(values, name)}
            counts.append([_name(frame), found, loops])
        return counts

    def take(self, counts: Counts) -> None:
        """Set the counts to those of another rank at the same place.

        It raises LeftBehindError if a loop over a range has another number here.

        Args:
            counts: What `read` has returned there. If other functions run here, theirs are not set.
        """
        owners = dict(self._living())
        for path, found, _ in counts:
            if path in owners:
                own = _values(owners[path])
                for name in own.keys() & found.keys():
                    setattr(owners[path], name, found[name])
        frames = script_frames()
        theirs = [each for each in counts if each[0].startswith(FRAME)]
        if [_name(frame) for frame in frames] == [name for name, _, _ in theirs]:
            for frame, (_, found, loops) in zip(frames, theirs, strict=True):
                _take(frame, found, loops)

    def _living(self) -> Iterator[tuple[str, Any]]:
        for path, reference in self._owners.items():
            if (owner := reference()) is not None:
                yield path, owner


def _take(frame: FrameType, found: Mapping[str, int], loops: Mapping[str, int]) -> None:
    counting = counting_in(frame.f_code.co_filename)
    values = _variables(frame)
    for name in _loops_at(frame, counting):
        if _is_int(values, name) and loops.get(name, values[name]) != values[name]:
            raise LeftBehindError(
                f"{frame.f_code.co_filename}:{frame.f_lineno}: the loop over `{name}` is at "
                f"{values[name]} here and at {loops[name]} on the other ranks, since it counts "
                "batches that this rank is not given"
            )
    changed = {}
    for path, value, owner, name in _counts_in(values, counting):
        new = found.get(path, value)
        if new == value:
            continue
        if owner is None:
            changed[name] = new
        else:
            owner[name] = new
    _set_variables(frame, changed)


def _attributes(value: Any) -> set[str]:
    """Return the attributes of an object that the file of its class counts by."""
    if leads_nowhere(value):
        return set()
    module = sys.modules.get(type(value).__module__)
    filename = getattr(module, "__file__", None) or ""
    if not filename or not belongs_to_script(filename):
        return set()
    return counting_in(filename).attributes


def _values(owner: Any) -> dict[str, int]:
    try:
        own = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return {}
    return {name: own[name] for name in _attributes(owner) if _is_int(own, name)}


def _name(frame: FrameType) -> str:
    return f"{FRAME}{frame.f_code.co_name}:{frame.f_code.co_firstlineno}"


def _variables(frame: FrameType) -> dict[str, Any]:
    return locals_of(frame) if frame.f_code.co_flags & CO_OPTIMIZED else frame.f_globals


def _loops_at(frame: FrameType, counting: Counting) -> list[str]:
    line = frame.f_lineno or 0
    return [name for name, first, last in counting.loops if first <= line <= last]


def _is_int(values: dict[str, Any], name: str) -> bool:
    return type(values.get(name)) is int


@cache
def _may_count(code: CodeType) -> bool:
    """Return False for a function without a variable that is a count."""
    counting = counting_in(code.co_filename)
    names = {*code.co_varnames, *code.co_cellvars, *code.co_freevars, *code.co_names}
    return bool(counting.keys or counting.names & names)


def _counts_in(values: dict[str, Any], counting: Counting) -> Iterator[tuple[str, int, Any, str]]:
    """Yield path, value, owner and name of each count; the owner of a variable is None."""
    for name in counting.names:
        if _is_int(values, name):
            yield name, values[name], None, name
    if not counting.keys:
        return
    for variable, value in list(values.items()):
        if type(value) is dict and not variable.startswith("__"):
            for key in counting.keys:
                if _is_int(value, key):
                    yield f"{variable}[{key}]", value[key], value, key


def _set_variables(frame: FrameType, changed: dict[str, int]) -> None:
    if not changed:
        return
    if not frame.f_code.co_flags & CO_OPTIMIZED:
        frame.f_globals.update(changed)
        return
    given = frame.f_locals
    given.update(changed)
    if sys.version_info < (3, 13):  # from then on `f_locals` writes through (PEP 667)
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
