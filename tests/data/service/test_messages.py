"""What workers and data servers say: read back as it was said, or refused in our words."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.service.messages import (
    _CODEC,
    BatchAnswer,
    BatchFailed,
    Message,
    OpenSource,
    ReadBatches,
    SourceOpened,
    decode,
    encode,
)
from paceline.data.sources.batch import BatchLayout, DictPart, TensorPart, TextPart
from paceline.errors import DataError, PacelineError, PeerError, RecordError, UsageError

PARTS = DictPart(("x", "y"), (TensorPart("float32", (3, 2), 0), TextPart("str", 3, 5, 64)))
LAYOUT = BatchLayout(PARTS, num_samples=3, num_skipped=1, size_bytes=93)
MESSAGES: list[Message] = [
    OpenSource(0),
    SourceOpened(0, 60_000, "f00d"),
    ReadBatches(3, 0, 7, 3, urgent=True, returned=(4, 5)),
    BatchAnswer(3, 9, LAYOUT, ("sample 0 is odd",)),
    BatchFailed(3, "record", "sample 0 is odd"),
]


def test_every_kind_is_read_back_as_it_was_said() -> None:
    assert {type(message) for message in MESSAGES} == set(_CODEC.kinds)
    assert [decode(encode(message)) for message in MESSAGES] == MESSAGES


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A message of which a part is missing."""
    data = encode(draw(st.sampled_from(MESSAGES)))
    start, stop = draw(st.integers(0, len(data))), draw(st.integers(0, len(data)))
    return data[:start] + data[stop:]


@given(st.binary(max_size=200) | damaged())
@settings(deadline=None, max_examples=150)
def test_whatever_bytes_come_are_a_message_or_refused(data: bytes) -> None:
    try:
        message = decode(data)
    except PeerError:
        return
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RecordError("no"), RecordError),
        (DataError("no"), DataError),
        (UsageError("no"), UsageError),
        (PeerError("no"), PeerError),
        (ValueError("no"), PeerError),
    ],
)
def test_an_error_is_told_as_what_it_is(error: Exception, kind: type[PacelineError]) -> None:
    told = decode(encode(BatchFailed.of(3, error, "no")))
    assert isinstance(told, BatchFailed)
    met = told.error("data server 1")
    assert (type(met), str(met)) == (kind, "data server 1: no")
