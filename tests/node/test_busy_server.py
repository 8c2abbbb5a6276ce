"""A server that always has something to do keeps its deadlines all the same."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from tests.node.client import member, serve_table
from tests.node.cluster import cluster

from paceline.core.closing import MAX_AT_ONCE
from paceline.core.messages import Clock, Sender, Ticked
from paceline.node.orders import Holdings

FAR = 3 * MAX_AT_ONCE
PATIENCE_S = 10.0


def test_what_is_due_is_done_although_there_is_always_something_to_take_in(tmp_path: Path) -> None:
    with cluster("memory", tmp_path, num_servers=1) as servers, member(servers, 0) as worker:
        serve_table(worker, consistency="bsp")
        [server] = servers.servers
        until_s, has_ended, clocks = time.monotonic() + PATIENCE_S, threading.Event(), [0]

        def keep_busy(holdings: Holdings) -> None:
            clocks[0] = holdings.core.clock_of("w")
            if clocks[0] < FAR and time.monotonic() < until_s:
                server.do(keep_busy)
            else:
                has_ended.set()

        server.do(keep_busy)
        worker.say(Clock(Sender(1, 0, 0), FAR))
        worker.hear(Ticked)
        assert has_ended.wait(2 * PATIENCE_S)
    assert clocks == [FAR]
