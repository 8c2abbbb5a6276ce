import threading

import pytest

from paceline.update.summing import ThreadPool, stretches


@pytest.mark.parametrize("num_threads", [1, 3])
def test_does_every_item_once_and_ends_its_threads(num_threads: int) -> None:
    before = set(threading.enumerate())
    threads = ThreadPool(num_threads)
    done: list[tuple[int, int]] = []

    def work(item: int, thread: int) -> int:
        done.append((item, thread))
        return item

    assert threads.total(range(100), work) == sum(range(100))
    assert threads.total([], work) == 0
    assert sorted(item for item, _ in done) == list(range(100))
    assert {thread for _, thread in done} <= set(range(num_threads))
    own = set(threading.enumerate()) - before  # one that is free again is not doubled
    assert len(own) in (range(1, num_threads) if num_threads > 1 else [0])  # the caller works as well
    threads.close()
    assert set(threading.enumerate()) == before


@pytest.mark.parametrize("num_threads", [1, 2])
def test_raises_what_the_work_raises(num_threads: int) -> None:
    threads = ThreadPool(num_threads)
    with pytest.raises(ZeroDivisionError):
        threads.total([1, 2, 0, 3], lambda item, _: 1 // item)
    threads.close()


def test_stretches_cover_a_length_once() -> None:
    assert list(stretches(10, 4)) == [(0, 4), (4, 8), (8, 10)]
    assert list(stretches(0, 4)) == []
