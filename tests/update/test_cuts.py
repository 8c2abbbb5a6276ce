"""Cuts: what a shard was between two updates, whatever updates do before its reader comes to a piece."""

import random
import threading

import pytest
import torch
from tests.update.tables import table

from paceline.core.partition import Range
from paceline.errors import UsageError
from paceline.update import cuts
from paceline.update.cuts import ShardCut
from paceline.update.named_rules import SGD, Adam, resolve, torch_optim
from paceline.update.rules import RuleSpec
from paceline.update.shard import Contribution, Shard
from paceline.update.table import Segment

PIECE = 64  # elements
NUM = 5 * PIECE + 7
SEGMENTS = (Segment("a", (3, PIECE)), Segment("b", (PIECE + 7,)), Segment("c", (PIECE,)))


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "CHUNK", PIECE)


def shard_of(rule: RuleSpec, num_threads: int = 1) -> Shard:
    spec = table(rule, SEGMENTS)
    shard = Shard(spec, Range(0, 0, NUM), rule=resolve(rule, frozenset()), num_threads=num_threads)
    shard.store(torch.arange(NUM, dtype=torch.float32))
    return shard


def update(shard: Shard, step: int) -> None:
    shard.apply([Contribution(torch.full((NUM,), float(step)))])


def parts_of(cut: ShardCut, pieces: dict[int, memoryview]) -> dict[str, torch.Tensor]:
    """The whole parts of a cut from its pieces."""
    found: dict[str, list[torch.Tensor]] = {name: [] for name, _ in cut.layout.parts}
    for index in range(cut.num_pieces):
        length = min(PIECE, NUM - index * PIECE)
        flat = torch.frombuffer(pieces[index], dtype=torch.float32)
        for number, name in enumerate(found):
            found[name].append(flat[number * length : (number + 1) * length])
    return {name: torch.cat(parts) for name, parts in found.items()}


@pytest.mark.parametrize("rule", [SGD(lr=0.1, momentum=0.9), Adam(lr=0.1), torch_optim("Adadelta", lr=0.5)])
@pytest.mark.parametrize("seed", range(3))
def test_a_cut_has_the_bytes_of_its_moment_whenever_each_piece_is_read(rule: RuleSpec, seed: int) -> None:
    choose, shard = random.Random(seed), shard_of(rule)
    for step in range(choose.randrange(3)):
        update(shard, step)
    expected = {key: value.clone() for key, value in shard.state().items()}
    cut, pieces = shard.cut(), dict[int, memoryview]()
    for step, index in enumerate(choose.sample(range(cut.num_pieces), cut.num_pieces)):
        if choose.random() < 0.4:
            update(shard, 10 + step)
        if choose.random() < 0.1:
            shard.store(torch.zeros(NUM))
        pieces[index] = cut.read(index)
    parts = parts_of(cut, pieces)

    assert torch.equal(parts.pop("values"), expected.pop("values"))
    starts, rest = {"0": 0, "1": 3 * PIECE, "2": 4 * PIECE + 7}, dict(cut.fixed)
    for key, value in expected.items():
        segment, _, name = key.partition(".")
        if name in parts:
            assert name in cut.layout.held[int(segment)]
            start = starts[segment]
            rest[key] = parts[name][start : start + value.numel()].view(value.shape)
    assert rest.keys() == expected.keys()
    assert all(torch.equal(rest[key], value) for key, value in expected.items())


def test_what_its_reader_has_had_is_not_kept_again() -> None:
    shard = shard_of(SGD(lr=0.1))
    cut = shard.cut()
    for index in range(cut.num_pieces):
        cut.read(index)
    update(shard, 1)
    assert cut.most_kept_bytes == 0
    assert cut.is_over
    with pytest.raises(UsageError, match="no piece 0 that was not read before"):
        cut.read(0)


def test_all_pieces_are_read_in_order_while_an_update_comes() -> None:
    shard = shard_of(SGD(lr=1.0), num_threads=1)
    cut, out = shard.cut(values_only=True), bytearray()
    updating = threading.Thread(target=update, args=(shard, 1))

    def write(piece: memoryview) -> None:
        index = len(out) // (4 * PIECE)
        if index == 1:
            updating.start()
        assert index > 1 or index in cut._left, "or an update would not wait for the copy"
        out.extend(piece)

    cut.read_all(write)
    updating.join()
    assert torch.equal(torch.frombuffer(out, dtype=torch.float32), torch.arange(NUM, dtype=torch.float32))
    assert torch.equal(shard.values, torch.arange(NUM, dtype=torch.float32) - 1)
    assert cut.is_over
    assert cut.kept_bytes == 0


def test_a_cut_is_given_up_where_memory_is_short_and_the_update_is_made() -> None:
    shard = shard_of(SGD(lr=1.0))
    cut = shard.cut(lambda num_bytes: num_bytes <= 2 * PIECE * 4)
    update(shard, 1)
    assert torch.equal(shard.values, torch.arange(NUM, dtype=torch.float32) - 1)
    assert cut.kept_bytes == 0
    with pytest.raises(UsageError, match="there was no memory for what they change"):
        cut.read(0)


def test_threads_of_an_update_keep_a_piece_once() -> None:
    shard = shard_of(Adam(lr=0.1), num_threads=4)
    update(shard, 1)
    expected = shard.values.clone()
    cut = shard.cut()
    update(shard, 2)
    pieces = {index: cut.read(index) for index in range(cut.num_pieces)}
    assert torch.equal(parts_of(cut, pieces)["values"], expected)
    shard.close()


def test_two_cuts_at_two_moments_are_apart() -> None:
    shard = shard_of(SGD(lr=1.0))
    first = shard.cut(values_only=True)
    update(shard, 1)
    second = shard.cut(values_only=True)
    update(shard, 1)
    for number, cut in enumerate((first, second)):
        pieces = {index: cut.read(index) for index in range(cut.num_pieces)}
        assert torch.equal(parts_of(cut, pieces)["values"], torch.arange(NUM, dtype=torch.float32) - number)
    first.close()
    with pytest.raises(UsageError, match="given up: it was closed"):
        first.read(0)
