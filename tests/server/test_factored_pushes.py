"""A push with factors becomes one with its gradient, or breaks the protocol: sizes are checked before torch sees it."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import pytest
import torch
from tests.nodes.cluster import hosted_tables

from paceline.core.messages import Push, PushId
from paceline.errors import PeerError
from paceline.server.dense_table import ServedDenseTable
from paceline.server.tables import ServedTables
from paceline.transport.base import EMPTY, Frame
from paceline.update.factors import Factors, matrix_parts, pack
from paceline.update.named_rules import Add
from paceline.update.placement import as_tensor, spans
from paceline.update.table import Segment, TableSpec
from paceline.wire.messages import FactoredMatrix, FactoredPush, PushFrame

ROWS, COLUMNS, NUM = 8, 6, 2
SPEC = TableSpec(
    "t", (Segment("weight", (ROWS, COLUMNS)), Segment("bias", (ROWS,))), "float32", Add(), "bsp", "sum", "reject"
)
FRAME = PushFrame(Push(PushId(1, 1, 0, 0), "t", 0, 0), 1.0, (), ())
FACTORS = Factors(torch.arange(float(NUM * ROWS)).view(NUM, ROWS), torch.ones(NUM, COLUMNS))
GRADIENT = torch.cat([FACTORS.product().view(-1), torch.full((ROWS,), 7.0)])


@pytest.fixture
def tables() -> Iterator[ServedTables]:
    made = hosted_tables(checks_memory=True)
    made.declare(SPEC)
    yield made
    made.close()


def body(tables: ServedTables) -> memoryview:
    parts = matrix_parts(SPEC, spans(SPEC, tables.host.settings)[0])
    return pack(GRADIENT, parts, {0: FACTORS}).numpy().data.cast("B")


def expand(tables: ServedTables, content: memoryview, *matrices: tuple[int, int], checksum: int | None = None) -> Frame:
    push = FactoredPush(FRAME, tuple(FactoredMatrix(*each) for each in matrices), checksum)
    return tables.expand(push, Frame(b"", content))


def num_lent(tables: ServedTables) -> int:
    table = tables["t"]
    assert isinstance(table, ServedDenseTable)
    return table._assemblies.pool.num_lent


def test_a_push_with_factors_is_applied_as_its_gradient(tables: ServedTables) -> None:
    table, content = tables["t"], body(tables)
    table.initialise(memoryview(bytearray(4 * SPEC.numel)))
    whole = expand(tables, content, (0, NUM), checksum=zlib.crc32(content))
    assert torch.equal(as_tensor(whole.body, torch.float32), GRADIENT)
    assert not table.accept(FRAME, whole.body, whole.buffer).problem
    assert num_lent(tables) == 1
    assert expand(tables, content, (0, NUM)).body == EMPTY  # it waits already: the core answers the copy
    assert not table.apply([FRAME.push.id], 0)
    assert num_lent(tables) == 0
    assert isinstance(table, ServedDenseTable)
    assert torch.equal(as_tensor(table.memory, torch.float32), GRADIENT)


def test_a_push_of_no_table_is_left_to_the_core(tables: ServedTables) -> None:
    push = FactoredPush(PushFrame(Push(PushId(1, 1, 0, 0), "x", 0, 0), 1.0, (), ()), (FactoredMatrix(0, NUM),))
    assert tables.expand(push, Frame(b"", body(tables))).body == EMPTY


MOST = 2**62
WRONG: dict[str, tuple[tuple[tuple[int, int], ...], int]] = {
    "none": ((), 0),
    "one twice": (((0, NUM), (0, NUM)), 0),
    "not in order": (((1, NUM), (0, NUM)), 0),
    "a vector": (((1, NUM),), 0),
    "a parameter that there is not": (((2, NUM),), 0),
    "a parameter before the first": (((-1, NUM),), 0),
    "fewer samples than none": (((0, -1),), 0),
    "far fewer samples than none": (((0, -MOST),), 0),
    "as many samples as make no sense": (((0, 4),), 0),  # 4 * (8 + 6) = 56 of 48 elements
    "very many samples": (((0, MOST),), 0),
    "one sample less": (((0, NUM - 1),), 0),
    "one sample more": (((0, NUM + 1),), 0),
    "fewer bytes": (((0, NUM),), -4),
    "half a number": (((0, NUM),), -2),
    "no bytes": (((0, NUM),), -MOST),
    "more bytes": (((0, NUM),), 4),
}


@pytest.mark.parametrize(("matrices", "more"), WRONG.values(), ids=WRONG)
def test_sizes_that_are_not_those_of_the_table_break_the_protocol(
    tables: ServedTables, matrices: tuple[tuple[int, int], ...], more: int
) -> None:
    content = bytes(body(tables)) + bytes(max(0, more))
    content = content[: len(content) + min(0, max(more, -len(content)))]
    with pytest.raises(PeerError, match="a push of table 't' with factors "):
        expand(tables, memoryview(content), *matrices)
    assert num_lent(tables) == 0
    assert not tables["t"].has(FRAME.push.id)


def test_no_samples_are_a_gradient_of_zeros(tables: ServedTables) -> None:
    whole = expand(tables, memoryview(torch.full((ROWS,), 7.0).numpy()).cast("B"), (0, 0))
    assert as_tensor(whole.body, torch.float32).tolist() == [0.0] * (ROWS * COLUMNS) + [7.0] * ROWS


def test_a_product_without_room_is_not_formed(tables: ServedTables, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.server.memory_check._ALWAYS_FINE_BYTES", 0)
    monkeypatch.setattr("paceline.server.memory_check._room_bytes", lambda: 4 * SPEC.numel - 1)
    with pytest.raises(PeerError, match=r"with factors has no room: .* needs 224 bytes and 223 are free"):
        expand(tables, body(tables), (0, NUM))
    assert num_lent(tables) == 0


def test_bytes_that_changed_on_their_way_break_the_protocol(tables: ServedTables) -> None:
    with pytest.raises(PeerError, match="are not those that were sent"):
        expand(tables, body(tables), (0, NUM), checksum=7)
