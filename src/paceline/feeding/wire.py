"""What workers and data servers say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from paceline.errors import DataError, PacelineError, PeerError, RecordError, UsageError
from paceline.feeding.parcel import Layout
from paceline.node.codec import Codec

INDEX_BYTES: Final = 8
MAX_SAMPLES: Final = 1 << 20  # of one batch
MAX_RECIPE_BYTES: Final = 16 << 20  # some hundred thousand paths
MAX_UNANSWERED: Final = 64  # requests of one connection
NO_LOAN: Final = -1

Blame: TypeAlias = Literal["record", "data", "usage", "peer"]

# What an error is called on its way, the particular ones first: some are kinds of others.
_BLAMES: Final[tuple[tuple[type[PacelineError], Blame], ...]] = (
    (RecordError, "record"),
    (DataError, "data"),
    (UsageError, "usage"),
)


@dataclass(frozen=True, slots=True)
class Open:
    """A worker to a data server: open the recipe in the body, as `encode_recipe` gives it; reads refer to the number.

    It is a body since a source may name very many files.
    """

    number: int


@dataclass(frozen=True, slots=True)
class Opened:
    """The answer: so many samples; the fingerprint tells different data apart."""

    number: int
    num_samples: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Read:
    """A worker asks for a batch; the indices of its `num` samples are the body, as int64.

    Args:
        number: of this request, which its answer has, too.
        source: the number of the `Open` that it refers to.
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
class Parcel:
    """A batch, which is the body.

    Args:
        number: of the request.
        loan: the body is memory of the data server, which stays as it is until this is returned; or `NO_LOAN`.
        layout: how the batch lies in it.
        reasons: why the first records of this source were left out, if this batch lacks some.
    """

    number: int
    loan: int
    layout: Layout
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """The answer to a request that cannot be done, and by whose mistake."""

    number: int
    blame: Blame
    text: str

    @staticmethod
    def of(number: int, error: BaseException, text: str) -> Failed:
        """Return how this error is told."""
        for kind, blame in _BLAMES:
            if isinstance(error, kind):
                return Failed(number, blame, text)
        return Failed(number, "peer", text)

    def error(self, who: str) -> PacelineError:
        """Return the error as this process would have met it, with the name of who did meet it."""
        kind = next((kind for kind, name in _BLAMES if name == self.blame), PeerError)
        return kind(f"{who}: {self.text}")


Message: TypeAlias = Open | Opened | Read | Parcel | Failed

# The position is the kind byte: append, never reorder.
_CODEC: Final = Codec[Message](Open, Opened, Read, Parcel, Failed)

encode = _CODEC.encode
decode = _CODEC.decode
