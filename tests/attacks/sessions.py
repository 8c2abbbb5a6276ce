"""What a worker may say that makes tables of every kind and works with them, in any order and with any numbers."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from msgspec.structs import replace
from safetensors.torch import save
from tests.attacks.malformed import ME
from tests.attacks.rogue import MOST, bytes_of

from paceline.core import messages
from paceline.core.messages import Pull, Push, PushId, Sender
from paceline.update import named_rules as update
from paceline.update.rows.spec import FilterSpec, First, Lifecycle, RowTableSpec
from paceline.update.rules import Quorum, RuleSpec
from paceline.update.table import Segment, TableSpec
from paceline.wire import requests
from paceline.wire.messages import (
    Keys,
    PullFrame,
    PushFrame,
    RowPullFrame,
    RowPushFrame,
    RowsUsed,
    StepFrame,
    Unsubscribe,
    joined,
)
from paceline.wire.requests import TableCall

NUMBERS = (0, 1, 2, 3, -1, 5, 2**31, 2**53, 2**62, 2**63 - 1, 2**63, -(2**63), MOST)
CLOCKS = (0, 0, 1, 2, 3, 2**62)
TABLES = ("d0", "d1", "r0", "r1")
RULES = (
    *(update.Add(), update.SGD(lr=0.1, momentum=0.9), update.Adam(), update.Adagrad(), update.FTRL(l1=0.1)),
    *(update.RowwiseAdagrad(), update.AdaptiveRevision(), update.Proximal(0.1, l1=0.1)),
    *(update.DelayedNesterov(0.1, every=2), RuleSpec("add", ({},), Quorum(2, 0.0, 2))),
)
POLICIES = ("bsp", "ssp:1", "essp:1", "asynchronous", "backup:1")
FILTERS = (
    *(
        (),
        (FilterSpec("int8", {"push": True, "pull": True}),),
        (FilterSpec("bfloat16", {"push": True, "pull": False}),),
    ),
    (FilterSpec("key_cache", {"max_lists": 2, "max_ids": 10}),),
)
LIVES = (
    *(Lifecycle(), Lifecycle(admit_after=2), Lifecycle(expire_after=1, floor=1), Lifecycle(max_rows=3)),
    Lifecycle(max_rows=2, evict="lfu"),
)

Said = tuple[object, bytes]


class Talker:
    """Says things without end, the same ones from the same seed."""

    def __init__(self, seed: int, me: Sender = ME) -> None:
        self.me = me
        self._random = random.Random(seed)
        self._num_pushes = 0
        self._torch = torch.Generator().manual_seed(seed)
        self._sayings: tuple[Callable[[], Said], ...] = (
            *(self._push, self._push, self._rows, self._rows, self._rows, self._row_pull, self._row_pull),
            *(self._pull, self._progress, self._give_up, self._table_call, self._request, self._table),
        )

    def say(self) -> Said:
        return self._random.choice(self._sayings)()

    def openings(self) -> list[Said]:
        """Return what makes every table, of some kind."""
        return [self._table(name) for name in TABLES]

    def _push_of(self, table: str) -> Push:
        """Return a push, mostly the next one and to a table of that kind."""
        pick, me = self._random.choice, self.me
        self._num_pushes += 1
        seq = pick((self._num_pushes,) * 7 + (self._num_pushes - 1, self._random.randrange(20)))
        return Push(
            PushId(me.generation, me.worker, me.incarnation, seq),
            pick((f"{table}0", f"{table}1", pick(TABLES))),
            pick(CLOCKS),
            seq,
        )

    def _pull_of(self, needs: tuple[int, ...] = CLOCKS) -> Pull:
        return Pull(self.me, self._random.randrange(50), self._random.choice(TABLES), 0, self._random.choice(needs))

    def _ids(self) -> torch.Tensor:
        known = (1, 2, 3, 4, -1, 2**63 - 1, -(2**63), 7)
        ids = [self._random.choice(known) for _ in range(self._random.randrange(5))]
        return torch.tensor(ids, dtype=torch.int64)

    def _keys(self, num: int) -> Keys:
        pick = self._random.choice
        digest = pick((b"",) * 9 + (b"x" * 16,))
        return Keys(pick((num,) * 9 + (pick(NUMBERS),)), digest, sent=pick((True,) * 9 + (False,)))

    def _push(self) -> Said:
        numbers = bytes_of(torch.randn(4, generator=self._torch))
        body = self._random.choice((bytes(16), numbers, numbers, b"", bytes(12)))
        absent = self._random.choice(((), (0,), (0, 0)))
        push = PushFrame(self._push_of("d"), 1.0, absent, self._random.choice(((), (), (), RULES[1].groups)))
        if self._random.random() < 0.3:
            return self._step(push, body)
        return push, body

    def _step(self, push: PushFrame, body: bytes) -> Said:
        pick, num = self._random.choice, self._random.choice((1, 1, 2, 3))
        pushes = (push, *(replace(push, push=self._push_of("d")) for _ in range(num - 1)))
        pulls = tuple(PullFrame(self._pull_of((0, 1)), 0) for _ in range(pick((0, 1, 2))))
        size = pick((len(body),) * 9 + (8,))
        whole = joined([memoryview(body)] * num) if body else b""
        return StepFrame(pushes, pick((-1, 0, 1, 2)), pulls, (size,) * num), bytes(whole)

    def _rows(self) -> Said:
        ids = self._ids()
        rows = bytes_of(torch.randn(len(ids), 2, generator=self._torch))
        hyper = self._random.choice(((), (), self._random.choice(RULES).groups))
        frame = RowPushFrame(self._push_of("r"), self._random.choice((1.0, 0.0)), hyper, self._keys(len(ids)))
        whole = bytes_of(ids) + rows
        if self._random.random() < 0.2:
            return StepFrame((), self._random.choice((-1, 0, 1, 2)), (), (len(whole),), (frame,)), whole
        return frame, self._random.choice((whole,) * 9 + (rows, bytes_of(ids)))

    def _row_pull(self) -> Said:
        ids = self._ids()
        return RowPullFrame(self._pull_of(), self._keys(len(ids))), bytes_of(ids)

    def _pull(self) -> Said:
        return PullFrame(self._pull_of((0, 1)), self._random.choice(NUMBERS)), b""

    def _progress(self) -> Said:
        pick = self._random.choice
        tick = messages.Clock(self.me, pick((1, 2, 3, 4, 5, 100)), ((pick(TABLES), pick(CLOCKS)),))
        return pick((tick, messages.Taken(self.me, pick(TABLES), pick(CLOCKS)), messages.Join(self.me))), b""

    def _give_up(self) -> Said:
        if self._random.random() < 0.5:
            return RowsUsed(self.me, self._random.choice(TABLES), self._random.choice(NUMBERS)), bytes_of(self._ids())
        return Unsubscribe(self.me, self._random.choice(TABLES), self._random.choice((0, 5, 60))), bytes_of(self._ids())

    def _table_call(self) -> Said:
        pick, number = self._random.choice, self._random.randrange(200)
        table_call = TableCall(number, pick(TABLES), pick((0, 1, 2**60)), self._random.randrange(100))
        numbers = pick(({"k": 3}, {"factor": 2.0}, {"threshold": 0.1}, {}, {"k": pick(NUMBERS), "seed": pick(NUMBERS)}))
        function = pick(("top", "sample", "summary", "scale", "soft_threshold"))
        ids = self._ids().unique()
        rows = save({"ids": ids, "values": torch.randn(len(ids), 2, generator=self._torch)})
        said: tuple[Said, ...] = (
            (requests.CallFunction(table_call, function, numbers), b""),
            (requests.CountRows(table_call), b""),
            (requests.ReadRows(table_call, pick(NUMBERS), values_only=pick((True, False))), b""),
            (requests.WriteRows(table_call), rows),
            (requests.BeginCut(table_call, values_only=pick((True, False)), since=pick((None, "", "marks"))), b""),
            (requests.ReadCut(table_call.number, table_call.table, pick(NUMBERS)), b""),
            (requests.EndCut(table_call.number, table_call.table), b""),
        )
        return pick(said)

    def _request(self) -> Said:
        pick, number, table = self._random.choice, self._random.randrange(300), self._random.choice(TABLES)
        piece = requests.ClaimWork(number, "w", pick((0, 1, 2)), pick((0, 1, 2)), pick(((1, 2), ())), ())
        said = (requests.Initialise, requests.AwaitValues, requests.SaveState, requests.Describe, requests.Barrier)
        return pick((piece, *(kind(number, table) for kind in said))), pick((bytes(16), b""))

    def _table(self, name: str = "") -> Said:
        pick, number, table = self._random.choice, self._random.randrange(100), name or self._random.choice(TABLES)
        policy, scale, first = pick(POLICIES), pick(("sum", "mean", "samples")), First("normal", 1.0, pick(NUMBERS))
        parts, how = (Segment("a", (2,)), Segment("b", (2,))), pick(("reject", "zero"))
        dense = TableSpec(table, parts, "float32", pick(RULES), policy, scale, how)
        life, filters = pick(LIVES), pick(FILTERS)
        rows = RowTableSpec(table, 2, "float32", pick(RULES), policy, scale, how, first, life, filters)
        as_named = requests.Declare(number, dense) if table < "r" else requests.DeclareRows(number, rows)
        return pick((as_named, as_named, as_named, requests.Declare(number, dense))), b""
