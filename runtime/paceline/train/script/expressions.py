"""Parts of a script's source: what a statement assigns to, and what an expression reads."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

READ: Final = (ast.Name, ast.Attribute, ast.Subscript)
"""Expressions that stand for a value of the script."""


def last_word(node: ast.AST | None) -> str:
    """Return the name by which a script knows a value: `center` of `self.center`; or nothing."""
    match node:
        case ast.Name(id=word) | ast.Attribute(attr=word):
            return word
        case ast.Subscript(slice=ast.Constant(value=str(word))):
            return word
        case ast.Constant(value=str(word)):
            return word
    return ""


def read_in(expression: ast.AST) -> set[str]:
    """Return the variables, attributes and entries in an expression, as text."""
    return {ast.unparse(part) for part in ast.walk(expression) if isinstance(part, READ)}


def assigned(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield each target of an assignment with its value; of tuples, each part."""
    for target in node.targets:
        match target, node.value:
            case ast.Tuple(elts=targets), ast.Tuple(elts=values) if len(targets) == len(values):
                yield from zip(targets, values, strict=True)
            case _:
                yield target, node.value
