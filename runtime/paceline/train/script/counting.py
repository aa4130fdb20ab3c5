"""What the source of a script counts: the numbers that it makes from themselves (S9).

`step += 1`, `total += loss.item()`, `tau = max(tau * 0.99, 0.5)` and `if loss < best: best = loss`
carry a number from one batch to the next. So do `next(rates)` and a loop over a range. This module
only reads sources; `own_counts` reads and sets the numbers.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Final

from paceline.train.script.array_updates import ArrayUpdates, array_updates
from paceline.train.script.expressions import READ, assigned, last_word, read_in

RANGES: Final = ("range", "trange")
"""Functions whose loops count alike on all ranks."""
RANGE_ARGUMENTS_MAX: Final = 2
"""With a step, as in `range(rank, n, size)`, ranks share the numbers."""
RANKS_OWN: Final = ("rank", "seed")
"""Parts of the names of what differs between ranks: such a number is left as it is."""
CLOCKS: Final = {
    *("time", "monotonic", "perf_counter", "process_time"),
    *("time_ns", "monotonic_ns", "perf_counter_ns", "process_time_ns"),
}
"""Functions whose values mean nothing on another machine."""
ORDERS: Final = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
"""Comparisons by which a best value is kept."""
ARITHMETIC: Final = {"min", "max", "int", "float", "abs", "round", "math"}
"""Names that bring no other value into an expression."""


@dataclass(slots=True)
class Counting:
    """What the source of one file counts, by the last word of what it assigns to."""

    names: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    of_self: set[str] = field(default_factory=set)
    """Those of these attributes that a method changes in its own object."""
    of_others: set[str] = field(default_factory=set)
    """Those that something else changes, so perhaps in a namespace."""
    keys: set[str] = field(default_factory=set)
    sums: set[str] = field(default_factory=set)
    """Those of all these into which other values go, as in `total += loss`: on each rank its own.
    The others follow from constants alone, or keep a least or greatest value."""
    iterators: set[str] = field(default_factory=set)
    """Names and attributes that are given to next()."""
    loops: list[tuple[str, int, int]] = field(default_factory=list)
    """Variable of a loop over a range, and the first and last line of its body."""
    enumerated: list[tuple[str, int, int]] = field(default_factory=list)
    """Variable with the number of a loop over enumerate(), and the lines of its head."""
    arrays: ArrayUpdates = field(default_factory=ArrayUpdates)
    held: set[str] = field(default_factory=set)
    """Names of the arrays that one function carries."""


@cache
def counting_in(filename: str) -> Counting:
    """Return what a file of the script counts; nothing if it cannot be read."""
    counting = Counting()
    try:
        tree = ast.parse(Path(filename).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return counting
    own = _of_the_rank(tree)
    for node in ast.walk(tree):
        match node:
            case ast.For(target=ast.Name(id=name), body=body) if _is_range(node.iter):
                last = body[-1].end_lineno or body[-1].lineno
                counting.loops.append((name, body[0].lineno, last))
            case ast.For(target=ast.Tuple(elts=[ast.Name(id=name), *_])) if _enumerates(node.iter):
                counting.enumerated.append((name, node.lineno, node.iter.end_lineno or node.lineno))
            case ast.Call(func=ast.Name(id="next"), args=[source, *_]):
                counting.iterators.add(last_word(source))
        for target, is_sum in _updated(node):
            if (word := last_word(target)) in own:
                continue
            match target:
                case ast.Name():
                    counting.names.add(word)
                case ast.Attribute(value=holder):
                    counting.attributes.add(word)
                    of_self = last_word(holder) == "self"
                    (counting.of_self if of_self else counting.of_others).add(word)
                case ast.Subscript(slice=ast.Constant(value=str())):
                    counting.keys.add(word)
                case _:
                    continue
            if is_sum:
                counting.sums.add(word)
    counting.iterators.discard("")
    counting.arrays = array_updates(tree).without(own)
    _add_indirect(counting, counting.arrays)
    return counting


def _add_indirect(counting: Counting, updates: ArrayUpdates) -> None:
    """Add what the source makes from itself by way of other variables, or in place."""
    known = counting.names | counting.attributes | counting.keys
    counting.names |= updates.shared.union(*updates.variables.values())
    counting.attributes |= updates.attributes
    counting.of_self |= updates.of_self
    counting.of_others |= updates.of_others
    counting.keys |= updates.keys
    counting.sums |= (counting.names | counting.attributes | counting.keys) - known


@cache
def counting_of(code: CodeType) -> Counting:
    """Return what a function of the script may count."""
    whole = counting_in(code.co_filename)
    names = {*code.co_varnames, *code.co_cellvars, *code.co_freevars, *code.co_names}
    return replace(
        whole,
        names=whole.names & names,
        iterators=whole.iterators & names,
        held=whole.arrays.of(code),
        loops=[each for each in whole.loops if each[0] in names],
        enumerated=[each for each in whole.enumerated if each[0] in names],
    )


def _of_the_rank(tree: ast.AST) -> set[str]:
    """Return names that follow from the rank, a seed or a clock, or that are named for them."""
    names: set[str] = set()
    copied: list[tuple[str, list[str]]] = []
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        named = [node.arg] if isinstance(node, ast.keyword) else map(last_word, targets)
        value = getattr(node, "value", None)
        parts = [*ast.walk(value)] if isinstance(value, ast.AST) else []
        words = [*map(last_word, parts)]
        for name in filter(None, named):
            is_named = any(part in word.lower() for part in RANKS_OWN for word in [name, *words])
            if is_named or CLOCKS.intersection(words):
                names.add(name)
            elif not any(isinstance(part, ast.Call) for part in parts):
                copied.append((name, words))
    known = -1
    while known < len(names):  # `self.at = start`, after `start = rank * size`
        known = len(names)
        names.update(name for name, words in copied if names.intersection(words))
    return names


def _updated(node: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
    """Yield what a statement makes from itself, and True if other values go into it."""
    match node:
        case ast.AugAssign(target=augmented, value=value):
            yield augmented, not _is_constant(value, augmented)
        case ast.Assign():
            for target, value in assigned(node):
                if ast.unparse(target) in read_in(value):
                    yield target, not (_is_constant(value, target) or _is_choice(value, target))
        case ast.NamedExpr(target=named, value=value) if ast.unparse(named) in read_in(value):
            yield named, not _is_constant(value, named)
        case ast.If(test=test):
            compared = {
                text
                for each in ast.walk(test)
                if isinstance(each, ast.Compare) and isinstance(each.ops[0], ORDERS)
                for text in read_in(each)
            }
            for inner in ast.walk(node) if compared else ():
                for target, value in assigned(inner) if isinstance(inner, ast.Assign) else ():
                    if {ast.unparse(target), ast.unparse(value)} <= compared:
                        yield target, False


def _is_constant(value: ast.expr, target: ast.expr) -> bool:
    """Return True if an expression holds nothing but constants and the target itself."""
    whole = ast.unparse(target)
    parts = [ast.unparse(part) for part in ast.walk(target) if isinstance(part, READ)]
    return all(
        text in (whole, *parts) or text.partition(".")[0] in ARITHMETIC for text in read_in(value)
    )


def _is_choice(value: ast.expr, target: ast.expr) -> bool:
    """Return True for `min(target, x)`, and for `x if x < target else target`."""
    match value:
        case ast.Call(func=ast.Name(id="min" | "max"), args=choices):
            pass
        case ast.IfExp(test=ast.Compare(), body=one, orelse=other):
            choices = [one, other]
        case _:
            return False
    return ast.unparse(target) in map(ast.unparse, choices)


def _is_range(source: ast.expr) -> bool:
    for node in ast.walk(source):
        match node:
            case ast.Call(func=ast.Name(id=name), args=arguments) if name in RANGES:
                return len(arguments) <= RANGE_ARGUMENTS_MAX
    return False


def _enumerates(source: ast.expr) -> bool:
    words = [node.func for node in ast.walk(source) if isinstance(node, ast.Call)]
    return any(isinstance(word, ast.Name) and word.id == "enumerate" for word in words)
