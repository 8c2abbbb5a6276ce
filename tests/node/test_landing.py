"""Memory that pushes arrive in: used again once given back, and gone with whatever did not get that far."""

import gc

from paceline.core.messages import Push, PushId
from paceline.node.landing import Landing
from paceline.node.wire import Hello, PushFrame, encode

PUSH = encode(PushFrame(Push(PushId(1, 0, 0, 0), "w", 0, 0), 1.0, (), ()))
SIZE_BYTES = 1 << 20


def address(memory: memoryview) -> int:
    return id(memory.obj)


def taken(landing: Landing) -> memoryview:
    memory = landing.place(PUSH, SIZE_BYTES)
    assert memory is not None
    return memory


def test_memory_that_was_given_back_is_used_again_and_once() -> None:
    landing = Landing()
    first, second = taken(landing), taken(landing)
    assert address(first) != address(second)

    landing.give_back(first[:])
    landing.give_back(first)  # twice

    assert address(taken(landing)) == address(first)
    assert address(taken(landing)) not in (address(first), address(second))


def test_a_push_that_breaks_off_leaves_nothing() -> None:
    landing = Landing()
    for _ in range(5):
        taken(landing)  # nobody gives it back
    gc.collect()

    assert len(landing._lent) == 0


def test_what_did_not_arrive_here_is_none_of_its_business() -> None:
    landing = Landing()
    strange = memoryview(bytearray(SIZE_BYTES))
    landing.give_back(strange)

    assert landing.place(encode(Hello("worker", 0, 0, 1)), SIZE_BYTES) is None
    assert landing.place(PUSH, 1000) is None
    assert address(taken(landing)) != address(strange)
