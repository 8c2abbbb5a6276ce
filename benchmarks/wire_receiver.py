"""The receiving process of the wire benchmark: one thread a connection, as a server has."""

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NotRequired, TypedDict

from turns import play
from wire_ends import TIMEOUT_S, End, EndListener, Kind

MAX_CONNECTIONS: Final = 64


class Asked(TypedDict):
    """What the benchmark sends along."""

    kind: Kind
    num: int
    size_bytes: NotRequired[int]


class Receiver:
    """The open doors and the accepted ends of each kind."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._listeners: dict[Kind, EndListener] = {}
        self._ends: dict[Kind, list[End]] = {}
        self._threads = ThreadPoolExecutor(MAX_CONNECTIONS)

    def listen(self, kind: Kind) -> str:
        """Listen for ends of a kind; return the address."""
        self._listeners[kind] = EndListener(kind, self._folder)
        return self._listeners[kind].address

    def accept(self, asked: Asked) -> None:
        """Take in the connections of the other process, and listen no longer."""
        kind, listener = asked["kind"], self._listeners.pop(asked["kind"])
        self._ends[kind] = [listener.accept(asked["size_bytes"]) for _ in range(asked["num"])]
        listener.close()

    def take(self, asked: Asked) -> None:
        """Take some large bodies on every connection."""
        self._on_all(asked["kind"], lambda end: [end.take() for _ in range(asked["num"])])

    def echo(self, asked: Asked) -> None:
        """Answer some small messages on every connection."""
        self._on_all(asked["kind"], lambda end: [_answer(end) for _ in range(asked["num"])])

    def close(self, kind: Kind) -> None:
        """Close the connections of one kind."""
        for end in self._ends.pop(kind):
            end.close()

    def _on_all(self, kind: Kind, act: Callable[[End], object]) -> None:
        for done in [self._threads.submit(act, end) for end in self._ends[kind]]:
            done.result(TIMEOUT_S)


def _answer(end: End) -> None:
    end.take_small()
    end.send_small()


def main() -> None:
    """Take turns."""
    receiver = Receiver(Path(sys.argv[2]))
    acts = (receiver.listen, receiver.accept, receiver.take, receiver.echo, receiver.close)
    play(sys.argv[1], 0, {act.__name__: act for act in acts})


if __name__ == "__main__":
    main()
