"""Messages of ranks, agents and coordinators, one frame each."""

from __future__ import annotations

from typing import Final

import msgspec
from paceline.coordinator.server import _pods
from paceline.core import messages, wire
from paceline.core.agent.network import nccl_connections
from paceline.core.rank import within

from testing.fuzz.samples import json_samples, msgpack_samples
from testing.fuzz.target import Form, Target, pure

_VERSION: Final = bytes((wire.WIRE_VERSION,))
_OF_A_POD: Final = messages.AgentMessage | messages.RankMessage
_TO_A_POD: Final = messages.ToAgent | messages.ToPod | messages.BeatEvery
_TO_A_RANK: Final = messages.ToRank | messages.Introduce | messages.BeatEvery


def _text(data: bytes) -> str:
    """Return a frame as a web socket delivers it: text with arbitrary characters."""
    return data.decode(errors="replace")


def _of_a_pod(data: bytes) -> object:
    message = wire.message_of_pod(_text(data))
    return message, _pods(message)


def _to_a_pod(data: bytes) -> object:
    message = wire.message_to_pod(_text(data))
    if isinstance(message, messages.ToPod):
        return wire.message_to_rank(message.message)
    return message


def _said(data: bytes) -> object:
    envelope = wire.said_by_rank(data)
    return wire.to_json(envelope.message)


TARGETS: Final = (
    Target(
        name="wire-peer",
        start=pure(wire.unpack_peer),
        errors=(wire.WireError,),
        seeds=msgpack_samples(messages.PeerMessage, _VERSION),
        form=Form.MSGPACK,
        prefix=_VERSION,
    ),
    Target(
        name="wire-of-pod",
        start=pure(_of_a_pod),
        errors=(wire.WireError,),
        seeds=json_samples(_OF_A_POD),
        form=Form.JSON,
    ),
    Target(
        name="wire-to-pod",
        start=pure(_to_a_pod),
        errors=(wire.WireError,),
        seeds=tuple(
            one.replace(b'{"a":1}', msgspec.json.encode(messages.Dismiss("the job is over")))
            for one in json_samples(_TO_A_POD)
        ),
        form=Form.JSON,
    ),
    Target(
        name="wire-said-by-rank",
        start=pure(_said),
        errors=(wire.WireError,),
        seeds=tuple(
            msgspec.json.encode({"connection": 1, "message": msgspec.Raw(one)})
            for one in json_samples(messages.RankMessage | messages.Heartbeat)
        ),
        form=Form.JSON,
    ),
    Target(
        name="wire-to-rank",
        start=pure(wire.message_to_rank),
        errors=(wire.WireError,),
        seeds=json_samples(_TO_A_RANK),
        form=Form.JSON,
    ),
    Target(
        name="wire-inventory",
        start=pure(lambda data: wire.body(messages.Inventory, data)),
        errors=(wire.WireError,),
        seeds=json_samples(messages.Inventory),
        form=Form.JSON,
    ),
    Target(
        name="wire-targets",
        start=pure(lambda data: wire.body(messages.Targets, data)),
        errors=(wire.WireError,),
        seeds=json_samples(messages.Targets),
        form=Form.JSON,
    ),
    Target(
        name="group-line",
        start=pure(within.unpack),
        errors=(wire.WireError,),
        seeds=msgpack_samples(within.Message),
        form=Form.MSGPACK,
    ),
    Target(
        name="nccl-log",
        start=pure(lambda data: nccl_connections(_text(data).splitlines())),
        errors=(),
        seeds=(
            b"node-0:70:81 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/IB/0/GDRDMA",
            b"node-0:70:81 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [send] via NET/Socket/0",
        ),
        words=(b" via NET/IB/0", b"Channel ", b" : 1[0] -> 0[0] ", b"NCCL INFO "),
    ),
)
