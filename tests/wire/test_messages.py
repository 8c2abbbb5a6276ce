"""Every message survives the wire, and nothing but a message does."""

from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core import messages
from paceline.errors import PeerError
from paceline.wire import messages as wire
from paceline.wire import requests
from paceline.wire.messages import Hello, PullFrame, PushFrame, StepFrame, decode, encode

KINDS = wire._CODEC.kinds
INTEGERS = st.integers(-(2**63), 2**63 - 1)
NUMBERS = st.one_of(st.none(), st.booleans(), INTEGERS, st.floats(allow_nan=False))
HYPER = st.dictionaries(st.text(max_size=5), st.one_of(NUMBERS, st.lists(NUMBERS, max_size=3).map(tuple)), max_size=3)

st.register_type_strategy(int, INTEGERS)
st.register_type_strategy(float, st.floats(allow_nan=False))


def push_frames() -> st.SearchStrategy[PushFrame]:
    return st.builds(
        PushFrame,
        push=st.from_type(messages.Push),
        count=st.floats(allow_nan=False),
        absent=st.lists(INTEGERS, max_size=4).map(tuple),
        hyper=st.lists(HYPER, max_size=2).map(tuple),
    )


st.register_type_strategy(PushFrame, push_frames())
ANY_MESSAGE = st.sampled_from(KINDS).flatmap(st.from_type)


@given(ANY_MESSAGE)
def test_every_message_survives_the_wire(message: object) -> None:
    assert decode(encode(message)) == message


@given(st.binary(max_size=200))
def test_garbage_is_refused_or_a_message(header: bytes) -> None:
    try:
        message = decode(header)
    except PeerError:
        return
    assert type(message) in KINDS


@given(ANY_MESSAGE, st.data())
def test_a_cut_off_message_is_refused(message: object, data: st.DataObject) -> None:
    whole = encode(message)
    part = whole[: data.draw(st.integers(0, len(whole) - 1))]

    with pytest.raises(PeerError):
        decode(part)


@given(st.sampled_from(KINDS), st.recursive(NUMBERS | st.text(), lambda inner: st.lists(inner) | HYPER))
def test_fields_of_other_types_are_refused(kind: type, fields: object) -> None:
    header = bytes((KINDS.index(kind),)) + msgspec.msgpack.encode(fields)
    try:
        message = decode(header)
    except PeerError:
        return
    assert decode(encode(message)) == message


def test_every_message_has_a_kind_of_its_own() -> None:
    said = {*get_args(messages.FromServer), *get_args(messages.BetweenServers), *get_args(messages.FromWorker)}
    carried = {messages.Push: PushFrame, messages.Pull: PullFrame, messages.WholeStep: StepFrame}

    assert {carried.get(kind, kind) for kind in said} | set(get_args(requests.Request)) <= set(KINDS)
    assert len(set(KINDS)) == len(KINDS)
    assert all(issubclass(kind, msgspec.Struct) for kind in KINDS)


def test_what_is_wrong_is_named() -> None:
    with pytest.raises(PeerError, match="unknown kind ff; is the peer of another version"):
        decode(b"\xff")
    with pytest.raises(PeerError, match="unknown kind nothing"):
        decode(b"")
    with pytest.raises(PeerError, match=r"malformed Hello message: .*role"):
        decode(bytes((KINDS.index(Hello),)) + msgspec.msgpack.encode({"rank": 3}))


def test_deep_nesting_is_refused() -> None:
    unknown_field = b"\x81\xa1x" + b"\x91" * 1_000_000 + b"\x00"
    for kind in range(len(KINDS)):
        with pytest.raises(PeerError):
            decode(bytes((kind,)) + unknown_field)
