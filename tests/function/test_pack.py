"""Packing a function with all it uses, and the functions that are refused."""

from __future__ import annotations

import functools
import json
import os.path
import subprocess
import sys
import textwrap
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paceline.function.errors import ArgumentError, FunctionError
from paceline.function.pack import pack
from paceline.function.packed import BYTES_MAX, DESCRIPTION, PROGRAM

SIZES = {"small": [1, 2], "large": (3, None, "x")}
BASE = 2
LOCKED = open  # a builtin under another name
HANDLE = object()


def double(x: int) -> int:
    return BASE * x


class Counter:
    """A class of this file with a method that uses another function of it."""

    start = BASE
    more = start + 1

    def add(self, x: int) -> int:
        return double(x) + self.more


def ends(path: str) -> str:
    return os.path.basename(path)  # noqa: PTH119


@functools.cache
def cached(x: int) -> int:
    return double(x)


def whole(out: str, scale: int = BASE) -> None:
    """Use everything that can be packed."""
    figures = [cached(1), Counter().add(scale), len(SIZES["large"]), ends("a/b")]
    Path(out).write_text(json.dumps(figures))


def run(files: dict[str, str], folder: Path) -> None:
    """Run the program as a rank does, in a separate process."""
    (folder / PROGRAM).write_text(files[PROGRAM])
    subprocess.run([sys.executable, "-I", folder / PROGRAM], check=True, cwd=folder, timeout=60)


@pytest.mark.processes
def test_everything_that_a_function_uses_is_packed(tmp_path: Path) -> None:
    files = pack(whole, {"out": str(tmp_path / "out"), "scale": 5})
    run(files, tmp_path)
    assert json.loads((tmp_path / "out").read_text()) == [2, 13, 3, "b"]
    described = json.loads(files[DESCRIPTION])
    assert described == {"name": "whole", "python": list(sys.version_info[:2]), "packages": []}


def test_the_packed_program_is_readable() -> None:
    program = pack(ends, {"path": "a"})[PROGRAM]
    assert program == textwrap.dedent(
        '''\
        """Function ends, as it was sent with its job."""

        from __future__ import annotations

        import os
        import os.path

        def ends(path: str) -> str:
            return os.path.basename(path)  # noqa: PTH119


        if __name__ == "__main__":
            ends(**{'path': 'a'})
        '''
    )


def module_of(folder: Path, name: str, text: str) -> ModuleType:
    """Import a module from text, like a notebook cell, without the imports of this file."""
    (folder / f"{name}.py").write_text(textwrap.dedent(text))
    sys.path.insert(0, str(folder))
    try:
        return import_module(name)
    finally:
        sys.path.remove(str(folder))


def test_submodules_and_aliases_are_imported_as_in_the_source(tmp_path: Path) -> None:
    cell = module_of(
        tmp_path,
        "cell_of_parts",
        """
        import xml
        import xml.dom.minidom
        import json as j
        from pathlib import Path as P

        def parse(text):
            return xml.dom.minidom.parseString(j.loads(P(text).read_text()))
        """,
    )
    program = pack(cell.parse, {"text": "x"})[PROGRAM]
    for line in ("import xml", "import xml.dom.minidom", "import json as j"):
        assert f"\n{line}\n" in program
    assert "from pathlib import Path as P" in program


def closing() -> Callable[[], int]:
    inside = 3

    def inner() -> int:
        return inside

    return inner


def uses_handle() -> object:
    return HANDLE


def uses_nothing_known() -> object:
    return not_there_yet  # type: ignore[name-defined]  # noqa: F821


async def later() -> None: ...


def yields() -> Any:
    yield 1


def plain(lr: float = 0.1, sizes: Any = None) -> None: ...


made: dict[str, Any] = {}
exec("def typed(): pass", made)

REFUSED = {
    "lambda": (lambda: None, "a lambda has no source"),
    "closes": (closing(), "function inner closes over inside of the function around it"),
    "method": (Counter().add, "Counter.add is a method"),
    "of a class": (Counter.add, "Counter.add is a function of a class"),
    "async": (later, "later is an async function"),
    "generator": (yields, "yields is a generator"),
    "callable": (functools.partial(plain), "is not a function"),
    "builtin": (print, "is not a function"),
    "class": (Counter, "is not a function"),
    "no source": (made["typed"], "the source of typed is not to be found"),
    "an object": (uses_handle, "uses_handle uses HANDLE, a object that lives in this process only"),
    "undefined": (uses_nothing_known, "uses not_there_yet, which is defined nowhere"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_function_that_cannot_be_sent_is_refused_with_a_hint(case: str) -> None:
    function, words = REFUSED[case]
    with pytest.raises(FunctionError) as caught:
        pack(function)
    assert words in caught.value.message
    assert "\n" not in caught.value.message
    assert len(caught.value.hint) > 10


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"lrr": 1}, "got an unexpected keyword argument 'lrr'"),
        ({"lr": float("nan")}, "argument lr is nan"),
        ({"sizes": (1, 2)}, "argument sizes is (1, 2)"),
        ({"sizes": [{"a": Path()}]}, "argument sizes[0]['a'] is of type PosixPath"),
        ({"sizes": {1: 2}}, "argument sizes is {1: 2}"),
    ],
)
def test_arguments_that_json_cannot_represent_are_refused(
    arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(ArgumentError) as caught:
        pack(plain, arguments)
    assert words in caught.value.message


def test_packages_given_as_a_string_are_refused() -> None:
    with pytest.raises(ArgumentError, match='the text "numpy"'):
        pack(plain, packages="numpy")


def test_a_function_that_imports_a_local_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module_of(tmp_path, "helpers_of_mine", "def help(): pass")
    cell = module_of(
        tmp_path,
        "cell_that_imports_it",
        """
        import helpers_of_mine

        def train():
            helpers_of_mine.help()
        """,
    )
    with pytest.raises(FunctionError, match="a file of this folder"):
        pack(cell.train)


def test_a_function_with_a_notebook_command_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def magic() -> None: ...

    monkeypatch.setattr("inspect.getsource", lambda _: "def magic():\n    !pip install x\n")
    with pytest.raises(FunctionError, match="not Python alone"):
        pack(magic)


def test_a_function_too_large_for_a_config_map_is_refused() -> None:
    with pytest.raises(FunctionError, match=f"more than the {BYTES_MAX:,}"):
        pack(plain, {"sizes": "x" * BYTES_MAX})


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@pytest.mark.long
@given(value=json_values)
def test_an_argument_arrives_unchanged(value: Any) -> None:
    program = pack(plain, {"sizes": value})[PROGRAM]
    call = program.rpartition("plain(")[2].strip()[:-1].removeprefix("**")
    assert eval(call) == {"sizes": value} == json.loads(json.dumps({"sizes": value}))
