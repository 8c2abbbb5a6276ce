"""A shard and a store of rows that are killed in the middle of an update go on in a successor, with the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from msgspec.structs import replace

from paceline.core.partition import Range
from paceline.errors import ProtocolBug, UsageError
from paceline.transport.lasting_memory import LastingMemory, MemoryHolder
from paceline.update import SGD, Adagrad, Adam, Add, chunked, lasting, native_steps, torch_optim
from paceline.update import rule as rule_at
from paceline.update.lasting import ChunkMemory, LastingRecord, RowsMemory, ShardMemory
from paceline.update.named_rules import resolve
from paceline.update.native_steps import steps_library
from paceline.update.rows import memory as row_memory
from paceline.update.rows.contribution import RowContribution
from paceline.update.rows.initializers import First
from paceline.update.rows.ops import row_ops
from paceline.update.rows.rules import row_rule
from paceline.update.rows.store import RowStore
from paceline.update.rules import RuleSpec
from paceline.update.shard import Contribution, Shard
from paceline.update.table import NonFinite, Segment

from .killed import Killed, Story, killing
from .own_rules import Decaying
from .rows.stores import rows_of
from .tables import table

NUM_UPDATES = 3
RULES = {
    "add": Add(),
    "sgd": SGD(lr=0.1),
    "momentum": SGD(lr=0.1, momentum=0.9, dampening=0.5),
    "adam": Adam(lr=0.1),
    "fused adam": torch_optim("Adam", lr=0.1, fused=True),
    "adagrad": Adagrad(lr=0.1, initial_accumulator_value=0.5),
}
OWN = "tests.update.own_rules:Decaying"
WHOLE = {  # rules that update whole tensors, and keep their state themselves
    "nadam": torch_optim("NAdam", lr=0.1),
    "rmsprop": torch_optim("RMSprop", lr=0.1, momentum=0.5, centered=True),
    "foreach": torch_optim("Adam", lr=0.1, foreach=True),
    "own": rule_at(OWN, lr=0.1),
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make updates of a few hundred elements, and of a few rows, go by several chunks."""
    monkeypatch.setattr(chunked, "CHUNK", 128)
    monkeypatch.setattr(lasting, "CHUNK", 128)
    monkeypatch.setattr(lasting, "_LEAST_AHEAD_BYTES", 0)
    monkeypatch.setattr(lasting, "UNDO_BLOCK", 16)
    monkeypatch.setattr(row_memory, "PIECE_ROWS", 4)
    monkeypatch.setattr(lasting, "PIECE_ROWS", 4)


class AtOnce(Executor):
    """Runs what is submitted before it returns."""

    def submit(self, fn: Callable[..., object], /, *args: object, **kwargs: object) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


def story_of_shard(rule: RuleSpec, *, ahead: bool = False, nonfinite: NonFinite = "zero") -> Story[Shard]:
    steps_library()  # which is tried out at its first use
    spec = replace(table(rule, (Segment("a", (150,)), Segment("b", (70,)))), nonfinite=nonfinite)
    span, built = Range(0, 0, 220), resolve(spec.rule, frozenset([OWN]))
    tries = ahead and nonfinite == "reject"  # else the C library saves what it changes as it goes

    def start(memory: lasting.LastingMemory) -> Shard:
        states = len(getattr(built, "known", ()))
        saver = AtOnce() if ahead else None
        kept = ShardMemory(memory, spec, span, num_states=states, num_threads=1, saver=saver)
        return Shard(spec, span, rule=resolve(spec.rule, frozenset([OWN])), lasting=kept)

    def work(shard: Shard) -> None:
        numbers = torch.Generator().manual_seed(7)
        first, *gradients = torch.randn(1 + 2 * NUM_UPDATES, 220, generator=numbers).to(shard.values.dtype)
        if nonfinite == "zero":
            gradients[0][5] = torch.inf
        if not shard.initialised:
            shard.store(first)
        for update in range(shard.num_applied, NUM_UPDATES):
            hyper = (
                tuple({**group, "lr": 0.1 / (1 + update)} for group in spec.rule.groups) if rule.name != "add" else ()
            )
            absent = frozenset([1]) if update == 1 else frozenset[int]()
            shard.apply(
                [
                    Contribution(gradients[2 * update], hyper=hyper, absent=absent, unchecked=tries),
                    Contribution(gradients[2 * update + 1], absent=absent, unchecked=tries),
                ]
            )

    def bytes_of(shard: Shard) -> dict[str, bytes]:
        num_zeroed = int(nonfinite == "zero")
        assert (shard.num_applied, shard.version, shard.num_zeroed) == (NUM_UPDATES, NUM_UPDATES, num_zeroed)
        state = {
            name: tensor.clone().view(-1).view(torch.uint8).numpy().tobytes() for name, tensor in shard.state().items()
        }
        return {**state, "hyper": repr(shard.hyper).encode()}

    return Story(start, work, bytes_of)


def story_of_rows(rule: RuleSpec, ops: str = "torch") -> Story[RowStore]:
    spec = replace(rows_of(rule, width=3), first=First("uniform", 0.5, 3))
    built = row_rule(spec.rule, None)

    def start(memory: lasting.LastingMemory) -> RowStore:
        return RowStore(spec, built, row_ops(ops), RowsMemory(memory, spec, built))

    def work(store: RowStore) -> None:
        numbers = torch.Generator().manual_seed(7)
        for update in range(NUM_UPDATES):
            ids = torch.randint(0, 12, (2, 8), generator=numbers)
            gradients = torch.randn(2, 8, 3, generator=numbers)
            if update >= store.num_applied:
                store.apply([RowContribution(*each) for each in zip(ids, gradients, strict=True)], update)

    def bytes_of(store: RowStore) -> dict[str, bytes]:
        piece = store.rows(0, 100)
        assert (store.num_applied, store.version) == (NUM_UPDATES, NUM_UPDATES)
        assert store.statistics().num_admitted == len(piece.ids) == len(store)
        return {
            "ids": piece.ids.numpy().tobytes(),
            **{name: column.numpy().tobytes() for name, column in piece.columns.items()},
        }

    return Story(start, work, bytes_of)


def require_same_bytes(story: Story[Shard] | Story[RowStore]) -> int:
    """Kill it at each point; return how many there are."""
    expected, target, reached = story.undisturbed(), 0, True
    while reached:
        target += 1
        found, reached = story.killed_at(target)
        assert found == expected, f"after a kill at point {target}"
    return target - 1


@pytest.mark.parametrize("rule", RULES)
def test_a_dense_update_that_is_killed_anywhere_ends_with_the_same_bytes(rule: str) -> None:
    assert require_same_bytes(story_of_shard(RULES[rule])) > 30


@pytest.mark.parametrize("rule", WHOLE)
def test_a_rule_that_keeps_its_own_state_may_be_killed_anywhere_as_well(rule: str) -> None:
    assert require_same_bytes(story_of_shard(WHOLE[rule])) > 15


def test_a_shard_whose_state_cannot_be_copied_says_why_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Decaying, "state", lambda self: {"0.mean": "no tensor"})
    story = story_of_shard(WHOLE["own"])
    with MemoryHolder() as holder:
        holder.start()
        shard = story.start(LastingMemory.connect(holder.theirs))
        shard.store(torch.ones(220))
        assert "cannot be copied" in shard.cold
        shard.apply([Contribution(torch.ones(220))])
    assert (shard.version, shard.num_applied) == (1, 0)


@pytest.mark.parametrize(("rule", "nonfinite"), [("adam", "zero"), ("momentum", "reject")])
def test_what_was_saved_ahead_is_as_good(rule: str, nonfinite: NonFinite) -> None:
    assert require_same_bytes(story_of_shard(RULES[rule], ahead=True, nonfinite=nonfinite)) > 30


@pytest.mark.parametrize("rule", ["sgd", "momentum", "fused adam"])
def test_steps_of_the_c_library_that_are_killed_end_with_the_same_bytes(rule: str) -> None:
    assert require_same_bytes(story_of_shard(RULES[rule], nonfinite="reject")) > 30


def test_no_chunk_is_saved_whole_where_the_c_library_saves_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[ChunkMemory] = []
    monkeypatch.setattr(ChunkMemory, "copy_to", lambda chunk, _: saved.append(chunk))
    story_of_shard(RULES["momentum"], ahead=True, nonfinite="ignore").undisturbed()
    assert steps_library() is None or saved == []


def test_a_chunk_of_which_a_part_is_changed_for_good_is_not_begun_anew() -> None:
    story = story_of_shard(RULES["momentum"], nonfinite="reject")
    if steps_library() is None:
        pytest.skip("this machine has no compiler, or a processor without these instructions")
    with MemoryHolder() as holder:
        holder.start()
        shard = story.start(LastingMemory.connect(holder.theirs))
        shard.store(torch.ones(220))
        with killing(5), pytest.raises(Killed):  # in the middle of the first step
            shard.apply([Contribution(torch.ones(220))])
        with patch.object(native_steps, "steps_library", lambda: None):
            successor = story.start(LastingMemory.connect(holder.theirs))
        with pytest.raises(ProtocolBug, match="another library"):
            successor.apply([Contribution(torch.ones(220))])


@pytest.mark.parametrize("rule", ["sgd", "adagrad"])
def test_an_update_of_rows_that_is_killed_anywhere_ends_with_the_same_bytes(rule: str) -> None:
    assert require_same_bytes(story_of_rows(RULES[rule])) > 30


@pytest.mark.parametrize(
    ("story", "firsts"),
    [
        (story_of_shard(RULES["momentum"], ahead=True), (14, 19, 21)),
        (story_of_shard(RULES["momentum"], nonfinite="reject"), (6, 8, 14)),
        (story_of_rows(RULES["adagrad"]), (14, 19, 21)),
        (story_of_shard(WHOLE["own"]), (5, 7, 11)),
    ],
    ids=["shard", "blocks", "rows", "whole"],
)
def test_a_second_kill_while_a_successor_goes_on_is_as_harmless_as_the_first(
    story: Story[Any], firsts: tuple[int, ...]
) -> None:
    expected = story.undisturbed()
    for first in firsts:
        for second in range(1, 12):
            assert story.killed_at(first, second, second)[0] == expected, (first, second)


def test_a_copy_made_ahead_does_not_count_after_the_shard_has_changed() -> None:
    story = story_of_shard(RULES["momentum"], ahead=True)
    with MemoryHolder() as holder:
        holder.start()
        shard = story.start(LastingMemory.connect(holder.theirs))
        story.work(shard)
        shard.store(torch.zeros(220))
        before = {name: tensor.clone() for name, tensor in shard.state().items()}
        with killing(3), pytest.raises(Killed):  # in the middle of the first chunk
            shard.apply([Contribution(torch.ones(220))])
        successor = story.start(LastingMemory.connect(holder.theirs))
        successor.apply([Contribution(torch.ones(220))])
    plain = Shard(shard.spec, shard.span, rule=resolve(shard.spec.rule, frozenset()))
    plain.load_state(before)
    plain.hyper = shard.hyper
    plain.apply([Contribution(torch.ones(220))])
    assert torch.equal(successor.values, plain.values)


def test_settings_that_do_not_fit_are_refused_with_their_size() -> None:
    record = LastingRecord(memoryview(bytearray(LastingRecord.size_bytes(1, 8))), ("number",))
    record.commit(b"12345678", number=1)
    with pytest.raises(UsageError, match="9 bytes, expected 8"):
        record.commit(b"123456789")
    assert (record.numbers, record.settings) == ({"number": 1}, b"12345678")


def test_copies_that_come_too_late_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: list[Callable[[], object]] = []
    monkeypatch.setattr(AtOnce, "submit", lambda _, fn, *args: waiting.append(partial(fn, *args)))
    with MemoryHolder() as holder:
        holder.start()
        story = story_of_shard(RULES["momentum"], ahead=True)
        shard = story.start(LastingMemory.connect(holder.theirs))
        story.work(shard)
        shard.apply([Contribution(torch.ones(220))])
        shard.apply([Contribution(torch.ones(220))])
        progress = shard._lasting.progress if shard._lasting is not None else None
        assert progress is not None
        for late in waiting[:-1]:  # the shard has changed since each of these was asked for
            late()
        assert progress._ahead == {}
        waiting[-1]()
        assert len(progress._ahead) == 2
