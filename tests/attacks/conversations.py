"""Whole conversations of a worker with valid credentials, and the honest one that they are judged by."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import torch
from msgspec.structs import replace
from safetensors.torch import save
from tests.attacks.malformed import EXTREMES
from tests.attacks.rogue import MOST, Rogue, bytes_of, dense, row_table
from tests.attacks.sessions import Said, Talker
from tests.data.service.feeders import MISSING, ODD, ODD_SKIPPED, RECIPE
from tests.data.service.speaking import Caller, body_of
from tests.nodes.client import Client, as_body
from tests.nodes.cluster import table

from paceline.core import messages
from paceline.core.messages import Applied, Clock, Fetched, Join, Joined, Pull, Push, PushId, Sender, Ticked
from paceline.data.service.messages import BatchAnswer, Message, OpenSource, ReadBatches, SourceOpened
from paceline.data.service.messages import decode as decode_fed
from paceline.data.sources.declared import encode_recipe
from paceline.errors import PeerError
from paceline.transport.base import EMPTY, Connection
from paceline.update import named_rules as update
from paceline.update.rows.spec import First
from paceline.update.rules import Hyper, RuleSpec
from paceline.update.table import Segment
from paceline.wire import requests
from paceline.wire.messages import Hello, Keys, PullFrame, PushFrame, RowPullFrame, RowPushFrame
from paceline.wire.requests import Declare, DeclareRows, Initialise, RequestDone

NUMEL = 1000
IDS = torch.arange(16)
BURST = 15  # messages before the answers are looked at
PER_CONNECTION = 45
PAUSE_S = 0.005  # between two steps of the honest worker
STATES = ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum", "mu_product", "square_avg", "x")
RULES = tuple(update.torch_optim(name) for name in ("Adam", "SGD", "NAdam", "RMSprop", "Adagrad", "Adafactor"))
FOREACH = tuple(update.torch_optim(name, foreach=True) for name in ("Adam", "SGD", "Adagrad"))
FUSED = tuple(update.torch_optim(name, fused=True) for name in ("Adam", "SGD"))
DTYPES = (torch.float32, torch.float32, torch.float32, torch.float64, torch.int64, torch.float16, torch.bool)

Enter = Callable[[Hello], Connection]  # connect as this worker


class Conversation(Talker):
    """Says what a `Talker` says, and states, hyperparameters, farewells and requests for too much; as one life."""

    def __init__(self, seed: int, me: Sender) -> None:
        super().__init__(seed, me)
        self._sayings = (
            *self._sayings,
            *(self._load, self._load, self._declare, self._change, self._change, self._too_much, self._call),
        )

    def begin(self, me: Sender) -> None:
        """Speak as another life from now on."""
        self.me, self._num_pushes = me, 0

    def leaves(self) -> bool:
        return self._random.random() < 0.2

    def listens(self) -> bool:
        return self._random.random() < 0.95

    def _declare(self) -> Said:
        pick = self._random.choice
        rule: RuleSpec = pick((*RULES, *FOREACH, *FUSED))
        if self._random.random() < 0.3:
            rule = replace(rule, groups=(self._changed(rule.groups[0]),))
        spec = replace(dense(pick(("d0", "d1")), rule=rule), segments=(Segment("a", (2,)), Segment("b", (2,))))
        return Declare(self._random.randrange(100), spec), b""

    def _changed(self, group: Hyper) -> Hyper:
        """Put something else in place of one hyperparameter, or beside them."""
        name = self._random.choice((*group, "fused", "foreach", "capturable", "differentiable", "params", "x"))
        value = self._random.choice([each for each in EXTREMES if each is None or isinstance(each, bool | int | float)])
        return {**group, name: value}  # pyright: ignore[reportReturnType]

    def _change(self) -> Said:
        rule: RuleSpec = self._random.choice((*RULES, *FOREACH, *FUSED))
        group = self._changed(rule.groups[0]) if self._random.random() < 0.5 else rule.groups[0]
        numbers = bytes_of(torch.randn(4, generator=self._torch))
        return PushFrame(self._push_of("d"), 1.0, (), (group,)), numbers

    def _load(self) -> Said:
        pick = self._random.choice
        state = {"values": torch.randn(pick((4, 4, 4, 4, 4, 3, 0)), generator=self._torch)}
        for name in self._random.sample(STATES, self._random.randrange(5)):
            for piece in (0, 1, 9)[: self._random.randrange(1, 4)]:
                shape = pick(((), (2,), (2,), (2,), (1,), (4,), (2, 1), (0,), (10_000,)))
                state[f"{piece}.{name}"] = torch.full(shape, pick((0.0, 1.0, 3.0, -1.0, torch.inf, torch.nan))).to(
                    torch.float32
                )
        state = {key: value.nan_to_num().to(pick(DTYPES)) if "." in key else value for key, value in state.items()}
        body = bytearray(save(state))
        if self._random.random() < 0.2:
            body[self._random.randrange(len(body))] ^= 1 << self._random.randrange(8)
        return requests.LoadState(self._random.randrange(300), pick(("d0", "d1", "r0"))), bytes(body)

    def _call(self) -> Said:
        pick = self._random.choice
        table_call = requests.TableCall(
            self._random.randrange(200), pick(("d0", "r0", "r1")), 0, self._random.randrange(100)
        )
        path = pick(("os:abort", "test.support:x", "_testcapi:crash", "__main__:f", "tests.attacks.endings:function"))
        kind, k = pick((path, "top", "sample")), pick((1, 2**40, 2**62, MOST, -1))
        return requests.CallFunction(table_call, kind, {} if kind == path else {"k": k}), b""

    def _too_much(self) -> Said:
        """Ask for what would take too much time or memory; rarely, as it takes some to say."""
        if self._random.random() < 0.9:
            return self._pull()
        pick, number = self._random.choice, self._random.randrange(100)
        wide = row_table("wide", update.Add(), width=1 << 20, dtype="float64", first=First("normal", 1.0))
        num = pick((1, 2, 3, 8000))
        pull = RowPullFrame(Pull(self.me, number, "wide", 0, pick((0, 2**60))), Keys(num, b"", sent=True))
        deep = replace(dense("deep"), segments=(Segment("a", (2,) * pick((65, 100_000))),))
        said: tuple[Said, ...] = (
            (DeclareRows(number, wide), b""),
            (pull, bytes_of(torch.arange(num))),
            (Declare(number, deep), b""),
            (Declare(number, dense("large", pick((2**40, 2**62, MOST)))), b""),
            (Declare(number, dense("long", consistency="ssp:" + "9" * 5000)), b""),
            (PushFrame(self._push_of("d"), 1.0, tuple(range(50_000)), ()), bytes(16)),
            (PushFrame(self._push_of("d"), 1.0, (), ({"x" * 90_000: 1.0},)), bytes(16)),
            (messages.Clock(self.me, 1, tuple(("d0", clock) for clock in range(9000))), b""),
            (requests.ClaimWork(number, "w" * pick((1, 600)), pick((5, 2**40)), pick((1, 9**9)), (1,) * 9, ()), b""),
            (requests.ClaimWork(number, "w", 0, 0, (2**19, 2**19), ()), b""),
            (requests.Barrier(number, "here" * pick((1, 500))), b""),
        )
        return pick(said)


class Honest:
    """A worker that trains a dense table under momentum SGD and rows under Adagrad: the same bits every time."""

    def __init__(self, connection: Connection, me: Sender, busy_s: Callable[[], float] = time.process_time) -> None:
        self._peer, self._me = Client(connection), me
        self._busy_s = busy_s  # what the server has computed for so far, which a busy machine makes no longer
        self._noise = torch.Generator().manual_seed(0)
        self._num_steps = 0
        self.slowest_s = 0.0  # that a server has computed for between a message and its answer
        self.digests: list[bytes] = []
        self._peer.say(Join(me))
        self._peer.hear(Joined)
        self._ask(Declare(1, table("w", NUMEL, "asynchronous", rule=update.SGD(lr=0.1, momentum=0.9))))
        self._ask(Initialise(2, "w"), as_body(torch.ones(NUMEL)))
        self._ask(DeclareRows(3, row_table("r", update.Adagrad(lr=0.1), first=First("normal", 1.0))))

    def _ask(self, message: object, body: memoryview = EMPTY) -> None:
        self._peer.say(message, body)
        self._peer.hear(RequestDone)

    def step(self) -> None:
        """Read both tables, push what depends on them, finish a clock; each has to be answered before the next."""
        number = self._num_steps = self._num_steps + 1
        weights = self._time(PullFrame(Pull(self._me, number, "w", 0, 0), number - 1), b"", Fetched)
        pull = RowPullFrame(Pull(self._me, number, "r", 0, 0), Keys(len(IDS), b"", sent=True))
        rows = self._time(pull, bytes_of(IDS), Fetched)
        for seq, name, read in ((2 * number, "w", weights), (2 * number + 1, "r", rows)):
            values = torch.frombuffer(bytearray(read), dtype=torch.float32)
            gradient = bytes_of(values.cos() * torch.randn(len(values), generator=self._noise))
            push = Push(PushId(self._me.generation, self._me.worker, self._me.incarnation, seq), name, 0, seq)
            if name == "w":
                self._time(PushFrame(push, 1.0, (), ()), gradient, Applied)
            else:
                frame = RowPushFrame(push, 1.0, (), Keys(len(IDS), b"", sent=True))
                self._time(frame, bytes_of(IDS) + gradient, Applied)
        self._time(Clock(self._me, number), b"", Ticked)
        self.digests.append(blake2b(weights + rows, digest_size=16).digest())

    def _time(self, message: object, body: bytes, kind: type[Any]) -> bytes:
        began_s = self._busy_s()
        self._peer.say(message, memoryview(body))
        answer = self._peer.hear(kind)[1]
        self.slowest_s = max(self.slowest_s, self._busy_s() - began_s)
        return bytes(answer)


@dataclass
class Beside:
    """Steps of an honest worker on a thread of its own, while others speak."""

    honest: Honest
    error: BaseException | None = None
    _ended: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Beside:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(60.0)
            assert not self._thread.is_alive(), "the honest worker hangs"

    def _run(self) -> None:
        try:
            while not self._ended.wait(PAUSE_S):
                self.honest.step()
        except BaseException as error:
            self.error = error


def converse(enter: Enter, lives: Iterator[Sender], seed: int, num_messages: int) -> int:
    """Say so many things over many connections and lives; return how many were said."""
    num_said = connection = 0
    talker = Conversation(seed, next(lives))
    while num_said < num_messages:
        me = talker.me
        with closing(enter(Hello("worker", me.worker, me.incarnation, me.generation, connection))) as opened:
            num_said += _talk(Rogue(Client(opened), me.worker, me), talker)
        connection += 1
        if talker.leaves():
            talker.begin(next(lives))
            connection = 0
    return num_said


def _talk(rogue: Rogue, talker: Conversation) -> int:
    """Say some things, and go without a word, be it in the middle or after a farewell."""
    num_said = 0
    with suppress(PeerError):
        rogue.say(Join(talker.me))
        for message, body in talker.openings():
            rogue.say(message, body)
            num_said += 1
        while num_said < PER_CONNECTION:
            for _ in range(BURST):
                rogue.say(*talker.say())
                num_said += 1
            if not talker.listens():
                return num_said
            if "cut" in rogue.hear():
                return num_said
        if talker.leaves():
            rogue.say(messages.Leave(talker.me))
    return num_said


class Asker:
    """Asks a data server for sources and batches, returns what it was lent, and says what it may not now and then."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._send_buffers: list[int] = []

    def talk(self, peer: Caller) -> int:
        """Say some things, take in the answers of most, and return how many were said before the line was cut."""
        self._send_buffers, opened, num_said = [], set[int](), 0
        for number in range(self._random.randrange(1, 40)):
            with suppress(PeerError):
                message, body = self._say(number, opened)
                peer.say(message, body)
                num_said += 1
                if self._random.random() < 0.95:
                    self._hear(peer, opened)
        return num_said

    def _say(self, number: int, opened: set[int]) -> tuple[Message, memoryview]:
        pick = self._random.choice
        if not opened or self._random.random() < 0.1:
            recipe = encode_recipe(pick((RECIPE, ODD, ODD_SKIPPED, MISSING)))
            return OpenSource(number), memoryview(pick((recipe,) * 9 + (recipe[:-3],)))
        indices = [pick((0, 1, 7, 9999) * 5 + (-1, 10_000, 2**62)) for _ in range(pick((0, 1, 3, 200)))]
        source = pick((*opened, *opened, *opened, *opened, 99))
        returned = tuple(self._send_buffers[: pick((0, 1, 9))]) + pick(((),) * 30 + ((12345,),))
        del self._send_buffers[: len(returned)]
        num = pick((len(indices),) * 30 + (2**62,))
        read = ReadBatches(number, source, pick((0, 1, 2**62, -1)), num, pick((True, False)), returned)
        return read, body_of(indices)

    def _hear(self, peer: Caller, opened: set[int]) -> None:
        answer = decode_fed(peer.connection.receive(timeout_s=30).header)
        if isinstance(answer, SourceOpened):
            opened.add(answer.number)
        elif isinstance(answer, BatchAnswer) and answer.lent_buffer >= 0:
            self._send_buffers.append(answer.lent_buffer)
