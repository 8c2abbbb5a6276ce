"""Adaptive Revision against a plain loop that keeps every version, for readers that push late and out of turn."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.update.rows.row_rules import Rows, random_rows, rows_of

from paceline.update.named_rules import Adagrad, AdaptiveRevision

ROW = torch.tensor([0])
START, RATE = 0.5, 0.1


class History:
    """One weight with all the sums of gradients it ever had: what a server with snapshots would do."""

    def __init__(self, weight: float) -> None:
        self.weight, self.z, self.peak = weight, START, START
        self.sums = [0.0]

    def push(self, gradient: float, version: int) -> None:
        back = self.sums[-1] - self.sums[version]
        rate_before = RATE / math.sqrt(self.peak)
        self.z += gradient * (gradient + 2 * back)
        self.peak = max(self.z, self.peak)
        rate = RATE / math.sqrt(self.peak)
        self.weight += -rate * gradient + (rate_before - rate) * back
        self.sums.append(self.sums[-1] + gradient)


def revised(num_rows: int = 1, width: int = 1) -> Rows:
    return rows_of(AdaptiveRevision(RATE, initial_accumulator_value=START), random_rows(4, num_rows, width))


@settings(max_examples=80, deadline=None)
@given(
    events=st.lists(
        st.tuples(st.integers(0, 3), st.booleans(), st.floats(-2, 2, allow_subnormal=False)), min_size=8, max_size=40
    )
)
def test_equals_a_server_that_keeps_every_version(events: list[tuple[int, bool, float]]) -> None:
    """Four readers, which read or push in any order; what each read last is what its push is told with."""
    rows = revised()
    plain = History(rows.values.item())
    seen: dict[int, tuple[int, torch.Tensor]] = {}
    for reader, reads, gradient in events:
        if reads:
            seen[reader] = len(plain.sums) - 1, rows.state["gradient_sum"].clone()
            continue
        never = len(plain.sums) - 1, torch.full((1, 1), math.nan, dtype=torch.float64)
        version, echo = seen.get(reader, never)
        rows.update(ROW, torch.tensor([[gradient]], dtype=torch.float64), echo)
        plain.push(gradient, version)
        torch.testing.assert_close(rows.values.item(), plain.weight, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(rows.state["z"].item(), plain.z, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(rows.state["z_max"].item(), plain.peak, rtol=1e-11, atol=1e-11)


def test_is_adagrad_while_nothing_is_stale() -> None:
    ours = revised(5, 3)
    theirs = rows_of(Adagrad(RATE, initial_accumulator_value=START, eps=0.0), random_rows(4, 5, 3))
    for step in range(20):
        gradient = random_rows(step, 5, 3)
        ours.update(torch.arange(5), gradient, ours.state["gradient_sum"].clone())
        theirs.update(torch.arange(5), gradient)
    torch.testing.assert_close(ours.values, theirs.values, rtol=1e-13, atol=1e-13)


def test_differs_from_adagrad_when_reads_are_stale() -> None:
    """T17: the sum as of the read matters; that of now would quietly be Adagrad."""
    stale, current = revised(5, 3), revised(5, 3)
    for step in range(6):
        if step % 3 == 0:
            read = stale.state["gradient_sum"].clone()
        stale.update(torch.arange(5), random_rows(step // 3, 5, 3), read)
        current.update(torch.arange(5), random_rows(step // 3, 5, 3), current.state["gradient_sum"].clone())
    assert (stale.values != current.values).all()
    assert (stale.state["z_max"] > current.state["z_max"]).all()  # gradients that agree while stale: smaller steps


def test_a_row_that_was_never_read_counts_as_read_now() -> None:
    current, unread, without = (revised(4, 3) for _ in range(3))
    for step in range(5):
        gradient = random_rows(step, 4, 3)
        current.update(torch.arange(4), gradient, current.state["gradient_sum"].clone())
        unread.update(torch.arange(4), gradient, torch.full_like(gradient, math.nan))
        without.update(torch.arange(4), gradient, None)
    for rows in (unread, without):
        assert all(torch.equal(column, rows.all()[name]) for name, column in current.all().items())


def test_rows_of_one_push_may_have_been_read_at_different_times() -> None:
    together, apart = revised(3, 2), revised(3, 2)
    for step in range(4):
        gradient = random_rows(step, 3, 2)
        echo = torch.stack([torch.full((2,), math.nan).double(), together.state["gradient_sum"][1], torch.zeros(2)])
        together.update(torch.arange(3), gradient, echo)
        apart.update(torch.tensor([0]), gradient[:1], None)
        apart.update(torch.tensor([1, 2]), gradient[1:], echo[1:])
    assert torch.equal(together.values, apart.values)
