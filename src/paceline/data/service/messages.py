"""Messages between workers and data servers."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import msgspec

from paceline.data.sources.batch import BatchLayout
from paceline.errors import DataError, PacelineError, PeerError, RecordError, UsageError
from paceline.wire.messages import MessageCodec

INDEX_BYTES: Final = 8
MAX_SAMPLES: Final = 1 << 20  # of one batch
MAX_RECIPE_BYTES: Final = 16 << 20  # some hundred thousand paths
MAX_UNANSWERED: Final = 64  # requests of one connection
NO_LENT_BUFFER: Final = -1

Blame: TypeAlias = Literal["record", "data", "usage", "peer"]

# Names of errors in messages, subclasses before their bases.
_BLAMES: Final[tuple[tuple[type[PacelineError], Blame], ...]] = (
    (RecordError, "record"),
    (DataError, "data"),
    (UsageError, "usage"),
)


class OpenSource(msgspec.Struct, frozen=True):
    """Worker to data server: open the recipe in the body, encoded by `encode_recipe`; reads refer to `number`.

    The recipe is in the body because a source may name very many files.
    """

    number: int


class SourceOpened(msgspec.Struct, frozen=True):
    """Answer to `OpenSource`: the number of samples, and a fingerprint that tells different data apart."""

    number: int
    num_samples: int
    fingerprint: str


class ReadBatches(msgspec.Struct, frozen=True):
    """Worker to data server: make a batch of the `num` sample indices in the body, as int64.

    Args:
        number: of this request; its answer has the same.
        source: the number of the `OpenSource` that it refers to.
        epoch: as in a `BatchRequest`.
        num: of samples.
        urgent: the loop waits for it, so it goes before earlier requests of this worker.
        returned: lent buffers that the worker no longer reads.
    """

    number: int
    source: int
    epoch: int
    num: int
    urgent: bool
    returned: tuple[int, ...]


class BatchAnswer(msgspec.Struct, frozen=True):
    """Answer with a batch, which is the body.

    Args:
        number: of the request.
        lent_buffer: number of the data server's buffer in the body, unchanged until returned; or `NO_LENT_BUFFER`.
        layout: of the batch in the body.
        reasons: why the first records of this source were skipped, if this batch lacks some.
    """

    number: int
    lent_buffer: int
    layout: BatchLayout
    reasons: tuple[str, ...] = ()


class BatchFailed(msgspec.Struct, frozen=True):
    """Answer to a request that failed, and whose mistake that was."""

    number: int
    blame: Blame
    text: str

    @staticmethod
    def of(number: int, error: BaseException, text: str) -> BatchFailed:
        """Return the message for this error."""
        for kind, blame in _BLAMES:
            if isinstance(error, kind):
                return BatchFailed(number, blame, text)
        return BatchFailed(number, "peer", text)

    def error(self, server: str) -> PacelineError:
        """Return the error as an exception that names the data server where it happened."""
        kind = next((kind for kind, name in _BLAMES if name == self.blame), PeerError)
        return kind(f"{server}: {self.text}")


Message: TypeAlias = OpenSource | SourceOpened | ReadBatches | BatchAnswer | BatchFailed

# The position is the kind byte: append, never reorder.
_CODEC: Final = MessageCodec[Message](OpenSource, SourceOpened, ReadBatches, BatchAnswer, BatchFailed)

encode = _CODEC.encode
decode = _CODEC.decode
