"""Functions of yours over tables of both kinds: what they get and change, and which reads see it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.jobs import run_job
from tests.nodes.own_functions import HERE

import paceline
from paceline.api.session import Session
from paceline.errors import Refused, UsageError
from paceline.update.functions import merge, total

ADD = paceline.update.Add()
SERVERS = pytest.mark.parametrize("servers", [1, 3])


def alone(directory: Path, work: Callable[[Session], None], servers: int = 2) -> None:
    run_job(directory, work, servers=servers)


@SERVERS
def test_a_function_gets_the_range_of_each_server_and_where_it_starts(servers: int, tmp_path: Path) -> None:
    def work(ps: Session) -> None:
        first = torch.arange(60_000.0).view(2, 30_000)
        w = ps.table("w", shape=(2, 30_000), update=ADD, init=first)
        small = ps.table("small", shape=(3,), update=ADD, init=1.0)
        parts = w.call(f"{HERE}:increment", by=0.5)
        starts = [int(part["start"]) for part in parts]
        assert len(starts) == servers
        assert starts == sorted({0, *starts})
        assert [float(part["first"]) for part in parts] == [start + 0.5 for start in starts]
        assert torch.equal(w.pull(refresh=False), first + 0.5)
        assert len(small.call(f"{HERE}:increment")) == 1, "no server is asked about a range that has no element"

    alone(tmp_path, work, servers)


@SERVERS
def test_whatever_a_function_over_a_range_does_wrong_the_values_stay_and_others_go_on(
    servers: int, tmp_path: Path
) -> None:
    def work(ps: Session) -> None:
        w = ps.table("w", shape=(6,), update=ADD, init=1.0)
        rows = ps.table("rows", rows=2, update=ADD)
        for name, reason in (
            ("divides_by_zero", r"ZeroDivisionError: .*\(divides_by_zero, line \d+ of .*own_functions.py\)"),
            ("ends_the_process", "SystemExit: 3"),
            ("returns_a_list", "it returned list, expected a dict of tensors by name, or None"),
            ("returns_numbers", "it returned dict, expected a dict of tensors"),
            ("returns_too_much", "it returned 134217728 bytes, expected at most 67108864"),
            ("brings_nan", r"1 of its \d new values are NaN or infinite"),
            ("grows", r"its values are \(\d,\) torch.float32 now, expected \(\d,\)"),
            ("NO_FUNCTION", "Module tests.nodes.own_functions has no function NO_FUNCTION"),
            ("nothing", "has no function nothing"),
        ):
            with pytest.raises(Refused, match=rf"(?s)server \d refused: function .*:{name} over table 'w' .*{reason}"):
                w.call(f"{HERE}:{name}")
        assert w.pull().tolist() == [1.0] * 6
        w.push(torch.ones(6))
        rows.push([1, 2], torch.ones(2, 2))
        ps.clock()
        assert w.pull().tolist() == [2.0] * 6
        assert rows.pull([2]).tolist() == [[1.0, 1.0]]

    alone(tmp_path, work, servers)


def test_a_name_that_cannot_be_had_is_an_error_with_the_names_that_can(tmp_path: Path) -> None:
    def work(ps: Session) -> None:
        w = ps.table("w", shape=(6,), update=ADD)
        for name, reason in (
            ("sclae", "'sclae' names no function. Expected one of sample, scale, soft_threshold, summary, top, or"),
            ("a b:c", "'a b:c' names no function"),
            (
                "no_such_module:f",
                "cannot be imported: No module named 'no_such_module'. Is it installed on the servers",
            ),
            ("tests.nodes.broken_module:f", "RuntimeError: this module is broken"),
        ):
            with pytest.raises(Refused, match=reason):
                w.call(name)
        with pytest.raises(Refused, match="missing 1 required keyword-only argument: 'factor'"):
            w.call("scale")
        with pytest.raises(Refused, match="unexpected keyword argument 'power'"):
            w.call("scale", factor=1.0, power=2)

    alone(tmp_path, work)


@pytest.mark.parametrize("number", ["0.5", [1.0], 1 << 63, torch.tensor(1.0), (1, "2")])
def test_only_numbers_travel(number: object, tmp_path: Path) -> None:
    def work(ps: Session) -> None:
        w = ps.table("w", shape=(6,), update=ADD, init=1.0)
        with pytest.raises(UsageError, match=r"function scale: factor is .*, expected a number"):
            w.call("scale", factor=number)  # pyright: ignore[reportArgumentType]
        assert w.pull().tolist() == [1.0] * 6

    alone(tmp_path, work)


@SERVERS
def test_whatever_a_function_over_rows_does_wrong_is_told_and_others_go_on(servers: int, tmp_path: Path) -> None:
    ids = torch.arange(-4, 20)

    def work(ps: Session) -> None:
        rows = ps.table("rows", rows=2, update=ADD)
        rows.push(ids, torch.ones(24, 2))
        ps.clock()
        for name, reason in (
            ("rows_bring_infinity", r"\d+ of \d+ new values of a piece are NaN or infinite"),
            ("rows_of_other_ids", "only the piece at hand can be put back"),
            ("rows_put_later", "only the piece at hand can be put back"),
            ("rows_of_another_width", r"values came back as \(\d+, 5\) torch.float32, expected \(\d+, 2\)"),
        ):
            with pytest.raises(Refused, match=rf"{name} over table 'rows' on server \d failed: {reason}"):
                rows.call(f"{HERE}:{name}")
        assert (rows.pull(ids) == 1.0).all()
        with pytest.raises(Refused, match=r"ZeroDivisionError.*; \d+ rows had been changed before, and stay so"):
            rows.call(f"{HERE}:rows_divide_by_zero")
        assert (rows.pull(ids) == 2.0).all(), "on every server, and the message says so"
        rows.push([3], [[1.0, 0.0]])
        ps.clock()
        assert rows.pull([3]).tolist() == [[3.0, 2.0]]

    alone(tmp_path, work, servers)


@SERVERS
def test_functions_over_rows_find_and_change_what_one_over_the_whole_table_would(servers: int, tmp_path: Path) -> None:
    ids = torch.randperm(500, generator=torch.Generator().manual_seed(1)) * 7919 - 100_000
    values = torch.randn(500, 4, generator=torch.Generator().manual_seed(2))

    def work(ps: Session) -> None:
        rows = ps.table("rows", rows=4, update=ADD)
        rows.push(ids, values)
        ps.clock()
        summary = total(rows.call("summary"))
        assert (int(summary["rows"]), int(summary["count"])) == (500, 2000)
        assert torch.allclose(summary["squares"], values.double().square().sum())
        best = values.norm(dim=1).argsort(descending=True)[:7]
        top = merge(rows.call("top", k=7), 7)
        assert torch.equal(top["ids"], ids[best])
        assert torch.equal(top["values"], values[best])
        rows.call("soft_threshold", threshold=0.3)
        rows.call("scale", factor=2.0)
        assert torch.allclose(rows.pull(ids), 2.0 * torch.nn.functional.softshrink(values, 0.3))
        sampled = merge(rows.call("sample", k=50, seed=3), 50)["ids"]
        assert len(sampled.unique()) == 50
        assert torch.isin(sampled, ids).all()

    alone(tmp_path, work, servers)


def test_a_sample_is_the_same_however_many_servers_there_are(tmp_path: Path) -> None:
    def work(ps: Session) -> list[int]:
        rows = ps.table("rows", rows=1, update=ADD)
        rows.push(torch.arange(300), torch.ones(300, 1))
        w = ps.table("w", shape=(300,), update=ADD)
        ps.clock()
        drawn = merge(rows.call("sample", k=9, seed=4), 9)["ids"]
        assert torch.equal(merge(w.call("sample", k=9, seed=4), 9)["ids"], drawn)
        assert not torch.equal(merge(rows.call("sample", k=9, seed=5), 9)["ids"], drawn)
        assert len(merge(rows.call("sample", k=0), 0)["ids"]) == 0
        return drawn.tolist()

    (one,), (three,) = (run_job(tmp_path, work, servers=servers) for servers in (1, 3))
    assert one == three


def test_state_of_the_rule_can_be_looked_at_and_changed(tmp_path: Path) -> None:
    def work(ps: Session) -> None:
        rows = ps.table("rows", rows=2, update=paceline.update.RowwiseAdagrad(lr=1.0))
        for _ in range(3):
            rows.push([5], [[1.0, 1.0]])
            ps.clock()
        before = rows.pull([5])
        rows.call(f"{HERE}:clear_state")
        assert torch.equal(rows.pull([5]), before)
        rows.push([5], [[1.0, 1.0]])
        ps.clock()
        assert torch.allclose(rows.pull([5]), before - 1.0)  # a first step is of length 1

    alone(tmp_path, work)


def test_values_that_follow_from_state_are_not_scaled_in_vain(tmp_path: Path) -> None:
    def work(ps: Session) -> None:
        rows = ps.table("rows", rows=2, update=paceline.update.FTRL())
        with pytest.raises(Refused, match="FTRL computes its values from its state"):
            rows.call("scale", factor=0.5)

    alone(tmp_path, work)


@pytest.mark.parametrize("consistency", ["bsp", "ssp:1", "essp:0", "essp:1"])
@pytest.mark.parametrize("kind", ["rows", "range"])
def test_what_a_call_changes_counts_as_an_update_of_its_clock(kind: str, consistency: str, tmp_path: Path) -> None:
    bound = int(consistency.partition(":")[2] or 0)

    def work(ps: Session) -> None:
        kept = ps.table("w", shape=(6,), update=ADD, consistency=consistency)
        if kind == "rows":
            kept = ps.table("rows", rows=1, update=ADD, consistency=consistency, cache=True)

        def read(*, refresh: bool = False) -> list[float]:
            if isinstance(kept, paceline.worker.table.Table):
                return kept.pull(refresh=refresh).tolist()
            return kept.pull(torch.arange(6), refresh=refresh).view(-1).tolist()

        if kind == "rows" and ps.rank == 0:
            kept.push(torch.arange(6), torch.zeros(6, 1))  # pyright: ignore[reportCallIssue]
        ps.clock()
        ps.barrier()
        read(refresh=True)
        ps.barrier()
        if ps.rank == 0:
            kept.call(f"{HERE}:increment" + "_rows" * (kind == "rows"), by=2.0)
            assert read() == [2.0] * 6, "the caller sees it at once"
        ps.barrier()
        for _ in range(1 + bound):
            ps.clock()
        assert read() == [2.0] * 6, "others when they have to wait for that clock"
        ps.barrier()
        assert read(refresh=True) == [2.0] * 6

    run_job(tmp_path, work, workers=2, servers=2)


@SERVERS
def test_statistics_add_up_and_items_are_all_rows(
    servers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.update.rows.walk.PIECE_BYTES", 1)  # then a piece has 64 rows
    ids = torch.arange(1000)

    def work(ps: Session) -> None:
        rows = ps.table("rows", rows=2, update=ADD, consistency="ssp:3")
        mine = ids[ps.rank :: 2]
        rows.push(mine, mine.float().view(-1, 1).repeat(1, 2))
        ps.clock()
        assert rows.statistics().num_rows == 1000
        each = rows.server_statistics()
        assert len(each) == servers
        assert sum(one.num_admitted for one in each) == 1000
        pieces = list(rows.items())
        assert max(len(found) for found, _ in pieces) == 64
        found, values = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        assert torch.equal(found.sort().values, ids)
        assert torch.equal(values, found.float().view(-1, 1).repeat(1, 2))

    run_job(tmp_path, work, workers=2, servers=servers)


def test_a_table_that_spills_is_walked_within_its_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.update.rows.walk.PIECE_BYTES", 1 << 20)
    ids = torch.arange(6_000)

    def work(ps: Session) -> None:
        life = paceline.Lifecycle(memory_bytes=20 << 20, spill=str(tmp_path))
        rows = ps.table("rows", rows=1024, update=ADD, life=life)
        rows.push(ids, torch.ones(len(ids), 1024))
        ps.clock()
        assert rows.statistics().spilled_bytes > 20 << 20
        rows.call("scale", factor=3.0)
        assert total(rows.call("summary"))["sum"] == 3.0 * 1024 * len(ids)
        assert rows.statistics().memory_bytes <= 20 << 20

    alone(tmp_path, work, servers=1)
