"""The rows that a worker keeps, with its own pushes on top; and what servers remember of that."""

import torch

from paceline.server.row_table import Subscription
from paceline.update.rows.ops import row_ops
from paceline.worker.rows.cache import UNKNOWN, RowCache

OPS = row_ops("torch")
A, B = torch.tensor([7]), torch.tensor([-8])


def cache(max_rows: int = 0, echo_width: int = 0) -> RowCache:
    return RowCache(OPS, 1 + echo_width, torch.float64, max_rows, echo_width)


def rows(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).view(-1, 1)


def value(kept: RowCache, ids: torch.Tensor = A) -> float:
    return kept.read(ids)[0][0, 0].item()


def test_rows_have_the_clock_that_they_came_with() -> None:
    kept = cache()
    kept.install(0, A, rows(1.0), 3, 0, ())
    assert kept.clocks(torch.cat([A, B])).tolist() == [3, UNKNOWN]
    kept.drop(A)
    assert (len(kept), kept.clocks(A).tolist()) == (0, [UNKNOWN])
    kept.close()


def test_an_own_push_is_added_to_rows_here_and_to_those_that_come_without_it() -> None:
    kept = cache()
    kept.install(0, A, rows(1.0), 0, 0, ())
    kept.note_own(4, torch.cat([A, B]), rows(10.0, 20.0), servers=(0, 1))
    assert value(kept) == 11.0
    kept.install(0, A, rows(2.0), 0, 4, ())
    kept.install(1, B, rows(5.0), 0, 4, ())
    assert (value(kept), value(kept, B)) == (12.0, 25.0)
    kept.install(0, A, rows(13.0), 0, 4, (4,))
    assert value(kept) == 13.0, "the server has it"
    kept.install(1, B, rows(6.0), 0, 4, ())
    assert value(kept, B) == 26.0, "another has not"
    kept.install(1, B, rows(27.0), 0, 5, ())
    assert value(kept, B) == 27.0
    kept.close()


def test_t9_a_push_that_is_applied_stays_on_top_of_rows_that_were_made_before_and_come_after() -> None:
    kept = cache()
    kept.note_own(0, torch.cat([A, B]), rows(10.0, 20.0), servers=(0, 1))
    kept.applied_own(0, awaited={0})
    kept.install(0, A, rows(1.0), 0, 0, ())
    kept.install(1, B, rows(22.0), 0, 0, ())
    assert (value(kept), value(kept, B)) == (11.0, 22.0)
    kept.install(0, A, rows(12.0), 0, 0, (0,))
    kept.install(0, A, rows(12.0), 0, 0, ())
    assert value(kept) == 12.0, "it was there once, so it is forgotten"
    kept.close()


def test_a_refused_push_takes_its_rows_with_it() -> None:
    kept = cache()
    kept.install(0, torch.cat([A, B]), rows(1.0, 2.0), 0, 0, ())
    kept.note_own(0, A, rows(10.0), servers=(0,))
    kept.refused_own(0, A)
    assert kept.known(torch.cat([A, B])).tolist() == [False, True]
    kept.install(0, A, rows(1.0), 0, 0, ())
    assert value(kept) == 1.0
    kept.close()


def test_the_rows_used_least_recently_go_and_none_of_the_read_at_hand() -> None:
    kept, ids = cache(max_rows=2), torch.arange(5)
    for row in range(4):
        kept.use(ids[row : row + 1])
        kept.install(0, ids[row : row + 1], rows(float(row)), 0, 0, ())
    assert kept.use(ids[1:2]).tolist() == [2]
    assert kept.known(ids).tolist()[1]
    kept.install(0, ids, rows(*range(5)), 0, 0, ())
    assert kept.use(ids).tolist() == [], "all are in use, though they are too many"
    kept.close()


def test_t17_echoes_are_those_of_the_rows_that_were_handed_out() -> None:
    kept = cache(echo_width=1)
    kept.install(0, A, torch.tensor([[1.0, 5.0]], dtype=torch.float64), 0, 0, ())
    assert kept.read_echoes(A).isnan().all(), "it was never read"
    kept.note_read(A, kept.read(A)[0])
    kept.install(0, A, torch.tensor([[2.0, 6.0]], dtype=torch.float64), 1, 0, ())
    assert kept.read_echoes(torch.cat([A, B])).nan_to_num(-1.0).tolist() == [[5.0], [-1.0]]
    kept.drop(A)
    kept.install(0, B, torch.tensor([[3.0, 7.0]], dtype=torch.float64), 1, 0, ())
    assert kept.read_echoes(torch.cat([A, B])).isnan().all(), "what another row left behind does not show"
    kept.close()


def test_a_notice_that_comes_after_a_later_read_ends_no_subscription() -> None:
    subscription = Subscription(OPS)
    subscription.add(A, request=3)
    subscription.remove(A, request=3)
    assert len(subscription) == 1
    subscription.remove(A, request=4)
    assert len(subscription) == 0
    subscription.close()


def test_rows_that_changed_are_told_of_once_and_only_where_they_are_wanted() -> None:
    subscription = Subscription(OPS)
    subscription.add(torch.cat([A, B]), request=1)
    for _ in range(200):
        subscription.note(A)
    subscription.note(torch.tensor([99]))
    subscription.note(B)
    subscription.remove(B, request=2)
    assert subscription.pop_changed().tolist() == A.tolist()
    assert subscription.pop_changed().tolist() == []
    subscription.close()
