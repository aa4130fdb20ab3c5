"""Parsing of YAML text to plain data and the line of every value.

It accepts what kubectl accepts: one mapping, and no dates or base-60 numbers made out of text. Two
things that YAML libraries accept are errors here: a key that appears twice, and a second document.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import yaml

from paceline_api.errors import MISSING, JobFileError, SpecError

Path = tuple[str | int, ...]

_MERGE_TAG: Final = "tag:yaml.org,2002:merge"
_DEPTH_MAX: Final = 64
_NODES_MAX: Final = 100_000
_NODES_MIN: Final = 1_000
"""Values that every text may have. A longer text may have two more for each character, up to
`_NODES_MAX`."""


class _TooLargeError(yaml.YAMLError):
    """Raised for more levels or more values than a job has."""


class _Loader(yaml.SafeLoader):
    """YAML loader that resolves plain scalars as kubectl does and limits the nesting."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node, unless it is nested too deeply."""
        if self._depth > _DEPTH_MAX:
            raise _TooLargeError
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def fetch_flow_collection_start(self, token_class: Any) -> None:
        """Limit the nesting of brackets in the scanner, too.

        The scanner reads ahead and takes long for each open bracket.

        Args:
            token_class: Class of the token.

        Raises:
            _TooLargeError: The bracket is nested too deeply.
        """
        if self.flow_level >= _DEPTH_MAX:
            raise _TooLargeError
        super().fetch_flow_collection_start(token_class)


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern)
        for tag, pattern in resolvers
        if tag.rpartition(":")[2] not in ("timestamp", "int", "float", "value")
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"^(?:[-+]?0b[01]+|[-+]?0o?[0-7]+|[-+]?(?:0|[1-9][0-9]*)|[-+]?0x[0-9a-fA-F]+)$"),
    list("-+0123456789"),
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|nan)$"),
    list("-+0123456789."),
)


@dataclass(frozen=True, slots=True)
class Document:
    """One YAML mapping, with the lines of its values."""

    data: dict[str, Any]
    lines: dict[Path, int]
    """Line of each key or list item, counted from 1."""

    def line(self, path: Path) -> int | None:
        """Return the line of `path`, or of the nearest part that contains it; None if none."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.lines:
                return self.lines[path[:length]]
        return None


def read_document(text: str, *, source: str) -> Document:
    """Return the one mapping in `text`; raise JobFileError, or SpecError for a repeated key."""
    nodes = _nodes(text, source)
    if len(nodes) > 1:
        line = nodes[1].start_mark.line + 1
        raise JobFileError(
            f"{source}: holds {len(nodes)} documents, the second one from line {line} on",
            hint="put each job into a file of its own; `paceline validate` checks such a file",
        )
    return _document(nodes[0], text, source)


def read_documents(text: str, *, source: str) -> list[Document]:
    """Return the mappings in `text`, at least one; errors are as in `read_document`."""
    return [_document(node, text, source) for node in _nodes(text, source)]


def _nodes(text: str, source: str) -> list[yaml.Node]:
    try:
        nodes = [node for node in yaml.compose_all(text, Loader=_Loader) if not _is_empty(node)]
    except _TooLargeError:
        raise _too_large(source) from None
    except yaml.YAMLError as error:
        raise JobFileError(
            f"{source}: is not YAML: {_problem_of(error)}", hint=_yaml_hint(error)
        ) from None
    if not nodes:
        raise JobFileError(
            f"{source}: is empty", hint="start with apiVersion, kind, metadata and spec"
        )
    return nodes


def _document(node: yaml.Node, text: str, source: str) -> Document:
    if not isinstance(node, yaml.MappingNode):
        raise JobFileError(
            f"{source}: is not a mapping but {_kind_of(node)}",
            hint="start with apiVersion, kind, metadata and spec, each on a line of its own",
        )
    reader = _Reader(source, len(text))
    return Document(reader.mapping(node, ()), reader.lines)


def read_value(text: str) -> Any:
    """Return a single value as it would be read from a file.

    Args:
        text: The YAML text.

    Returns:
        The value; None for empty text.

    Raises:
        ValueError: The text is not YAML, or too large.
    """
    try:
        node = yaml.compose(text, Loader=_Loader)
        return None if node is None else _Reader("", len(text)).value(node, ())
    except _TooLargeError:
        raise ValueError("it is nested too deeply") from None
    except (yaml.YAMLError, JobFileError, SpecError) as error:
        raise ValueError(str(error)) from None


class _Reader:
    """Builds data from YAML nodes and remembers their lines."""

    def __init__(self, source: str, chars: int) -> None:
        """Create a reader.

        Args:
            source: Name of the file, for errors.
            chars: Characters of the text; they bound the number of values.
        """
        self.source = source
        self.lines: dict[Path, int] = {}
        # Nested anchors can make billions of values out of a few lines.
        self._nodes_left = min(_NODES_MAX, _NODES_MIN + 2 * chars)
        self._depth = 0
        self._loader = _Loader("")

    def value(self, node: yaml.Node, path: Path) -> Any:
        """Return the data of a node; raise JobFileError if it has too many values or levels."""
        self._nodes_left -= 1
        # Count calls and not path parts: an anchor merged into itself adds no path part.
        self._depth += 1
        if self._depth > _DEPTH_MAX or self._nodes_left < 0:
            raise _too_large(self.source)
        try:
            return self._built(node, path)
        finally:
            self._depth -= 1

    def _built(self, node: yaml.Node, path: Path) -> Any:
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            items = []
            for index, item in enumerate(node.value):
                self.lines[(*path, index)] = item.start_mark.line + 1
                items.append(self.value(item, (*path, index)))
            return items
        return self._scalar(node)

    def mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        """Return the data of a mapping; raise SpecError for a key that appears twice."""
        inherited: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE_TAG:
                for key, value in self._merged(value_node, path):
                    inherited.setdefault(key, value)
        data: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE_TAG:
                continue
            key, line = self._key(key_node, path), key_node.start_mark.line + 1
            where = (*path, key)
            if key in data:
                raise SpecError(
                    show_path(where),
                    MISSING,
                    f"appears twice, in line {self.lines[where]} and in line {line}",
                    hint="keep one of them",
                    where=self.source,
                )
            self.lines[where] = line
            data[key] = self.value(value_node, where)
        return {**inherited, **data}

    def _merged(self, node: yaml.Node, path: Path) -> Iterator[tuple[str, Any]]:
        """Yield the items that `<<: *anchor` or `<<: [*one, *two]` merges into a mapping."""
        for part in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            if isinstance(part, yaml.MappingNode):
                yield from self.value(part, path).items()

    def _key(self, node: yaml.Node, path: Path) -> str:
        if not isinstance(node, yaml.ScalarNode):
            line = node.start_mark.line + 1
            raise JobFileError(
                f"{self.source}: the key in line {line}, below {show_path(path) or 'the top'}, "
                "is not a word",
                hint="write each field as `name: value`; put values with braces into quotes",
            )
        return str(node.value)

    def _scalar(self, node: yaml.Node) -> Any:
        try:
            return self._loader.construct_object(node)
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
            yaml.YAMLError,
        ):
            # The tag, such as !!int, does not fit the text. The field's own check reports it.
            return str(node.value)


def _too_large(source: str) -> JobFileError:
    return JobFileError(
        f"{source}: is nested too deeply or too large",
        hint=f"a job has at most {_DEPTH_MAX} levels and {_NODES_MAX:,} values",
    )


def show_path(path: Path) -> str:
    """Return a path as text: `spec.template.spec.containers[0].env`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")


def _kind_of(node: yaml.Node) -> str:
    return "a list" if isinstance(node, yaml.SequenceNode) else "a single value"


def _is_empty(node: Any) -> bool:
    return node is None or (isinstance(node, yaml.ScalarNode) and node.tag.endswith(":null"))


def _problem_of(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    return f"{problem} (line {mark.line + 1}, column {mark.column + 1})" if mark else problem


def _yaml_hint(error: Exception) -> str:
    if "\\t" in _problem_of(error):
        return "indent with spaces, not with tabs"
    return "check the indentation and the quotes in this line and the one above it"
