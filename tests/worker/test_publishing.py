"""What a worker says of versions that servers refuse."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from paceline.core.consistency import Consistency
from paceline.errors import UsageError
from paceline.worker.publishing import Publisher


def refused(_server: int, _make: object) -> Future[memoryview]:
    future = Future[memoryview]()
    future.set_exception(UsageError("too often"))
    return future


def test_of_versions_that_are_refused_the_1st_10th_and_100th_are_told_and_all_are_counted_at_the_end() -> None:
    told, rpc = list[str](), SimpleNamespace(start_call=refused, wait_answer=lambda future, _: future.result())
    node: Any = SimpleNamespace(clock=0, num_servers=1, rpc=rpc)
    table: Any = SimpleNamespace(name="w", consistency=Consistency.parse("bsp"))
    publisher = Publisher(node, told.append)
    for node.clock in range(1, 13):
        publisher.publish("policy", 1, [table], b"")
    node.clock = 13
    publisher.publish("other", 1, [table], b"")
    publisher.settle()
    assert told == [
        "version 1 of 'policy' was not published: too often",
        "version 10 of 'policy' was not published, as 9 others: too often",
        "version 13 of 'other' was not published: too often",
        "12 versions of 'policy' were not published",
    ]
