"""Messages between workers and data servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from paceline.data.sources.batch_layout import BatchLayout
from paceline.errors import DataError, PacelineError, PeerError, RecordError, UsageError
from paceline.wire.codec import MessageCodec

INDEX_BYTES: Final = 8
MAX_SAMPLES: Final = 1 << 20  # of one batch
MAX_RECIPE_BYTES: Final = 16 << 20  # some hundred thousand paths
MAX_UNANSWERED: Final = 64  # requests of one connection
NO_LENT_BUFFER: Final = -1

Blame: TypeAlias = Literal["record", "data", "usage", "peer"]

# What an error is called on its way, the particular ones first: some are kinds of others.
_BLAMES: Final[tuple[tuple[type[PacelineError], Blame], ...]] = (
    (RecordError, "record"),
    (DataError, "data"),
    (UsageError, "usage"),
)


@dataclass(frozen=True, slots=True)
class OpenSource:
    """A worker to a data server: open the recipe in the body, as `encode_recipe` gives it; reads refer to the number.

    It is a body since a source may name very many files.
    """

    number: int


@dataclass(frozen=True, slots=True)
class SourceOpened:
    """The answer: so many samples; the fingerprint tells different data apart."""

    number: int
    num_samples: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class ReadBatches:
    """A worker asks for a batch; the indices of its `num` samples are the body, as int64.

    Args:
        number: of this request, which its answer has, too.
        source: the number of the `OpenSource` that it refers to.
        epoch: as in an `Ask`.
        num: of samples.
        urgent: the loop waits for it: it goes before what this worker asked for earlier.
        returned: the loans that the worker needs no longer.
    """

    number: int
    source: int
    epoch: int
    num: int
    urgent: bool
    returned: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BatchParcel:
    """A batch, which is the body.

    Args:
        number: of the request.
        loan: the body is memory of the data server, which stays as it is until this is returned; or `NO_LENT_BUFFER`.
        layout: how the batch lies in it.
        reasons: why the first records of this source were left out, if this batch lacks some.
    """

    number: int
    lent_buffer: int
    layout: BatchLayout
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BatchFailed:
    """The answer to a request that cannot be done, and by whose mistake."""

    number: int
    blame: Blame
    text: str

    @staticmethod
    def of(number: int, error: BaseException, text: str) -> BatchFailed:
        """Return how this error is told."""
        for kind, blame in _BLAMES:
            if isinstance(error, kind):
                return BatchFailed(number, blame, text)
        return BatchFailed(number, "peer", text)

    def error(self, who: str) -> PacelineError:
        """Return the error as this process would have met it, with the name of who did meet it."""
        kind = next((kind for kind, name in _BLAMES if name == self.blame), PeerError)
        return kind(f"{who}: {self.text}")


Message: TypeAlias = OpenSource | SourceOpened | ReadBatches | BatchParcel | BatchFailed

# The position is the kind byte: append, never reorder.
_CODEC: Final = MessageCodec[Message](OpenSource, SourceOpened, ReadBatches, BatchParcel, BatchFailed)

encode = _CODEC.encode
decode = _CODEC.decode
