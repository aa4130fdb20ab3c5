"""Which arrays a script carries from one batch to the next, read from its source (S9).

`center = 0.9 * center + 0.1 * mean`, `memory[places] = features` and `self.mean += delta` make a
tensor or an array from itself, and so does `total = self.count + n`, if `self.count = total`
follows. `images = images / 255` does so too, but belongs to one batch: the loop in which it stands
gives `images` another value each time. This module only reads sources; `own_counts` reads and sets
the arrays.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Final

from paceline.train.script.expressions import READ, assigned, last_word, read_in

OVERWRITING: Final = {
    *("copy_", "zero_", "fill_", "set_", "resize_", "detach_", "requires_grad_", "share_memory_"),
    *("normal_", "uniform_", "random_", "bernoulli_", "exponential_", "geometric_", "cauchy_"),
}
"""Methods of a tensor that end with `_` and do not make its new value from the old one."""
NUMERIC: Final = {"torch", "np", "numpy"}
"""Modules whose functions make a new value of an array: `torch.cat([memory, rows])`."""
MODULE: Final = ("<module>", 1)
Scope = tuple[str, int]
"""Name and first line of a function, as its code has them; MODULE for the body of a file."""
Function = ast.FunctionDef | ast.AsyncFunctionDef
Loops = tuple[ast.AST, ...]


@dataclass(slots=True)
class ArrayUpdates:
    """What the source of one file makes from itself, by the last word of what it assigns to."""

    variables: dict[Scope, set[str]] = field(default_factory=dict)
    """Variables of a function that it carries through a loop."""
    shared: set[str] = field(default_factory=set)
    """Variables that a function changes and does not own: of its module or a function around it."""
    attributes: set[str] = field(default_factory=set)
    of_self: set[str] = field(default_factory=set)
    """Those of these attributes that a method changes in its own object."""
    of_others: set[str] = field(default_factory=set)
    """Those that something else changes, so perhaps in a namespace."""
    keys: set[str] = field(default_factory=set)
    in_place: set[str] = field(default_factory=set)
    """Those of all these whose memory changes; the others are bound to new arrays."""
    resets: set[str] = field(default_factory=set)
    """Those that get a value of another kind in a loop or a method, so perhaps in each epoch."""

    def of(self, code: CodeType) -> set[str]:
        """Return the variables that a function carries."""
        is_module = code.co_name == MODULE[0]
        scope = MODULE if is_module else (code.co_name, code.co_firstlineno)
        names = {*code.co_varnames, *code.co_cellvars, *code.co_freevars, *code.co_names}
        return (self.variables.get(scope, set()) | self.shared) & names

    def of_module(self) -> set[str]:
        """Return the globals that a file carries."""
        return self.variables.get(MODULE, set()) | self.shared

    def without(self, names: set[str]) -> ArrayUpdates:
        """Return the updates of other words than these."""
        return replace(
            self,
            variables={scope: own - names for scope, own in self.variables.items()},
            shared=self.shared - names,
            attributes=self.attributes - names,
            of_self=self.of_self - names,
            of_others=self.of_others - names,
            keys=self.keys - names,
        )


def array_updates(tree: ast.Module) -> ArrayUpdates:
    """Return which arrays a file carries."""
    updates = ArrayUpdates()
    nodes = [each for each in ast.walk(tree) if isinstance(each, Function | ast.Module)]
    functions = {each.name for each in nodes if not isinstance(each, ast.Module)}
    scopes = [_Scope(each, functions) for each in nodes]
    changing = {scope.name: scope.changed_parameters() for scope in scopes}
    for scope in scopes:
        scope.note_calls(changing)
        scope.add_to(updates)
    return updates


@dataclass(slots=True)
class _Rebinding:
    """A statement that gives something a value of another kind."""

    loops: Loops
    always: bool
    """True if each turn of the innermost loop makes it."""


@dataclass(slots=True)
class _Update:
    """A statement that makes something from itself."""

    target: ast.expr
    loops: Loops
    in_place: bool


class _Scope:
    """The statements of one function, or of a file outside its functions."""

    def __init__(self, node: Function | ast.Module, functions: Collection[str]) -> None:
        """Read the statements.

        Args:
            node: The function or the file.
            functions: Names of all functions of the file.
        """
        self._functions = functions
        is_module = isinstance(node, ast.Module)
        self.name = MODULE[0] if isinstance(node, ast.Module) else node.name
        lines = [] if isinstance(node, ast.Module) else [d.lineno for d in node.decorator_list]
        self.scope = MODULE if is_module else (self.name, min([getattr(node, "lineno", 1), *lines]))
        arguments = [] if isinstance(node, ast.Module) else ast.walk(node.args)
        self.parameters = [each.arg for each in arguments if isinstance(each, ast.arg)]
        self.declared: set[str] = set()
        self.updates: list[_Update] = []
        self.fresh: dict[str, list[_Rebinding]] = {}
        """Text of a target -> statements that give it a value of another kind."""
        self._words: dict[str, str] = {}
        self._calls: list[tuple[ast.Call, Loops]] = []
        self._sources: dict[str, tuple[set[str], bool]] = {}
        """Text of a target -> what its value was made of, perhaps by other variables, and True if
        that was computed and not only converted."""
        for statement in node.body:
            self._visit(statement, (), frozenset(), always=True)

    def _visit(self, node: ast.AST, loops: Loops, begun: frozenset[str], *, always: bool) -> None:
        """Note what a statement changes and binds.

        Args:
            node: The statement, or a part of it.
            loops: Loops around it.
            begun: Texts of targets whose first value is set here, as in `if x is None: x = ...`.
            always: True if each turn of the innermost loop comes here.
        """
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Lambda():
                return
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                self.declared.update(names)
            case ast.For() | ast.AsyncFor() | ast.While():
                loops, always = (*loops, node), True
            case ast.If(test=test, orelse=other):
                always = always and bool(other)
                inside = [each for part in ast.walk(node) for each, _ in _changed(part)]
                begun = begun.union(read_in(test), map(ast.unparse, inside))
            case ast.Call():
                self._calls.append((node, loops))
        changed = [_Update(target, loops, in_place) for target, in_place in _changed(node)]
        self.updates += changed
        texts = {ast.unparse(each.target) for each in changed}
        for target, value in _bound(node):
            text = ast.unparse(target)
            sources, computed = self._sources_of(value)
            if text in texts:
                pass
            elif text in sources and computed:
                self.updates.append(_Update(target, loops, in_place=False))
            elif text not in begun and not _converts(node, text):
                self.fresh.setdefault(text, []).append(_Rebinding(loops, always))
                self._words[text] = last_word(target)
            self._sources[text] = sources, computed
        for child in ast.iter_child_nodes(node):
            self._visit(child, loops, begun, always=always)

    def _sources_of(self, value: ast.expr | None) -> tuple[set[str], bool]:
        """Return what a value is made of, and True if it is computed from that."""
        if value is None:
            return set(), False
        sources, computed = read_in(value), _is_computed(value, self._functions)
        for text in list(sources):
            before, was_computed = self._sources.get(text, (set[str](), False))
            sources |= before
            computed |= was_computed
        return sources, computed

    def changed_parameters(self) -> dict[int, str]:
        """Return the parameters that the function changes in place, by position."""
        changed = {
            each.target.id
            for each in self.updates
            if each.in_place and isinstance(each.target, ast.Name)
        }
        own = [name for name in self.parameters if name != "self"]
        return {at: name for at, name in enumerate(own) if name in changed - self.fresh.keys()}

    def note_calls(self, changing: dict[str, dict[int, str]]) -> None:
        """Add what is given to functions that change it in place."""
        for call, loops in self._calls:
            parameters = changing.get(last_word(call.func), {})
            given = {at: value for at, value in enumerate(call.args) if at in parameters}
            named = [each.value for each in call.keywords if each.arg in parameters.values()]
            for value in [*given.values(), *named]:
                self.updates.append(_Update(_whole(value), loops, in_place=True))

    def add_to(self, updates: ArrayUpdates) -> None:
        """Add what the function carries to what its file does."""
        for update in self.updates:
            target, text = update.target, ast.unparse(update.target)
            fresh, word = self.fresh.get(text, []), last_word(target)
            loop = update.loops[-1] if update.loops else None
            through_loop = loop is not None and not any(
                loop in each.loops and each.always for each in fresh
            )
            match target:
                case ast.Name() if self._is_shared(word):
                    updates.shared.add(word)
                case ast.Name() if through_loop:
                    updates.variables.setdefault(self.scope, set()).add(word)
                case ast.Attribute(value=holder) if through_loop or not fresh:
                    updates.attributes.add(word)
                    of_self = last_word(holder) == "self"
                    (updates.of_self if of_self else updates.of_others).add(word)
                case ast.Subscript() if through_loop or not fresh:
                    updates.keys.add(word)
                case _:
                    continue
            if update.in_place:
                updates.in_place.add(word)
        is_start = self.name in ("__init__", MODULE[0])
        for text, places in self.fresh.items():
            is_variable = text == self._words[text]
            if any(each.loops for each in places) or not (is_variable or is_start):
                updates.resets.add(self._words[text])

    def _is_shared(self, name: str) -> bool:
        if name in self.declared:
            return name not in self.fresh
        owned = name in self.parameters or name in self.fresh or self.scope == MODULE
        bound = any(not each.in_place for each in self.updates if ast.unparse(each.target) == name)
        return not owned and not bound


def _changed(node: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
    """Yield what a statement or expression makes from itself, and True if in place."""
    match node:
        case ast.AugAssign(target=target):
            yield _whole(target), True
        case ast.Assign():
            for target, value in assigned(node):
                if isinstance(target, ast.Subscript) and _whole(target) is not target:
                    yield _whole(target), True
                elif isinstance(target, READ) and _combines(value, ast.unparse(target)):
                    yield target, False
        case ast.Call(func=ast.Attribute(value=target, attr=method), args=arguments):
            is_method = method.endswith("_") and not method.endswith("__")
            if is_method and method not in OVERWRITING:
                yield _whole(target), True
            elif method == "at" and arguments:  # np.add.at(array, places, values)
                yield _whole(arguments[0]), True
            yield from _outputs(node)
        case ast.Call():
            yield from _outputs(node)


def _outputs(call: ast.Call) -> Iterator[tuple[ast.expr, bool]]:
    """Yield the `out` of a call that also reads it."""
    for keyword in call.keywords:
        text = ast.unparse(keyword.value)
        if keyword.arg == "out" and any(text in read_in(each) for each in call.args):
            yield _whole(keyword.value), True


def _whole(target: ast.expr) -> ast.expr:
    """Return the array of `array[places]` or `array.data`; an entry of a dict as it is."""
    while True:
        match target:
            case ast.Subscript(slice=ast.Constant(value=str())):
                return target
            case ast.Subscript(value=inner):
                target = inner
            case ast.Attribute(value=inner, attr="data") if last_word(inner) != "self":
                target = inner
            case _:
                return target


def _combines(value: ast.expr, text: str) -> bool:
    """Return True if an expression makes a new value from the old one, and does not convert it."""
    for part in ast.walk(value):
        match part:
            case ast.BinOp() if text in read_in(part):
                return True
            case ast.Call(func=function, args=arguments) if _root(function) in NUMERIC:
                if any(text in read_in(each) for each in arguments):
                    return True
    return False


def _converts(node: ast.AST, text: str) -> bool:
    """Return True for `x = x.to(device)` and the like: another form of the same value."""
    match node:
        case ast.Assign(value=ast.Call() as value) | ast.AnnAssign(value=ast.Call() as value):
            function = value.func
            return isinstance(function, ast.Attribute) and ast.unparse(function.value) == text
    return False


def _is_computed(value: ast.expr, functions: Collection[str]) -> bool:
    """Return True if a value is computed by operators, by torch or numpy, or in the same file."""
    return any(
        isinstance(part, ast.BinOp)
        or (
            isinstance(part, ast.Call)
            and (_root(part.func) in NUMERIC or last_word(part.func) in functions)
        )
        for part in ast.walk(value)
    )


def _bound(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """Yield what a statement binds, with the value if that is an expression."""
    pairs: list[tuple[ast.expr, ast.expr | None]] = []
    match node:
        case ast.Assign():
            pairs += assigned(node)
        case ast.AnnAssign(target=target, value=ast.expr() as value):
            pairs.append((target, value))
        case ast.NamedExpr(target=target, value=value):
            pairs.append((target, value))
        case ast.For(target=target) | ast.AsyncFor(target=target):
            pairs.append((target, None))
        case ast.With(items=items) | ast.AsyncWith(items=items):
            pairs += [(part, None) for each in items if (part := each.optional_vars) is not None]
    for whole, source in pairs:
        for each in ast.walk(whole):
            match each:
                case ast.Name(ctx=ast.Store()) | ast.Attribute(ctx=ast.Store()):
                    yield each, source
                case ast.Subscript(ctx=ast.Store(), slice=ast.Constant(value=str())):
                    yield each, source


def _root(function: ast.expr) -> str:
    while isinstance(function, ast.Attribute):
        function = function.value
    return last_word(function)
