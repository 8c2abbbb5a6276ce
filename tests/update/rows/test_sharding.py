"""Which server a row lives on: each on one, as many as its share, and values are the same wherever they lie."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.jobs import run_job

from paceline.api.session import Session
from paceline.update.named_rules import Adam
from paceline.update.placement import NUM_PIECES, RowSharding
from paceline.update.rows.ops import row_ops

IDS = torch.arange(5_000) * 7 - 20_000


@settings(max_examples=12, deadline=None)
@given(st.lists(st.floats(0, 9), min_size=1, max_size=6).filter(lambda shares: sum(shares) > 0.1))
@pytest.mark.parametrize("name", ["native", "torch"])
def test_rows_are_shared_out_as_shares_say(name: str, shares: list[float]) -> None:
    parts = RowSharding(row_ops(name), len(shares), tuple(shares)).split(IDS)
    counts = [len(places) for places in parts]
    assert sorted(torch.cat(parts).tolist()) == list(range(len(IDS)))
    assert len(counts) == len(shares)
    for count, share in zip(counts, shares, strict=True):
        assert count / len(IDS) == pytest.approx(share / sum(shares), abs=0.03 + 1 / NUM_PIECES)
        assert share > 0 or count == 0


def test_one_row_lives_on_one_server_whatever_it_is_asked_with() -> None:
    owners = RowSharding(row_ops(), 3, (3, 2, 1))
    for server, places in enumerate(owners.split(IDS)):
        alone = owners.split(IDS[places])
        assert [len(part) for part in alone] == [len(places) if other == server else 0 for other in range(3)]
        assert alone[server].tolist() == list(range(len(places)))  # all of them, in the order given


def test_equal_shares_are_equal_parts() -> None:
    ops = row_ops()
    order, counts = ops.split(IDS, 3)
    expected = [places.tolist() for places in order.split(counts)]
    assert [places.tolist() for places in RowSharding(ops, 3, (0.5, 0.5, 0.5)).split(IDS)] == expected


def test_values_are_those_of_equal_parts_bit_for_bit(tmp_path: Path) -> None:
    def work(session: Session) -> tuple[str, list[int]]:
        table = session.table("r", rows=3, update=Adam(lr=0.1), init=0.5)
        chance = torch.Generator().manual_seed(session.rank)
        for _ in range(3):
            ids = torch.randint(0, 400, (200,), generator=chance)
            table.push(ids, torch.randn(200, 3, generator=chance))
            session.clock()
            table.pull(ids)
        rows = table.pull(torch.arange(400)).numpy().tobytes().hex()
        session.barrier()
        held = [each.num_rows for each in table.server_statistics()]
        session.barrier()
        return rows, held

    found = []
    for number, shares in enumerate([(), (5, 0, 1)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        [(rows, held), (others, _)] = run_job(folder, work, workers=2, servers=3, shares=shares)
        assert rows == others
        found.append((rows, held))
    assert found[0][0] == found[1][0]
    assert found[1][1][1] == 0
    assert found[1][1][0] > 3 * found[1][1][2]
