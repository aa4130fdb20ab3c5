"""Encodes optimizer and scheduler state as plain data plus tensors, bit by bit, and decodes it.

A joiner and a checkpoint get the committed state as a JSON header and a list of byte buffers.
Nothing is pickled: data from another process creates values and never runs code. Floats are written
in hexadecimal, so a learning rate has the same bits on every rank.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, Final, Generic, TypeVar

import torch

from paceline.errors import StateError, UnsupportedError
from paceline.worker.fresh_memory import PAGE_BYTES, fresh_memory
from paceline.worker.state.flat import fill_from_bytes

Json = Any
"""A value that `json.dumps` takes. Any, since a recursive type would not help a reader."""


T = TypeVar("T")
HOST: Final = torch.device("cpu")
_TORN: Final = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Exceptions that reading a manipulated or damaged state may raise; a RuntimeError includes nesting
without an end."""


def as_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the host; torch copies it without holding the interpreter lock."""
    if tensor.nbytes < PAGE_BYTES:
        return tensor.detach().to("cpu", copy=True).contiguous()
    memory = torch.frombuffer(fresh_memory(tensor.nbytes), dtype=torch.uint8)
    return memory.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())


def as_is(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor on the host, in its own memory where it is contiguous there."""
    return tensor.detach().to("cpu").contiguous()


class Encoder(Generic[T]):
    """Turns values into JSON, and collects copies of their tensors in `buffers`."""

    def __init__(self, copy: Callable[[torch.Tensor], T]) -> None:
        self.buffers: list[T] = []
        self._copy = copy

    def encode(self, value: object, where: str) -> Json:
        """Return a value as JSON.

        Args:
            value: Numbers, texts, tensors, and lists, tuples, dicts or Counters of them.
            where: What the value is called in an error.

        Returns:
            JSON that `Decoder.decode` turns back; it refers to tensors by their index in `buffers`.

        Raises:
            UnsupportedError: The value, or a part of it, has a type that cannot be sent.
        """
        match value:
            case None | bool() | str():
                return value
            case int():
                return int(value)
            case float():
                return {"float": float(value).hex()}
            case torch.Tensor():
                return self._tensor(value)
            case list():
                return {"list": [self.encode(item, where) for item in value]}
            case tuple():
                return {"tuple": [self.encode(item, where) for item in value]}
            case dict():
                kind = "counter" if isinstance(value, Counter) else "dict"
                pairs = value.items()
                return {
                    kind: [
                        [self.encode(key, where), self.encode(item, f"{where}[{key!r}]")]
                        for key, item in pairs
                    ]
                }
        raise UnsupportedError(
            f"{where} is a {type(value).__name__}, which cannot be sent to a rank that joins",
            hint="keep numbers, texts, tensors, lists and dicts in optimizer and scheduler state",
        )

    def _tensor(self, tensor: torch.Tensor) -> Json:
        if tensor.layout is not torch.strided:
            raise UnsupportedError(
                f"a tensor of layout {tensor.layout} in the optimizer's state",
                hint="use an optimizer with dense state",
            )
        self.buffers.append(self._copy(tensor))
        return {
            "tensor": len(self.buffers) - 1,
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "host": tensor.device.type == "cpu",
        }


def read_header(data: bytes) -> dict[str, Json]:
    """Return the header of a state, which another process wrote by `json.dumps`.

    Args:
        data: The bytes of the header.

    Returns:
        The parsed header.

    Raises:
        StateError: The bytes are not a JSON object.
    """
    try:
        header = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise StateError(f"a torn state: its header is no JSON: {error}") from None
    if not isinstance(header, dict):
        raise StateError("a torn state: its header is not a mapping")
    return header


class Decoder:
    """Inverse of `Encoder`; puts tensors that were on a device on the device asked for."""

    def __init__(
        self, buffers: Sequence[bytes | bytearray | memoryview], *, adopts: bool = False
    ) -> None:
        """Create a decoder.

        Args:
            buffers: The tensors of the encoder, as bytes.
            adopts: True to make tensors of large buffers in their memory, which nobody else may
                use any more. False to copy all of them.
        """
        self._buffers, self._adopts = buffers, adopts

    def decode(self, data: Json, device: torch.device) -> Any:
        """Return the value that was encoded.

        Args:
            data: The JSON of the value.
            device: Where to put tensors that were not on the host.

        Returns:
            The value, in memory of its own, or in that of adopted buffers.

        Raises:
            StateError: No `Encoder` makes such JSON, or a buffer has the wrong size.
        """
        try:
            return self._value(data, device)
        except _TORN as error:
            raise StateError(f"a torn state: {type(error).__name__}: {error}") from None

    def fill(self, data: Json, targets: Mapping[str, torch.Tensor]) -> None:
        """Copy the tensors of an encoded dict into those of the same names and shapes.

        Where types and memory allow it, this is one pass over the bytes: others wait for it.

        Args:
            data: The JSON of the dict.
            targets: Tensors to fill. What the dict does not have stays as it is.

        Raises:
            StateError: No `Encoder` makes such JSON, or a buffer has the wrong size.
        """
        try:
            for key, value in data["dict"]:
                target = targets.get(self._value(key, HOST))
                if target is None or list(target.shape) != value["shape"]:
                    continue
                own = target.detach()
                if _is_alike(own, value):
                    fill_from_bytes(own, memoryview(self._buffers[value["tensor"]]).cast("B"))
                else:
                    own.copy_(self._tensor(value, own.device))
        except _TORN as error:
            raise StateError(f"a torn state: {type(error).__name__}: {error}") from None

    @staticmethod
    def places(data: Json, targets: Mapping[str, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return the tensors that `fill` would fill by a copy of the bytes alone.

        Their memory may be the buffers from the start.

        Args:
            data: The JSON of the dict.
            targets: Tensors by name.

        Returns:
            Tensors by the index of their buffer.

        Raises:
            StateError: No `Encoder` makes such JSON.
        """
        try:
            return {
                value["tensor"]: own
                for key, value in data["dict"]
                if (own := targets.get(key)) is not None
                and list(own.shape) == value["shape"]
                and _is_alike(own, value)
            }
        except _TORN as error:
            raise StateError(f"a torn state: {type(error).__name__}: {error}") from None

    def _value(self, data: Json, device: torch.device) -> Any:
        if not isinstance(data, dict):
            return data
        if "tensor" in data:
            return self._tensor(data, device)
        match next(iter(data.items()), None):
            case ["float", text]:
                return float.fromhex(text)
            case ["list", items]:
                return [self._value(item, device) for item in items]
            case ["tuple", items]:
                return tuple(self._value(item, device) for item in items)
            case ["dict", pairs]:
                return {self._value(k, device): self._value(v, device) for k, v in pairs}
            case ["counter", pairs]:
                return Counter({self._value(k, device): self._value(v, device) for k, v in pairs})
        raise StateError(f"unknown kind of value in a state: {sorted(data)}")

    def _tensor(self, data: dict[str, Any], device: torch.device) -> torch.Tensor:
        dtype = getattr(torch, data["dtype"], None)
        if not isinstance(dtype, torch.dtype):
            raise StateError(f"unknown data type in a state: {data['dtype']}")
        shape, buffer = data["shape"], memoryview(self._buffers[data["tensor"]]).cast("B")
        # Check before the tensor is made: a shape of a few bytes may exceed the memory.
        if prod(shape) * dtype.itemsize != len(buffer):
            raise StateError(f"a torn state: {len(buffer)} bytes for a tensor of shape {shape}")
        if self._adopts and len(buffer) >= PAGE_BYTES and not buffer.readonly:
            tensor = torch.frombuffer(buffer, dtype=dtype).view(shape)
        else:
            tensor = torch.empty(shape, dtype=dtype)
            fill_from_bytes(tensor, buffer)
        return tensor if data["host"] else tensor.to(device)


def _is_alike(own: torch.Tensor, value: Json) -> bool:
    """Return True if a tensor has the bytes of an encoded one of its shape."""
    alike: bool = str(own.dtype).removeprefix("torch.") == value["dtype"]
    return own.device == HOST and own.is_contiguous() and alike
