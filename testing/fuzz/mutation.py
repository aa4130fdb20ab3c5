"""Inputs for a parser: its seeds, inputs that are known to break parsers, and mutations of both.

The same seed number gives the same inputs in the same order. Bytes are flipped, cut, repeated and
spliced. In JSON, msgpack and YAML values are changed as well, so the result is well formed and
wrong in one place.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec
import yaml

from testing.fuzz.target import Form, Target

DEEP: Final = 20_000
"""Levels of nesting: more than any parser may follow."""
WIDE: Final = 20_000
DIGITS: Final = 5_000
"""Number of digits that Python refuses to convert to an integer."""
STACKED_MAX: Final = 4
"""Upper bound on the mutations of one input."""
SCALARS: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**53 + 1, 2**63, -(2**63), 2**64 - 1),
    *(0.0, -0.0, 1.5, 1e308, 5e-324, "", "0", "-1", "\0", "é", "\x1b]52;c;AA==\x07", "<img src=x>"),
    *(
        "../../etc/passwd",
        "a" * 300,
        "9" * 400,
        "²",
        "\u0663",
        [],
        {},
        [[]],
        {"": {}},
        [None] * 100,
    ),
)
JSON_HOSTILE: Final = (
    *(b"[" * DEEP, b"[" * DEEP + b"]" * DEEP, b'{"a":' * DEEP, b'[{"":' * DEEP),
    *(b"9" * DIGITS, b"-" + b"9" * DIGITS, b"1e999", b"-1e999", b"1e-999", b"0." + b"9" * DIGITS),
    *(b"NaN", b"Infinity", b"-", b'"\\ud800"', b'"\\udc00\\ud800"', b'"\xff\xfe"', b'"\\u0000"'),
    *(b"[" + b"[]," * WIDE + b"[]]", b"[" + b"0," * WIDE + b"0]", b"{}", b"5", b"null", b'"x"'),
    b"{" + b",".join(b'"%d":0' % n for n in range(WIDE // 4)) + b"}",
    b'{"a":0,"a":0}',
    b'"' + b"x" * (4 * WIDE) + b'"',
)
MSGPACK_HOSTILE: Final = (
    *(b"\x91" * DEEP, b"\x81\xa1a" * DEEP, b"\x81" * DEEP, b"\xdd\xff\xff\xff\xff", b"\xc1"),
    *(b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xc9\0\1\0\0"),
    *(b"\xdc\xff\xff" + b"\xc0" * 65_535, b"\xdc\xff\xff" + b"\x90" * 65_535, b"\xa2\xff\xfe"),
    *(b"\xcf" + b"\xff" * 8, b"\xd3\x80" + bytes(7), b"\xcb\x7f\xf0" + bytes(6), b"\xc7\x0c\xff"),
    b"\xcb\x7f\xf8" + bytes(6),
)
YAML_HOSTILE: Final = (
    *(b"[" * 500, b"{a: " * 500, b"- " * 500, b"? " * 200, b"!!python/object/apply:os.getpid []"),
    *(b"!!int x", b"!!float x", b"!!timestamp 9999-99-99", b"!!binary ?", b"!!set {a}", b"!!map x"),
    *(
        b"&a [*a]",
        b"*b",
        b"&a {<<: *a}",
        b"<<: x",
        b"%YAML 9.9\n---\na",
        b"a: b: c",
        b"\t",
        b"\x00",
    ),
    *(b"!!omap [a: b, 5]", b"!!pairs [5]", b"!!null x", b"!!bool x", b"0x" + b"f" * 900, b"1e999"),
    b"\n".join(
        [b"a0: &a0 [x, x, x, x, x, x, x, x, x]"]
        + [b"a%d: &a%d [%s]" % (n, n, b", ".join([b"*a%d" % (n - 1)] * 9)) for n in range(1, 9)]
    ),
)
BYTE_WORDS: Final = (
    *(b"\0", b"\xff", b"\n", b"\r\n", b'"', b"\\", b"{", b"}", b"[", b"]", b":", b",", b" ", b"-"),
    *(
        b"\0\0\0\0",
        b"\xff\xff\xff\xff",
        b"\x7f\xff\xff\xff",
        b"\x80\0\0\0",
        b"\xef\xbb\xbf",
        b"..",
        b"%s",
    ),
    *(b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80", b"\x1b[2J", b"\xe2\x80\xae", b"0", b"1e9"),
)
_WHOLE: Final[dict[Form, tuple[bytes, ...]]] = {
    Form.BYTES: (),
    Form.JSON: JSON_HOSTILE,
    Form.MSGPACK: MSGPACK_HOSTILE,
    Form.YAML: YAML_HOSTILE,
}

Tree = Any


def inputs(target: Target, known: Sequence[bytes], seed: int) -> Iterator[bytes]:
    """Yield inputs without end: seeds, `known` and hostile ones first, then mutations."""
    dice = random.Random(f"{target.name} {seed}")
    hostile = _WHOLE[target.form]
    corpus = [*target.seeds, *known]
    first = [*corpus, b"", *(target.prefix + one for one in hostile)]
    yield from (one[: target.bytes_max] for one in first)
    trees = [tree for one in target.seeds if (tree := _decoded(target, one)) is not _NOTHING]
    while True:
        if trees and dice.random() < 0.7:
            data = _encoded(target, _changed(dice.choice(trees), dice, target.form))
            if dice.random() < 0.7:
                yield data[: target.bytes_max]
                continue
        else:
            data = dice.choice(corpus)
        yield _mutated(data, corpus, target.words, dice)[: target.bytes_max]


# ---- values --------------------------------------------------------------------------------------

_NOTHING: Final = object()


def _decoded(target: Target, data: bytes) -> Tree:
    body = data.removeprefix(target.prefix)
    match target.form:
        case Form.JSON:
            return msgspec.json.decode(body)
        case Form.MSGPACK:
            return msgspec.msgpack.decode(body, strict=False)
        case Form.YAML:
            return yaml.safe_load(body)
    return _NOTHING


def _encoded(target: Target, tree: Tree) -> bytes:
    if target.form is Form.MSGPACK:
        return target.prefix + msgspec.msgpack.encode(tree)
    # JSON is YAML, too.
    return target.prefix + msgspec.json.encode(tree)


def _changed(tree: Tree, dice: random.Random, form: Form) -> Tree:
    """Return `tree` with one value changed, or sometimes a few."""
    for _ in range(1 if dice.random() < 0.7 else dice.randint(2, STACKED_MAX)):
        tree = _with_one_change(tree, dice, form)
    return tree


def _with_one_change(tree: Tree, dice: random.Random, form: Form) -> Tree:
    """Descend to a random place and change it; the rest of the tree stays equal."""
    if isinstance(tree, dict) and tree and dice.random() < 0.85:
        key = dice.choice(list(tree))
        match dice.randrange(8):
            case 0:
                return {k: v for k, v in tree.items() if k != key}
            case 1:
                return {**tree, f"{key}x": tree[key]}
            case 2:
                return {**tree, key: _leaf(dice, form)}
            case 3:
                return {**tree, "unknown": _leaf(dice, form)}
        return {**tree, key: _with_one_change(tree[key], dice, form)}
    if isinstance(tree, list) and tree and dice.random() < 0.85:
        at = dice.randrange(len(tree))
        match dice.randrange(8):
            case 0:
                return tree[:at] + tree[at + 1 :]
            case 1:
                return tree[:at] + [tree[at]] * dice.choice((2, 3, 500)) + tree[at + 1 :]
            case 2:
                return [*tree[:at], _leaf(dice, form), *tree[at + 1 :]]
        return [*tree[:at], _with_one_change(tree[at], dice, form), *tree[at + 1 :]]
    match dice.randrange(6):
        case 0 if isinstance(tree, str):
            return _text(tree, dice)
        case 1 if isinstance(tree, int):
            return max(
                -(2**63), min(tree + dice.choice((-1, 1, -(2**31), 2**31, 2**62)), 2**64 - 1)
            )
        case 2:
            return [tree]
        case 3:
            return {"value": tree}
    return _leaf(dice, form)


def _leaf(dice: random.Random, form: Form) -> Tree:
    """Return a value that is unlikely to be valid."""
    if dice.random() < 0.75:
        return dice.choice(SCALARS)
    hostile = MSGPACK_HOSTILE if form is Form.MSGPACK else JSON_HOSTILE
    short = [one for one in hostile if len(one) < 100] if dice.random() < 0.9 else hostile
    return msgspec.Raw(dice.choice(short))


def _text(text: str, dice: random.Random) -> str:
    at = dice.randrange(len(text) + 1)
    return (
        text[:at]
        + dice.choice(("", "\0", "\n", "9", "-", ".", "#", "é", "²", "<b>"))
        + text[at + 1 :]
    )


# ---- bytes ---------------------------------------------------------------------------------------

Change = Callable[[bytearray, random.Random], None]


def _mutated(
    data: bytes, corpus: Sequence[bytes], words: Sequence[bytes], dice: random.Random
) -> bytes:
    changed = bytearray(data)
    for _ in range(dice.randint(1, STACKED_MAX)):
        if dice.random() < 0.1:
            other = dice.choice(corpus)
            at, after = dice.randint(0, len(changed)), dice.randint(0, len(other))
            changed[at:] = other[after:]
        elif words and dice.random() < 0.3:
            _put_in(changed, dice.choice(words), dice)
        else:
            dice.choice(_CHANGES)(changed, dice)
    return bytes(changed)


def _put_in(data: bytearray, word: bytes, dice: random.Random) -> None:
    at = dice.randint(0, len(data))
    data[at : at + dice.choice((0, len(word)))] = word


def _flip(data: bytearray, dice: random.Random) -> None:
    if data:
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)


def _set(data: bytearray, dice: random.Random) -> None:
    if data:
        data[dice.randrange(len(data))] = dice.randrange(256)


def _insert(data: bytearray, dice: random.Random) -> None:
    _put_in(data, dice.choice(BYTE_WORDS), dice)


def _cut(data: bytearray, dice: random.Random) -> None:
    low = dice.randint(0, len(data))
    del data[low : low + dice.choice((1, 2, 4, 16, len(data)))]


def _repeat(data: bytearray, dice: random.Random) -> None:
    low = dice.randint(0, len(data))
    data[low:low] = data[low : low + dice.choice((1, 4, 32))] * dice.choice((1, 2, 16, 500))


_CHANGES: Final[tuple[Change, ...]] = (_flip, _set, _set, _insert, _insert, _cut, _repeat)
