"""Encoding of messages: one byte for the kind, then the message in MessagePack, checked field by field.

Nothing is ever unpickled, and a message that does not match its declared fields is refused before it is used.
"""

from __future__ import annotations

from typing import Generic, TypeVar, final

import msgspec

from paceline.errors import PeerError

Message = TypeVar("Message")


@final
class MessageCodec(Generic[Message]):
    """Encodes and decodes messages of the given kinds. The position is the kind byte: append, never reorder."""

    def __init__(self, *kinds: type[Message]) -> None:
        self.kinds = kinds
        self._number = {kind: number for number, kind in enumerate(kinds)}
        self._encoder = msgspec.msgpack.Encoder()
        self._decoders = tuple(msgspec.msgpack.Decoder(kind) for kind in kinds)

    def kind_byte(self, kind: type[Message]) -> bytes:
        """Return the first byte of every header of this kind."""
        return bytes((self._number[kind],))

    def encode(self, message: Message) -> bytes:
        """Return the header of a frame that carries this message."""
        return bytes((self._number[type(message)],)) + self._encoder.encode(message)

    def decode(self, header: bytes) -> Message:
        """Return the message in the header of a frame.

        Raises:
            PeerError: the bytes are not a valid message.
        """
        if not header or header[0] >= len(self.kinds):
            raise PeerError(
                f"a message of unknown kind {header[:1].hex() or 'nothing'}; is the peer of another version?"
            )
        try:
            return self._decoders[header[0]].decode(memoryview(header)[1:])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise PeerError(f"a malformed {self.kinds[header[0]].__name__} message: {error}") from error
