"""Batch recipe: a source and how to batch it, as plain data that any data server turns into the same batches."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from paceline.data.sources.declared import Source
from paceline.errors import PeerError

OnError: TypeAlias = Literal["raise", "skip"]


class BatchRecipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A source, and what is done with each record of it.

    Args:
        source: made by a function of `paceline.sources`.
        transform: "module:function", which takes a record and returns one; None leaves records as they are. A parameter
            named `generator` gets a `torch.Generator` that depends on seed, epoch and index alone.
        on_error: for a record that cannot be decoded, "raise" fails the batch and "skip" leaves the record out.
        seed: of those generators.
    """

    source: Source
    transform: str | None = None
    on_error: OnError = "raise"
    seed: int = 0


_DECODER = msgspec.msgpack.Decoder(BatchRecipe)


def encode_recipe(recipe: BatchRecipe) -> bytes:
    """Return the recipe as msgpack, the same bytes for equal recipes; `decode_recipe` is the inverse."""
    return msgspec.msgpack.encode(recipe, order="sorted")


def decode_recipe(data: bytes | memoryview) -> BatchRecipe:
    """Decode a recipe of another process; opening it validates it.

    Raises:
        PeerError: the data are not a recipe.
    """
    try:
        return _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise PeerError(f"a peer sent a recipe that cannot be read (do both run the same version?): {error}") from error
