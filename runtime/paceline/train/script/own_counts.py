"""Counts that a script keeps by itself, on a rank that joins (S9).

`step += 1`, `self.updates += 1` and `for step in range(n): batch = next(batches)` count batches. A
rank that joins is not given those that are averaged, so its own counts are behind. They are the
same on all ranks at the same place of the script, so it takes those of its donor: at the batch with
which it joins within a pass, or in the operation with which it joins between passes.

A count is a variable, an attribute of an object, or an entry of a dict or namespace in a variable
or attribute that the script's source increases or decreases by a constant number, and that is not
made from the rank or a seed. The number of a `for` loop over a range belongs to the loop and cannot
be set, so a rank whose loop is elsewhere cannot join.

A best value, as in `if loss < best: best = loss`, is taken over in the same way: with another one,
a rank would stop early at another step than the others.
"""

from __future__ import annotations

import ast
import ctypes
import sys
import weakref
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any, Final

from paceline.train.script.reach import (
    Reached,
    attributes_of,
    leads_nowhere,
    locals_of,
    script_frames,
)
from paceline.worker.script_engine import LeftBehindError
from paceline.worker.script_frames import belongs_to_script

RANGES: Final = ("range", "trange")
"""Functions whose loops count alike on all ranks."""
RANGE_ARGUMENTS_MAX: Final = 2
"""With a step, as in `range(rank, n, size)`, ranks share the numbers."""
RANKS_OWN: Final = ("rank", "seed")
"""Parts of the names of what differs between ranks: such a count is left as it is."""
CLOCKS: Final = {
    *("time", "monotonic", "perf_counter", "process_time"),
    *("time_ns", "monotonic_ns", "perf_counter_ns", "process_time_ns"),
}
"""Functions whose values mean nothing on another machine."""
ORDERS: Final = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
"""Comparisons by which a best value is kept."""
NUMBERS: Final = (int, float, type(None))
"""Types of what is taken over: None stands for no number yet."""
CONTAINERS: Final = (dict, Namespace, SimpleNamespace)
"""What a script puts its counts into, beside its own classes."""
FRAME: Final = "function "
Number = int | float | None
Counts = list[Any]
"""What `OwnCounts.read` returns, as plain data: for each object and running function its name, its
counts, and the numbers of the loops over ranges or enumerate() in which it is."""


@dataclass(slots=True)
class Counting:
    """What the source of one file counts."""

    names: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    of_others: set[str] = field(default_factory=set)
    """Those of these attributes that are not `self`'s, so perhaps a namespace's."""
    keys: set[str] = field(default_factory=set)
    loops: list[tuple[str, int, int]] = field(default_factory=list)
    """Variable of a loop over a range, and the first and last line of its body."""
    enumerated: list[tuple[str, int, int]] = field(default_factory=list)
    """Variable with the number of a loop over enumerate(), and the lines of its head."""


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
        match node:
            case ast.For(target=ast.Name(id=name), body=body) if _is_range(node.iter):
                last = body[-1].end_lineno or body[-1].lineno
                found.loops.append((name, body[0].lineno, last))
            case ast.For(target=ast.Tuple(elts=[ast.Name(id=name), *_])) if _enumerates(node.iter):
                found.enumerated.append((name, node.lineno, node.iter.end_lineno or node.lineno))
        for target in (_counted(node), *_best(node)):
            match target:
                case ast.Name(id=name) if name not in own:
                    found.names.add(name)
                case ast.Attribute(value=holder, attr=name) if name not in own:
                    found.attributes.add(name)
                    if _word(holder) != "self":
                        found.of_others.add(name)
                case ast.Subscript(slice=ast.Constant(value=str(name))) if name not in own:
                    found.keys.add(name)
    return found


@cache
def counting_of(code: CodeType) -> Counting:
    """Return what a function of the script may count."""
    whole = counting_in(code.co_filename)
    names = {*code.co_varnames, *code.co_cellvars, *code.co_freevars, *code.co_names}
    return replace(
        whole,
        names=whole.names & names,
        loops=[each for each in whole.loops if each[0] in names],
        enumerated=[each for each in whole.enumerated if each[0] in names],
    )


def _of_the_rank(tree: ast.AST) -> set[str]:
    """Return names that are set from the rank, a seed or a clock, or that are named for them."""
    names = set()
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        words = [*map(_word, ast.walk(value))] if isinstance(value, ast.AST) else []
        for name in filter(None, map(_word, targets)):
            is_named = any(part in word.lower() for part in RANKS_OWN for word in [name, *words])
            if is_named or CLOCKS.intersection(words):
                names.add(name)
    return names


def _word(node: ast.AST | None) -> str:
    match node:
        case ast.Name(id=word) | ast.Attribute(attr=word):
            return word
        case ast.Subscript(slice=ast.Constant(value=str(word))):
            return word
        case ast.Constant(value=str(word)):
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


def _best(node: ast.AST) -> Iterator[ast.expr]:
    """Yield what a statement keeps the least or the greatest value in."""
    match node:
        case ast.Assign():
            for target, value in _assigned(node):
                match value:
                    case ast.Call(func=ast.Name(id="min" | "max"), args=choices):
                        pass
                    case ast.IfExp(test=ast.Compare(), body=one, orelse=other):
                        choices = [one, other]
                    case _:
                        continue
                if ast.unparse(target) in map(ast.unparse, choices):
                    yield target
        case ast.If(test=test):
            compared = {
                ast.unparse(part)
                for each in ast.walk(test)
                if isinstance(each, ast.Compare) and isinstance(each.ops[0], ORDERS)
                for part in ast.walk(each)
                if isinstance(part, ast.Name | ast.Attribute | ast.Subscript)
            }
            for inner in ast.walk(node) if compared else ():
                for target, value in _assigned(inner) if isinstance(inner, ast.Assign) else ():
                    if {ast.unparse(target), ast.unparse(value)} <= compared:
                        yield target


def _assigned(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    for target in node.targets:
        match target, node.value:
            case ast.Tuple(elts=targets), ast.Tuple(elts=values) if len(targets) == len(values):
                yield from zip(targets, values, strict=True)
            case _:
                yield target, node.value


def _is_range(source: ast.expr) -> bool:
    for node in ast.walk(source):
        match node:
            case ast.Call(func=ast.Name(id=name), args=arguments) if name in RANGES:
                return len(arguments) <= RANGE_ARGUMENTS_MAX
    return False


def _enumerates(source: ast.expr) -> bool:
    words = [node.func for node in ast.walk(source) if isinstance(node, ast.Call)]
    return any(isinstance(word, ast.Name) and word.id == "enumerate" for word in words)


class OwnCounts:
    """Reads the counts of the script in this process, and sets them. Main thread."""

    def __init__(self) -> None:
        self._owners: dict[str, tuple[weakref.ref[Any], Counting]] = {}
        """Objects whose class is the script's and may count, by how the script reaches them, and
        what its file counts."""

    def begin(self, reached: Mapping[int, Reached]) -> None:
        """Find the objects that count, when training begins and where this rank joins."""
        self._owners = {}
        for each in reached.values():
            counting = _counting_of(each.value)
            if counting.attributes or counting.keys:
                with suppress(TypeError):  # an object without weak references
                    self._owners[each.path] = weakref.ref(each.value), counting

    def read(self) -> Counts:
        """Return the counts of objects and of running functions, the outermost first.

        The main thread is in the script, or waits in a call of it.
        """
        counts: Counts = [
            [path, _values(attributes_of(owner), counting.attributes, counting), {}]
            for path, owner, counting in self._living()
        ]
        for frame in script_frames():
            counting = counting_of(frame.f_code)
            running = [*_at(frame, counting.loops), *_at(frame, counting.enumerated)]
            found: dict[str, Number] = {}
            if running or counting.names or counting.of_others or counting.keys:
                values = _variables(frame)
                found = _values(values, counting.names, counting)
                running = [name for name in running if type(values.get(name)) is int]
            counts.append([_name(frame), found, {name: values[name] for name in running}])
        return counts

    def take(self, counts: Counts) -> None:
        """Set the counts to those of another rank at the same place.

        It raises LeftBehindError if a loop over a range has another number here.

        Args:
            counts: What `read` has returned there. If other functions run here, theirs are not set.
        """
        theirs_by_path = {path: found for path, found, _ in counts}
        for path, owner, counting in self._living():
            found = theirs_by_path.get(path, {})
            for name, value in _take(
                attributes_of(owner), counting.attributes, counting, found
            ).items():
                setattr(owner, name, value)
        frames = script_frames()
        theirs = [each for each in counts if each[0].startswith(FRAME)]
        if [_name(frame) for frame in frames] == [name for name, _, _ in theirs]:
            for frame, (_, found, loops) in zip(frames, theirs, strict=True):
                _take_in_frame(frame, found, loops)

    def last_number(self, counts: Counts, loop: FrameType) -> int | None:
        """Return the last number of a loop over enumerate() on another rank.

        Args:
            counts: What `read` has returned there, when the loop took a batch.
            loop: Frame of the same loop here, which takes a batch.

        Returns:
            The number; None if it is not known.
        """
        for name in _at(loop, counting_of(loop.f_code).enumerated):
            for owner, _, loops in counts:
                if owner == _name(loop) and name in loops:
                    return int(loops[name])
        return None

    def _living(self) -> Iterator[tuple[str, Any, Counting]]:
        for path, (reference, counting) in self._owners.items():
            if (owner := reference()) is not None:
                yield path, owner, counting


def _take_in_frame(frame: FrameType, found: Mapping[str, Number], loops: Mapping[str, int]) -> None:
    counting = counting_of(frame.f_code)
    values = _variables(frame)
    for name in _at(frame, counting.loops):
        if name in values and loops.get(name, values[name]) != values[name]:
            raise LeftBehindError(
                f"{frame.f_code.co_filename}:{frame.f_lineno}: the loop over `{name}` is at "
                f"{values[name]} here and at {loops[name]} on the other ranks, since it counts "
                "batches that this rank is not given"
            )
    _set_variables(frame, _take(values, counting.names, counting, found))


def _take(
    values: dict[str, Any], names: set[str], counting: Counting, found: Mapping[str, Number]
) -> dict[str, Number]:
    """Set the entries of containers; return the variables or attributes that have to change."""
    changed: dict[str, Number] = {}
    for path, value, holder, name in _counts_in(values, names, counting):
        new = found.get(path, value)
        if holder is values:
            if new != value:
                changed[name] = new
        else:
            holder[name] = new
    return changed


def _counting_of(value: Any) -> Counting:
    """Return what the file of an object's class counts, if it is the script's."""
    if leads_nowhere(value):
        return Counting()
    module = sys.modules.get(type(value).__module__)
    filename = getattr(module, "__file__", None) or ""
    return counting_in(filename) if filename and belongs_to_script(filename) else Counting()


def _name(frame: FrameType) -> str:
    return f"{FRAME}{frame.f_code.co_name}:{frame.f_code.co_firstlineno}"


def _variables(frame: FrameType) -> dict[str, Any]:
    return locals_of(frame) if frame.f_code.co_flags & CO_OPTIMIZED else frame.f_globals


def _at(frame: FrameType, loops: list[tuple[str, int, int]]) -> list[str]:
    """Return the variables of those loops that have the line at which a function is."""
    if not loops:
        return []
    line = frame.f_lineno or 0
    return [name for name, first, last in loops if first <= line <= last]


def _is_number(values: dict[str, Any], name: str) -> bool:
    return name in values and type(values[name]) in NUMBERS


def _values(values: dict[str, Any], names: set[str], counting: Counting) -> dict[str, Number]:
    return {path: value for path, value, _, _ in _counts_in(values, names, counting)}


def _counts_in(
    values: dict[str, Any], names: set[str], counting: Counting
) -> Iterator[tuple[str, Number, dict[str, Any], str]]:
    """Yield the counts among variables or attributes, and in the containers that they hold.

    Args:
        values: The variables, or the attributes of an object.
        names: Which of them are counts.
        counting: What is counted in containers.

    Yields:
        Path and value of a count, the dict that holds it, and its key there.
    """
    for name in names:
        if _is_number(values, name):
            yield name, values[name], values, name
    if not counting.keys and not counting.of_others:
        return
    for variable, value in list(values.items()):
        if isinstance(value, CONTAINERS) and not variable.startswith("__"):
            entries, keys = (
                (value, counting.keys)
                if isinstance(value, dict)
                else (vars(value), counting.of_others)
            )
            for key in keys:
                if _is_number(entries, key):
                    yield f"{variable}[{key}]", entries[key], entries, key


def _set_variables(frame: FrameType, changed: dict[str, Any]) -> None:
    if not changed:
        return
    if not frame.f_code.co_flags & CO_OPTIMIZED:
        frame.f_globals.update(changed)
        return
    given = frame.f_locals
    given.update(changed)
    if sys.version_info < (3, 13):  # from then on `f_locals` writes through (PEP 667)
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
