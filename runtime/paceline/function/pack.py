"""Packing: turns a function of a notebook or module into the program of a job, as source.

Four rules decide how each name that the function uses is packed. A module, or an object that can be
imported from one, becomes an import. A function or class of the same notebook or file becomes its
source, by the same rules. Numbers, text, None, and lists and mappings of these become an
assignment. Anything else, such as a tensor or an open file, exists in this process only and is
refused by name.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import dis
import inspect
import linecache
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final

from paceline.function.errors import ArgumentError, FunctionError
from paceline.function.packed import Description, files_of

_ANNOTATIONS: Final = __future__.annotations.compiler_flag
_OURS: Final = frozenset({"paceline", "paceline_api"})
"""Packages that every worker image has."""
_PLAIN: Final = (bool, int, float, str, bytes, type(None))
_LOADS: Final = ("LOAD_GLOBAL", "LOAD_NAME")
_STORES: Final = ("STORE_GLOBAL", "STORE_NAME", "DELETE_GLOBAL", "DELETE_NAME")


def pack(
    function: Callable[..., Any],
    arguments: Mapping[str, Any] | None = None,
    *,
    packages: Sequence[str] = (),
) -> dict[str, str]:
    """Return the files of a program that calls `function(**arguments)`.

    Args:
        function: A plain function, defined with `def` at the top of a cell or file.
        arguments: Values by name, of the types that JSON knows.
        packages: Requirements that are installed before the function starts, as `pip install` takes
            them.

    Returns:
        The text of each file, by file name.

    Raises:
        ArgumentError: An argument cannot be sent, or `packages` is a text instead of a list. A
            function that cannot be sent raises FunctionError.
    """
    plain = _plain_function(function)
    given = dict(arguments or {})
    _check_arguments(plain, given)
    if isinstance(packages, str):
        raise ArgumentError(
            f'packages is the text "{packages}"', hint=f'write a list: packages=["{packages}"]'
        )
    surroundings = _Surroundings(plain)
    words = f"**{given!r}" if given else ""
    program = "\n\n".join(
        [
            f'"""Function {plain.__name__}, as it was sent with its job."""',
            *surroundings.parts(),
            f'if __name__ == "__main__":\n    {plain.__name__}({words})\n',
        ]
    )
    python = (sys.version_info.major, sys.version_info.minor)
    return files_of(Description(plain.__name__, python, tuple(packages)), program)


# ---- the function and its arguments ------------------------------------------------------------


def _plain_function(given: object) -> FunctionType:
    """Return `given` if it is a function that can stand alone.

    Raises:
        FunctionError: It is a method, a lambda, a closure, a generator or another kind of callable.
    """
    move = "write it as a function of its own with `def`, at the top of a cell or file"
    if inspect.ismethod(given):
        raise FunctionError(
            f"{given.__qualname__} is a method, and its object lives in this process only",
            hint=f"{move}, and make the object inside it",
        )
    if not inspect.isfunction(given):
        raise FunctionError(f"{type(given).__name__} {given!r:.60} is not a function", hint=move)
    if given.__name__ == "<lambda>":
        raise FunctionError("a lambda has no source of its own that could be sent", hint=move)
    function = inspect.unwrap(given)
    assert isinstance(function, FunctionType)
    name = function.__name__
    if function.__code__.co_freevars:
        listed = ", ".join(function.__code__.co_freevars)
        raise FunctionError(
            f"function {name} closes over {listed} of the function around it",
            hint=f"pass {listed} as an argument, or make it inside {name}",
        )
    if "." in function.__qualname__.rpartition("<locals>.")[2]:
        raise FunctionError(f"{function.__qualname__} is a function of a class", hint=move)
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise FunctionError(
            f"{name} is an async function, and nothing would wait for it",
            hint="send a plain function that calls asyncio.run(...)",
        )
    if inspect.isgeneratorfunction(function):
        raise FunctionError(
            f"{name} is a generator, and nothing would ask it for values",
            hint="send a plain function without `yield`",
        )
    return function


def _check_arguments(function: FunctionType, given: Mapping[str, Any]) -> None:
    signature = inspect.signature(function)
    try:
        signature.bind(**given)
    except TypeError as error:
        raise ArgumentError(
            f"function {function.__name__}{signature} does not fit its arguments: {error}",
            hint="give them by name, as in arguments={...}",
        ) from None
    for name, value in given.items():
        _check_value(name, value)


def _check_value(where: str, value: Any) -> None:
    """Check that a value survives JSON unchanged.

    Args:
        where: Name of the argument, with the path to the value inside it.
        value: The value.

    Raises:
        ArgumentError: JSON does not know the value.
    """
    kind = type(value)
    if kind is float and value not in (float("inf"), float("-inf")) and value == value:
        return
    if kind in (bool, int, str, type(None)):
        return
    if kind is list:
        for index, item in enumerate(value):
            _check_value(f"{where}[{index}]", item)
        return
    if kind is dict and all(type(key) is str for key in value):
        for key, item in value.items():
            _check_value(f"{where}[{key!r}]", item)
        return
    shown = f"{value!r:.60}" if kind in (float, dict, tuple) else f"of type {kind.__name__}"
    raise ArgumentError(
        f"argument {where} is {shown}, which JSON does not know",
        hint="give numbers, text, true or false, None, and lists and mappings of these; make "
        "everything else inside the function",
    )


# ---- what it uses ------------------------------------------------------------------------------


class _Surroundings:
    """Everything that the function's source needs around it, in the order of the program."""

    def __init__(self, function: FunctionType) -> None:
        self._function = function
        self._home = function.__globals__
        self._imports: dict[str, None] = {}
        self._constants: dict[str, str] = {}
        self._sources: dict[str, str] = {}
        """Source text by name. What a source needs when it is executed stands before it."""
        self._begun: set[str] = set()
        self._flags = function.__code__.co_flags & _ANNOTATIONS
        self._add_source(function.__name__, function)

    def parts(self) -> Iterator[str]:
        """Yield the parts of the program that precede the call: imports, constants, sources.

        Yields:
            The source text of one part.
        """
        if self._flags:
            yield "from __future__ import annotations"
        if self._imports:
            yield "\n".join(sorted(self._imports))
        if self._constants:
            yield "\n".join(f"{name} = {text}" for name, text in self._constants.items())
        yield from self._sources.values()

    def _add_source(self, name: str, what: FunctionType | type) -> None:
        self._begun.add(name)
        source = source_of(what)
        try:
            code = compile(source, "<function>", "exec", self._flags, dont_inherit=True)
        except SyntaxError as error:
            raise FunctionError(
                f"the source of {name} is not Python alone: {error.msg} in its line {error.lineno}",
                hint="leave commands of the notebook, such as !pip or %time, outside of it",
            ) from None
        tree = ast.parse(source)
        for used in globals_of(code):
            if used not in self._begun:
                self._add(used, name, tree)
        self._sources[name] = source

    def _add(self, name: str, user: str, tree: ast.Module) -> None:
        if name.startswith("__") and name.endswith("__"):
            return  # a name that each program has, such as __name__
        if name not in self._home:
            if hasattr(builtins, name):
                return
            raise FunctionError(
                f"{user} uses {name}, which is defined nowhere",
                hint=f"run the cell that defines {name}, or import it inside {user}",
            )
        value = self._home[name]
        if isinstance(value, ModuleType):
            self._begun.add(name)
            self._import_module(name, value, user, tree)
        elif self._is_beside(value):
            self._add_source(name, inspect.unwrap(value))
        elif (line := _import_of(name, value)) is not None:
            self._begun.add(name)
            _check_module(line[0], user)
            self._imports[line[1]] = None
        elif _is_plain(value):
            self._begun.add(name)
            self._constants[name] = repr(value)
        else:
            raise FunctionError(
                f"{user} uses {name}, a {type(value).__name__} that lives in this process only",
                hint=f"make or import it inside {user}, or pass what it is made of as an argument",
            )

    def _is_beside(self, value: object) -> bool:
        """Return True if the value is defined in the same notebook or file as the function."""
        if isinstance(value, type):
            return value.__module__ == self._function.__module__
        inner = inspect.unwrap(value) if callable(value) else None
        return isinstance(inner, FunctionType) and inner.__globals__ is self._home

    def _import_module(self, name: str, module: ModuleType, user: str, tree: ast.Module) -> None:
        full = module.__name__
        _check_module(full, user)
        self._imports[f"import {full}" if name == full else f"import {full} as {name}"] = None
        # After `import torch`, `torch.utils.data` works only if that module was imported as well.
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and (path := _dotted(node)) is not None:
                first, _, rest = path.partition(".")
                if first == name and sys.modules.get(f"{full}.{rest}") is not None:
                    self._imports[f"import {full}.{rest}"] = None


def globals_of(code: CodeType) -> Iterator[str]:
    """Yield the global names that a piece of source loads and does not define itself.

    Yields:
        Each name once, in the order of use.
    """
    loaded: dict[str, None] = {}
    stored: set[str] = set()
    codes = [code]
    while codes:
        one = codes.pop(0)
        codes += [const for const in one.co_consts if isinstance(const, CodeType)]
        own: set[str] = set()
        for step in dis.get_instructions(one):
            if step.opname in _STORES:
                own.add(step.argval)
                if one is code or step.opname.endswith("GLOBAL"):
                    stored.add(step.argval)
            elif step.opname in _LOADS and step.argval not in own:
                loaded.setdefault(step.argval)
    yield from (name for name in loaded if name not in stored)


def source_of(what: FunctionType | type) -> str:
    """Return the source of a function or class, dedented to the left margin.

    Returns:
        The source, with one newline at the end.

    Raises:
        FunctionError: Python does not know the source.
    """
    try:
        source = inspect.getsource(what)
    except (OSError, TypeError):
        if (cell_class := _class_in_a_cell(what)) is None:
            raise FunctionError(
                f"the source of {what.__name__} is not to be found",
                hint="write it into a file or a cell of a notebook; what is typed at Python's own "
                "prompt, or made by exec, has no source",
            ) from None
        source = cell_class
    return textwrap.dedent(source).rstrip() + "\n"


def _class_in_a_cell(what: FunctionType | type) -> str | None:
    """Return the source of a class that a notebook cell defines, or None.

    A cell is not the file of a module, so `inspect` does not find the class. The code of a method
    knows the cell that it was compiled from.

    Returns:
        The source of the class, with its decorators.
    """
    if isinstance(what, FunctionType):
        return None
    for method in vars(what).values():
        code = getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
        lines = linecache.getlines(code.co_filename) if code is not None else []
        for node in ast.walk(ast.parse("".join(lines))):
            if isinstance(node, ast.ClassDef) and node.name == what.__name__:
                first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                return "".join(lines[first - 1 : node.end_lineno])
    return None


def _import_of(name: str, value: object) -> tuple[str, str] | None:
    """Return how to import an object that a module holds under its own name.

    Returns:
        The module and the import line, or None if the object cannot be imported.
    """
    module = getattr(value, "__module__", None)
    own = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    if not (isinstance(module, str) and isinstance(own, str)) or module in ("__main__", "builtins"):
        return None
    if getattr(sys.modules.get(module), own, None) is not value:
        return None
    return module, f"from {module} import {own}" + ("" if own == name else f" as {name}")


def _check_module(module: str, user: str) -> None:
    """Refuse a module that only this folder has, because no pod could import it.

    Raises:
        FunctionError: The module is a file of this folder.
    """
    first = module.partition(".")[0]
    file = getattr(sys.modules.get(first), "__file__", None)
    if file is None or first in _OURS:
        return
    path = Path(file).resolve()
    installed = any(part in ("site-packages", "dist-packages") for part in path.parts)
    if path.is_relative_to(Path.cwd()) and not installed:
        raise FunctionError(
            f"{user} uses the module {first}, a file of this folder that its ranks will not have",
            hint=f"define what it uses beside {user}, or install it: packages=[...]",
        )


def _is_plain(value: object) -> bool:
    """Return True if `repr` of the value is an expression that makes an equal value."""
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))  # type: ignore[call-overload]
    if type(value) is dict:
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    return type(value) in _PLAIN and value == value and value not in (float("inf"), -float("inf"))


def _dotted(node: ast.Attribute) -> str | None:
    words: list[str] = []
    at: ast.expr = node
    while isinstance(at, ast.Attribute):
        words.append(at.attr)
        at = at.value
    return ".".join([at.id, *reversed(words)]) if isinstance(at, ast.Name) else None
