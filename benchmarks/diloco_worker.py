"""One worker of `diloco.py`: learns the next letter of a text under each strategy in turn, counting bytes over tcp.

The text is the language reference that Python's `help()` shows. Every strategy gets the same first values, batches and
inner optimizer. Worker 0 prints what came of it as one line of JSON for each strategy and seed.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import paceline
from paceline.api.script import bind
from paceline.api.session import Session
from paceline.job.carriers import make_transport
from paceline.job.credentials.holders import Holder
from paceline.job.environment import find_place
from paceline.job.spec import wait_spec
from paceline.training.strategy import Strategy
from paceline.transport.base import EMPTY, AllocateBody, Connection, Frame, Listener, PeerIdentity, Transport

CONTEXT, LETTERS, WIDTH, HIDDEN, BATCH = 12, 64, 16, 256, 32
LR = 2e-3
EVERY = 100  # steps between two looks


@dataclass(slots=True)
class Counts:
    """Bytes of frames, both ways: what they carry, and what says what that is."""

    bodies: int = 0
    headers: int = 0

    def note(self, header: bytes, body: memoryview) -> None:
        """Count one frame."""
        self.bodies += body.nbytes
        self.headers += len(header)


@dataclass(slots=True)
class CountedConnection:
    """A connection whose frames are counted."""

    inner: Connection
    counts: Counts

    @property
    def peer(self) -> str:
        """The process at the other end."""
        return self.inner.peer

    @property
    def identity(self) -> bytes:
        """What the connecting side said of itself."""
        return self.inner.identity

    @property
    def peer_identity(self) -> PeerIdentity:
        """What the certificate of the other end says."""
        return self.inner.peer_identity

    def send(self, header: bytes, body: memoryview = EMPTY, *, timeout_s: float) -> None:
        """Send one frame."""
        self.inner.send(header, body, timeout_s=timeout_s)
        self.counts.note(header, body)

    def try_send(self, frames: Sequence[tuple[bytes, memoryview]], *, timeout_s: float) -> bool:
        """Send frames together."""
        is_sent = self.inner.try_send(frames, timeout_s=timeout_s)
        if is_sent:
            for header, body in frames:
                self.counts.note(header, body)
        return is_sent

    def has_room(self, body: memoryview) -> bool:
        """Return whether a body would be sent at once."""
        return self.inner.has_room(body)

    def receive(self, *, timeout_s: float, place: AllocateBody | None = None) -> Frame:
        """Wait for the next frame."""
        frame = self.inner.receive(timeout_s=timeout_s, place=place)
        self.counts.note(frame.header, frame.body)
        return frame

    def has_frame(self) -> bool:
        """Return whether the next frame is here."""
        return self.inner.has_frame()

    def fileno(self) -> int | None:
        """Return a descriptor to wait for."""
        return self.inner.fileno()

    def close(self) -> None:
        """End the connection."""
        self.inner.close()


@dataclass(slots=True)
class CountedTransport:
    """A transport whose connections are counted together."""

    inner: Transport
    counts: Counts

    @property
    def name(self) -> str:
        """The scheme of its addresses."""
        return self.inner.name

    @property
    def maps_memory(self) -> bool:
        """Whether an allocated body arrives as a mapping."""
        return self.inner.maps_memory

    def allocate(self, size_bytes: int) -> memoryview:
        """Give writable memory."""
        return self.inner.allocate(size_bytes)

    def listen(self, address: str) -> Listener:
        """Open a listener."""
        return self.inner.listen(address)

    def connect(self, address: str, identity: bytes, *, timeout_s: float) -> CountedConnection:
        """Connect to an address."""
        return CountedConnection(self.inner.connect(address, identity, timeout_s=timeout_s), self.counts)


def text() -> Tensor:
    """Return the letters of the language reference as numbers, rare ones all as the same."""
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    letters = "\n".join(topics.values())
    common = sorted(set(letters), key=lambda letter: -letters.count(letter))[: LETTERS - 1]
    numbers = {letter: number for number, letter in enumerate(sorted(common), start=1)}
    return torch.tensor([numbers.get(letter, 0) for letter in letters])


class NextLetter(nn.Module):
    """A perceptron over the last few letters."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(LETTERS, WIDTH)
        self.layers = nn.Sequential(nn.Linear(CONTEXT * WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, LETTERS))

    def forward(self, context: Tensor) -> Tensor:
        """Return a logit for each letter: (samples, letters)."""
        return self.layers(self.letters(context).flatten(1))


def batches(letters: Tensor, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Give contexts with the letters behind them, from anywhere."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(letters) - CONTEXT, (BATCH,), generator=generator)
        windows = letters[starts[:, None] + torch.arange(CONTEXT + 1)]
        yield windows[:, :-1], windows[:, -1]


def strategies() -> dict[str, Strategy | str]:
    """Return what is compared: first what takes every step together."""
    return {
        "bsp": "bsp",
        "local-sgd:1": paceline.strategies.local_sgd(1),
        "local-sgd:10": paceline.strategies.local_sgd(10),
        "local-sgd:50": paceline.strategies.local_sgd(50),
        "diloco:10": paceline.strategies.diloco(10),
        "diloco:50": paceline.strategies.diloco(50),
    }


@contextmanager
def counted(counts: Counts) -> Iterator[Session]:
    """Join the job over a carrier that is counted."""
    place = find_place()
    if place is None:
        raise SystemExit("this is started by diloco.py")
    transport = make_transport(wait_spec(place.spec_path, 60.0), Holder("worker", place.rank), lambda said: None)
    with paceline.connect(transport=CountedTransport(transport, counts), place=place) as session:
        bind(session)
        yield session


@dataclass(slots=True)
class Course:
    """What is learned by one worker, and how it is judged."""

    session: Session
    counts: Counts
    learned: Tensor
    judged: list[tuple[Tensor, Tensor]]
    num_steps: int

    def learn(self, name: str, strategy: Strategy | str, seed: int) -> dict[str, object]:
        """Train under one strategy; return losses on letters not learned from, and the bytes of all steps."""
        torch.manual_seed(seed)
        model = NextLetter()
        inner = torch.optim.AdamW(model.parameters(), lr=LR)
        optimizer = paceline.distributed(inner, strategy=strategy, model=model, name=f"{name}, seed {seed}")
        source = batches(self.learned, 1000 * seed + self.session.rank)
        curve: list[tuple[int, float]] = []
        bodies = headers = 0
        for done in range(EVERY, self.num_steps + 1, EVERY):
            paceline.barrier()
            before = self.counts.bodies, self.counts.headers
            for _ in range(EVERY):
                contexts, wanted = next(source)
                optimizer.zero_grad()
                cross_entropy(model(contexts), wanted).backward()
                optimizer.step()
            bodies += self.counts.bodies - before[0]
            headers += self.counts.headers - before[1]
            paceline.barrier()
            if self.session.rank == 0:
                with optimizer.snapshot():
                    curve.append((done, self.judge(model)))
        paceline.barrier()
        return {"strategy": name, "seed": seed, "bodies": bodies, "headers": headers, "curve": curve}

    def judge(self, model: nn.Module) -> float:
        """Return the mean loss, in nats a letter."""
        losses = [cross_entropy(model(contexts), wanted).item() for contexts, wanted in self.judged]
        return sum(losses) / len(losses)


def main() -> None:
    """Train under every strategy with every seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    letters, counts = text(), Counts()
    learned, held_out = letters[: len(letters) * 9 // 10], letters[len(letters) * 9 // 10 :]
    judged = [next(batches(held_out, seed=index)) for index in range(64)]
    with counted(counts) as session:
        course = Course(session, counts, learned, judged, options.steps)
        for seed in range(options.seeds):
            for name, strategy in strategies().items():
                found = course.learn(name, strategy, seed)
                if session.rank == 0:
                    print("found " + json.dumps(found), flush=True)
                    print(f"seed {seed}: {name}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
