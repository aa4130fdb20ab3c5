"""Sample values of any type that msgspec decodes, for each kind of message with all fields."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec
from msgspec import inspect

DEPTH_MAX: Final = 12
"""Depth at which a type that contains itself ends."""


def json_samples(kind: Any) -> tuple[bytes, ...]:
    """Return JSON of each alternative of `kind`, once with all fields and once with few."""
    return tuple(msgspec.json.encode(one) for one in _alternatives(kind))


def msgpack_samples(kind: Any, prefix: bytes = b"") -> tuple[bytes, ...]:
    """Return msgpack of each alternative of `kind`, each after `prefix`."""
    return tuple(prefix + msgspec.msgpack.encode(one) for one in _alternatives(kind))


def _alternatives(kind: Any) -> list[Any]:
    info = inspect.type_info(kind)
    kinds = info.types if isinstance(info, inspect.UnionType) else (info,)
    return [_value(one, 0, full=full) for one in kinds for full in (True, False)]


def _value(info: inspect.Type, depth: int, *, full: bool) -> Any:
    """Return plain data that decodes as `info`; without `full`, optional parts are left out."""
    match info:
        case inspect.StructType():
            return _struct(info, depth, full=full)
        case inspect.DataclassType(fields=fields):
            return _fields(fields, depth, full=full)
        case inspect.UnionType(types=types):
            named = [one for one in types if not isinstance(one, inspect.NoneType)]
            return (
                _value(named[0], depth, full=full)
                if full and depth < DEPTH_MAX
                else (None if len(named) < len(types) else _value(named[0], depth, full=full))
            )
        case inspect.NamedTupleType(fields=fields):
            return [_value(each.type, depth + 1, full=full) for each in fields]
        case inspect.TupleType(item_types=items):
            return [_value(each, depth + 1, full=full) for each in items]
        case inspect.VarTupleType(item_type=item) | inspect.ListType(item_type=item):
            return [_value(item, depth + 1, full=full)] if full and depth < DEPTH_MAX else []
        case inspect.DictType(key_type=key, value_type=value):
            if not full or depth >= DEPTH_MAX:
                return {}
            return {_value(key, depth + 1, full=full): _value(value, depth + 1, full=full)}
        case inspect.EnumType(cls=cls):
            return next(iter(cls)).value
        case inspect.LiteralType(values=values):
            return values[0]
        case _:
            return _plain(info)


def _plain(info: inspect.Type) -> Any:
    match info:
        case inspect.NoneType():
            return None
        case inspect.BoolType():
            return True
        case inspect.IntType():
            return 1
        case inspect.FloatType():
            return 1.5
        case inspect.StrType():
            return "1"
        case inspect.BytesType():
            return b"\1"
        case inspect.RawType() | inspect.AnyType():
            return {"a": 1}
    raise AssertionError(f"no sample of {info}")


def _struct(info: inspect.StructType, depth: int, *, full: bool) -> Any:
    if info.array_like:
        whole = [_value(each.type, depth + 1, full=full) for each in info.fields]
        return whole if info.tag is None else [info.tag, *whole]
    tag = {} if info.tag_field is None else {info.tag_field: info.tag}
    return tag | _fields(info.fields, depth, full=full)


def _fields(fields: Iterable[inspect.Field], depth: int, *, full: bool) -> dict[str, Any]:
    return {
        each.encode_name: _value(each.type, depth + 1, full=full)
        for each in fields
        if full or each.required
    }
