"""A rule that fails in an update: its pushes are refused, never acknowledged, and the table is not read any more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
from safetensors.torch import save
from tests.attacks.rogue import bytes_of, row_table
from tests.nodes.client import NUMEL, ONES, Client, as_body, member, push
from tests.nodes.cluster import Cluster, cluster, open_table, read_values, table
from torch import Tensor

from paceline.core.messages import (
    Applied,
    Clock,
    Fetched,
    Held,
    Pull,
    PullRefused,
    Push,
    PushId,
    PushRefused,
    Sender,
    Ticked,
)
from paceline.errors import PeerError
from paceline.server.tables import ServerState
from paceline.update.rules import Quorum, RuleSpec
from paceline.update.torch_rule import torch_optim
from paceline.wire.messages import Keys, PullFrame, RowPullFrame, RowPushFrame, decode
from paceline.wire.requests import (
    Declare,
    DeclareRows,
    Initialise,
    LoadState,
    RequestDone,
    RequestFailed,
    SaveState,
    TableCall,
    WriteRows,
)

DENSE = RuleSpec("tests.nodes.failing_rules:Dense", ({},))
ROWS = RuleSpec("tests.nodes.failing_rules:Rows", ({},))
TORCH = torch_optim("RAdam")
IDS = torch.tensor([1, 2])
KEYS = Keys(2, b"", sent=True)
ROW_BODY = memoryview(bytes_of(IDS) + bytes_of(torch.ones(2, 2)))


def answers(client: Client, num: int) -> list[object]:
    return [decode(client.connection.receive(timeout_s=30).header) for _ in range(num)]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Cluster, Client, Client]]:
    with (
        cluster("memory", tmp_path, num_servers=1) as servers,
        member(servers, 0) as one,
        member(servers, 1) as two,
    ):
        yield servers, one, two


def declare(client: Client, rule: RuleSpec, consistency: str) -> None:
    client.say(Declare(1, table("w", NUMEL, consistency, rule=rule)))
    client.say(Initialise(2, "w"), as_body(torch.zeros(NUMEL)))
    client.say(DeclareRows(3, row_table("r", ROWS, consistency)))
    assert answers(client, 3) == [RequestDone(1), RequestDone(2), RequestDone(3)]


def row_push(seq: int, *, worker: int, clock: int = 0) -> RowPushFrame:
    return RowPushFrame(Push(PushId(1, worker, 0, seq), "r", clock, 0), 1.0, (), KEYS)


def finish(clients: tuple[Client, Client], clock: int) -> None:
    for rank, client in enumerate(clients):
        client.say(Clock(Sender(1, rank, 0), clock))


def test_no_push_of_an_update_that_fails_is_acknowledged(served: tuple[Cluster, Client, Client]) -> None:
    _, *both = served
    one, two = both
    declare(one, DENSE, "bsp")
    for clock in (0, 1):
        for rank, client in enumerate(both):
            client.say(push(2 * clock, clock=clock, worker=rank), ONES)
            client.say(row_push(2 * clock + 1, worker=rank, clock=clock), ROW_BODY)
            assert [type(answer) for answer in answers(client, 2)] == [Held, Held]
        finish((one, two), clock + 1)
        for client in both:
            heard = answers(client, 3)
            kinds = Counter(type(answer) for answer in heard)
            assert kinds == {PushRefused if clock else Applied: 2, Ticked: 1}
            for answer in heard:
                if isinstance(answer, PushRefused):
                    assert "is not read, as an update of it failed: ValueError: the rule gives up" in answer.reason


@pytest.mark.parametrize("rule", [DENSE, TORCH], ids=["own", "torch"])
def test_copies_later_pushes_and_reads_hear_the_same(
    rule: RuleSpec, served: tuple[Cluster, Client, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    def give_up(_: torch.optim.RAdam) -> None:
        raise RuntimeError("torch gives up")

    monkeypatch.setattr(torch.optim.RAdam, "step", give_up)
    servers, one, two = served
    declare(one, rule, "asynchronous")
    one.say(push(0, worker=0), ONES)
    one.hear(Applied if rule is DENSE else PushRefused)
    two.say(push(0), ONES)
    refused, _ = two.hear(PushRefused)
    two.say(push(0), ONES)
    again, _ = two.hear(PushRefused)
    assert refused == again
    two.say(push(1), ONES)
    later, _ = two.hear(PushRefused)
    assert later.reason == refused.reason

    two.say(PullFrame(Pull(Sender(1, 1, 0), 1, "w", 0, 0), 0))
    assert two.hear(PullRefused)[0] == PullRefused(1, "w", refused.reason)
    two.say(SaveState(4, "w"))
    assert answers(two, 1) == [RequestFailed(4, refused.reason)]
    assert servers.num_waiting() == 0


def test_rows_hear_the_same_and_others_go_on(served: tuple[Cluster, Client, Client]) -> None:
    servers, one, two = served
    declare(one, DENSE, "asynchronous")
    one.say(row_push(0, worker=0), ROW_BODY)
    one.hear(Applied)
    one.say(row_push(1, worker=0), ROW_BODY)
    refused, _ = one.hear(PushRefused)
    for request in (1, 2):
        one.say(RowPullFrame(Pull(Sender(1, 0, 0), request, "r", 0, 0), KEYS), as_body(IDS))
        assert one.hear(PullRefused)[0] == PullRefused(request, "r", refused.reason)
    asked: SimpleQueue[int] = SimpleQueue()
    servers.servers[0].do(lambda held: asked.put(len(held.tables["r"].asked)))
    assert asked.get(timeout=30) == 0

    two.say(push(0), ONES)
    two.hear(Applied)
    two.say(PullFrame(Pull(Sender(1, 1, 0), 1, "w", 0, 0), 0))
    _, values = two.hear(Fetched)
    assert torch.frombuffer(values, dtype=torch.float32).tolist() == [1.0] * NUMEL


def test_an_update_that_fails_as_values_are_looked_at_ends_no_server(served: tuple[Cluster, Client, Client]) -> None:
    servers, one, two = served
    declare(one, RuleSpec(DENSE.name, ({},), Quorum(1, 3600.0, 2)), "asynchronous")

    passed: SimpleQueue[float] = SimpleQueue()

    def let_pass(held: ServerState) -> None:
        merger = held.tables["w"].shard._merger
        assert merger is not None
        now = merger.now() + 7200.0
        merger.now = lambda: now
        passed.put(now)

    for seq in (0, 1):
        one.say(push(seq, worker=0), ONES)
        one.hear(Applied)  # it waits for others
        servers.servers[0].do(let_pass)
        passed.get(timeout=30)  # a frame may come before a call
        one.say(PullFrame(Pull(Sender(1, 0, 0), seq + 1, "w", 0, 0), seq))
        heard, _ = one.hear(Fetched if seq == 0 else PullRefused)
    assert isinstance(heard, PullRefused)
    assert "the rule gives up" in heard.reason
    two.say(push(0), ONES)
    assert two.hear(PushRefused)[0].reason == heard.reason


def test_whole_values_that_are_loaded_mend_a_table(served: tuple[Cluster, Client, Client]) -> None:
    _, one, two = served
    declare(one, DENSE, "asynchronous")
    one.say(push(0, worker=0), ONES)
    one.hear(Applied)
    two.say(push(0), ONES)
    two.hear(PushRefused)
    two.say(LoadState(4, "w"), memoryview(save({"values": torch.full((NUMEL,), 7.0)})))
    assert answers(two, 1) == [RequestDone(4)]
    one.say(push(1, worker=0), ONES)
    one.hear(Applied)
    one.say(PullFrame(Pull(Sender(1, 0, 0), 1, "w", 0, 0), 0))
    assert torch.frombuffer(one.hear(Fetched)[1], dtype=torch.float32).tolist() == [8.0] * NUMEL


def test_rows_that_are_loaded_mend_a_table_once_all_that_may_have_changed_are(
    served: tuple[Cluster, Client, Client],
) -> None:
    _, one, _ = served
    declare(one, DENSE, "asynchronous")
    one.say(row_push(0, worker=0), ROW_BODY)
    one.hear(Applied)
    one.say(row_push(1, worker=0), ROW_BODY)
    refused, _ = one.hear(PushRefused)
    for request, loaded in enumerate((IDS[:1], IDS[1:]), 1):
        rows = {"ids": loaded, "values": torch.full((1, 2), 7.0)}
        one.say(RowPullFrame(Pull(Sender(1, 0, 0), request, "r", 0, 0), KEYS), as_body(IDS))
        assert one.hear(PullRefused)[0] == PullRefused(request, "r", refused.reason)
        one.say(WriteRows(TableCall(3 + request, "r", 0, 0)), memoryview(save(rows)))
        assert answers(one, 1) == [RequestDone(3 + request)]
    one.say(row_push(2, worker=0), ROW_BODY)
    one.hear(Applied)
    one.say(RowPullFrame(Pull(Sender(1, 0, 0), 3, "r", 0, 0), KEYS), as_body(IDS))
    assert torch.frombuffer(one.hear(Fetched)[1], dtype=torch.float32).tolist() == [8.0] * 4


def test_a_worker_is_told_of_its_push_and_fails_as_it_reads(tmp_path: Path) -> None:
    with cluster("memory", tmp_path, num_workers=1, num_servers=1) as servers, servers.joined(0) as node:
        open_table(node, table("w", 4, "bsp", rule=DENSE))
        values: Tensor = torch.empty(4)
        outcomes = [node.client("w").push(torch.ones(4), count=1.0)]
        node.tick()
        read_values(node, "w", values)
        outcomes.append(node.client("w").push(torch.ones(4), count=1.0))
        node.tick()
        assert [outcome.result(timeout=30).applied for outcome in outcomes] == [True, False]
        with pytest.raises(PeerError, match=r"refused a pull: table 'w' .* is not read, .* the rule gives up"):
            read_values(node, "w", values)
