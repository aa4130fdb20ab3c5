"""The layer in which a test runs, read from the marks in its source without importing it.

The layers are `make test-fast`, `make test` and `make test-all`. A test that needs processes or
takes long is not in the fast layer. A test that is exhaustive, or all of whose cases are, runs in
`make test-all` only.
"""

from __future__ import annotations

import ast
import gc
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
SLOW_MARKS: Final = frozenset({"processes", "cluster_programs", "long"})
EXHAUSTIVE: Final = "exhaustive"
MARK: Final = "pytest.mark."
OUTSIDE: Final = ("tests/benchmarks/",)
"""Folders that no layer collects; see `collect_ignore` in tests/conftest.py."""


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a file, which must not change while this process lives."""
    was_on = gc.isenabled()
    gc.disable()  # it would search the many nodes of all trees again and again
    try:
        return ast.parse(path.read_text())
    finally:
        if was_on:
            gc.enable()


class Layer(StrEnum):
    """The fastest of the three commands that runs a test."""

    FAST = "fast"
    TEST = "test"
    ALL = "all"


ORDER: Final = tuple(Layer)


class NoSuchTestError(LookupError):
    """Raised for a name that stands for no test; the message names what is missing."""


def layer_of(test: str) -> Layer:
    """Return the layer of a test.

    Args:
        test: `tests/FILE.py::FUNCTION`, or `tests/FILE.py::FUNCTION[CASE]` for one case, where CASE
            is the id of one of its parameters, or the part of the id before `_`.

    Returns:
        The layer.

    Raises:
        NoSuchTestError: The file or the function does not exist, it is not a test, or no layer
            runs it.
    """
    file, _, rest = test.partition("::")
    function, _, case = rest.rstrip("]").partition("[")
    if file.startswith(OUTSIDE):
        raise NoSuchTestError(f"{test}: no layer runs tests of this folder")
    if not Path(file).name.startswith("test_") or not function.startswith("test_"):
        raise NoSuchTestError(f"{test}: write it as tests/FOLDER/test_FILE.py::test_NAME")
    module = _module(file)
    if module is None:
        raise NoSuchTestError(f"{test}: there is no file {file}")
    if function not in module.functions:
        raise NoSuchTestError(f"{test}: {file} has no function {function}")
    return module.layer(function, case)


@cache
def _module(file: str) -> _Module | None:
    path = ROOT / file
    return _Module(tree_of(path)) if path.is_file() else None


class _Module:
    def __init__(self, tree: ast.Module) -> None:
        self.functions = {
            node.name: node
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        self.names: dict[str, ast.expr] = {}
        """Expressions that are assigned at module level, by name."""
        for node in tree.body:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self.names[name] = value
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                    self.names[name] = value

    def layer(self, function: str, case: str) -> Layer:
        """Return the layer of a function, or of one of its cases."""
        marks, every_case = set[str](), False
        if "pytestmark" in self.names:
            marks |= self._marks(self.names["pytestmark"])
        for decorator in self.functions[function].decorator_list:
            if (
                isinstance(decorator, ast.Call)
                and ast.unparse(decorator.func) == MARK + "parametrize"
            ):
                values = decorator.args[1] if len(decorator.args) > 1 else None
                every_case |= values is not None and self._all_exhaustive(values, case)
            else:
                marks |= self._marks(decorator)
        if EXHAUSTIVE in marks or every_case:
            return Layer.ALL
        return Layer.TEST if marks & SLOW_MARKS else Layer.FAST

    def _marks(self, expression: ast.expr) -> set[str]:
        """Return the names of the marks in a decorator, or in a list of marks."""
        match expression:
            case ast.Name(id=name) if name in self.names:
                return self._marks(self.names[name])
            case ast.Call(func=func):
                return self._marks(func)
            case ast.List(elts=each) | ast.Tuple(elts=each):
                return set[str]().union(*map(self._marks, each))
        dotted = ast.unparse(expression)
        return {dotted.removeprefix(MARK)} if dotted.startswith(MARK) else set()

    def _all_exhaustive(self, values: ast.expr, case: str) -> bool:
        """Return True if no case, or not the given case, of a parameter runs in `make test`.

        An expression that cannot be read, such as a condition, counts as running:
        tests/test_promises.py compares the result with what pytest collects.

        Returns:
            True if all (or the given one) are exhaustive.
        """
        match values:
            case ast.Name(id=name) if name in self.names:
                return self._all_exhaustive(self.names[name], case)
            case ast.List(elts=each) | ast.Tuple(elts=each):
                meant = [one for one in each if case and self._names(one, case)]
                return bool(each) and all(map(self._is_exhaustive, meant or each))
            case ast.ListComp(elt=one) | ast.GeneratorExp(elt=one):
                return self._is_exhaustive(one)
            case ast.Call(func=ast.Name(id="exhaustive_except"), args=[kept, _]):
                if isinstance(kept, ast.Name):
                    kept = self.names.get(kept.id, kept)
                if not isinstance(kept, ast.List | ast.Tuple):
                    return False
                plain = all(isinstance(one, ast.Constant) for one in kept.elts)
                named = any(self._names(one, case) for one in kept.elts)
                return not kept.elts or bool(case and plain and not named)
        return False

    def _is_exhaustive(self, one: ast.expr) -> bool:
        match one:
            case ast.Starred(value=value):
                return self._all_exhaustive(value, "")
            case ast.Call(func=ast.Name(id="exhaustive")):
                return True
            case ast.Call(func=func, keywords=keywords) if ast.unparse(func) == "pytest.param":
                marks = [each.value for each in keywords if each.arg == "marks"]
                return any(EXHAUSTIVE in self._marks(each) for each in marks)
        return False

    def _names(self, one: ast.expr, case: str) -> bool:
        return any(
            isinstance(node, ast.Constant) and str(node.value) == case for node in ast.walk(one)
        )
