"""The queue of connections before `accept`: they come in order, and none outlives the queue."""

import pytest

from paceline.errors import ConnectionLost, DeadlineExceeded
from paceline.transport import Connection, MemoryTransport
from paceline.transport.accept_queue import AcceptQueue

ADDRESS = "memory://queue"


def ends() -> tuple[Connection, Connection]:
    transport = MemoryTransport()
    listener = transport.listen("memory://gateway")
    client = transport.connect(listener.address, b"", timeout_s=10.0)
    accepted = listener.accept(timeout_s=10.0)
    listener.close()
    return client, accepted


@pytest.mark.parametrize("is_early", [True, False])
def test_a_connection_that_is_put_as_the_queue_closes_is_ended(is_early: bool) -> None:
    queue, (client, accepted), put = AcceptQueue[Connection](ADDRESS), ends(), list[bool]()
    steps = [lambda: put.append(queue.put(accepted)), queue.close]
    for step in steps if is_early else reversed(steps):
        step()
    assert put == [is_early]
    with pytest.raises(ConnectionLost):
        client.receive(timeout_s=10.0)
    with pytest.raises(ConnectionLost, match="the listener at memory://queue was closed"):
        queue.accept(timeout_s=10.0)


def test_connections_are_accepted_in_their_order_and_then_none() -> None:
    queue, put = AcceptQueue[Connection](ADDRESS), [ends()[1], ends()[1]]
    assert [queue.put(connection) for connection in put] == [True, True]
    assert [queue.accept(timeout_s=10.0) for _ in put] == put
    with pytest.raises(DeadlineExceeded, match="waited 0 s for a connection at memory://queue; none came"):
        queue.accept(timeout_s=0.0)
    queue.close()
