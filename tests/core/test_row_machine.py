"""Row tables in any order of events: reads are as fresh as they say, and contain what their reader pushed."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from tests.core.row_stage import RowStage

from paceline.core.consistency import Consistency, asynchronous, bsp, essp, ssp

POINTS = (bsp(), ssp(0), ssp(2), essp(0), essp(2), asynchronous(), Consistency(2, "on_clock"))
POINTS = (*POINTS, Consistency(1, "on_clock", "on_clock"))
RANKS, SERVERS = st.integers(0, 2), st.integers(0, 1)
ROWS = st.sets(st.integers(0, 5), max_size=4)


class RowCluster(RuleBasedStateMachine):
    """Three workers and one or two servers."""

    @initialize(point=st.sampled_from(POINTS), num_servers=st.integers(1, 2))
    def start(self, point: Consistency, num_servers: int) -> None:
        self.stage, self.num_servers = RowStage(point, 3, num_servers), num_servers

    @rule(rank=RANKS, rows=ROWS)
    def push(self, rank: int, rows: set[int]) -> None:
        self.stage.push(rank, rows)

    @rule(rank=RANKS)
    def tick(self, rank: int) -> None:
        self.stage.tick(rank)

    @rule(rank=RANKS, rows=ROWS, refresh=st.booleans())
    def read(self, rank: int, rows: set[int], refresh: bool) -> None:
        self.stage.read(rank, rows, refresh=refresh)

    @rule(rank=RANKS, rows=ROWS)
    def evict(self, rank: int, rows: set[int]) -> None:
        self.stage.evict(rank, rows)

    @rule(rank=RANKS, server=SERVERS, copy=st.booleans())
    def to_server(self, rank: int, server: int, copy: bool) -> None:
        self.stage.to_server(rank, server % self.num_servers, copy=copy)

    @rule(rank=RANKS, server=SERVERS, copy=st.booleans())
    def to_worker(self, rank: int, server: int, copy: bool) -> None:
        self.stage.to_worker(rank, server % self.num_servers, copy=copy)

    @rule(rank=RANKS, server=SERVERS, reconnects=st.booleans())
    def lose(self, rank: int, server: int, reconnects: bool) -> None:
        self.stage.lose(rank, server % self.num_servers, reconnects=reconnects)

    @rule(rank=RANKS, server=SERVERS)
    def overtake(self, rank: int, server: int) -> None:
        self.stage.overtake(rank, server % self.num_servers)

    @rule()
    def wait(self) -> None:
        self.stage.wait()

    @rule()
    def settle(self) -> None:
        self.stage.settle()

    def teardown(self) -> None:
        if hasattr(self, "stage"):
            self.stage.finish()


RowCluster.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRowCluster = RowCluster.TestCase
