"""Row tables to a file and back: the same rows and state on any number of servers, or nothing changes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.jobs import run_job

import paceline
from paceline.api.session import Session
from paceline.errors import Refused, UsageError
from paceline.update.rows.export import save_rows
from paceline.update.rows.rules import row_rule
from paceline.worker.rows.table import RowTable

IDS = torch.randperm(600, generator=torch.Generator().manual_seed(1)) * 7919 - 10_000_000
FIRST = paceline.first.normal(0.1, seed=3)


def train(ps: Session, table: RowTable, num_clocks: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_clocks):
        table.push(IDS[ps.rank :: ps.size], torch.randn(len(IDS[ps.rank :: ps.size]), 3, generator=generator))
        ps.clock()
    ps.barrier()


def open_users(ps: Session, consistency: str = "bsp", **settings: object) -> RowTable:
    update = paceline.update.FTRL(l1=0.01)
    return ps.table("users", rows=3, update=update, consistency=consistency, init=FIRST, **settings)  # pyright: ignore


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that two workers have made of a table on three servers."""
    directory = tmp_path_factory.mktemp("users")

    def work(ps: Session) -> None:
        table = open_users(ps)
        train(ps, table, 2, seed=ps.rank)
        if ps.rank == 0:
            table.export(directory / "users.safetensors")
        ps.barrier()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.update.rows.walk.PIECE_BYTES", 1)  # 64 rows a piece
        run_job(directory, work, servers=3, workers=2)
    return directory / "users.safetensors"


@pytest.mark.parametrize(("servers", "others"), [(1, 3), (3, 1), (2, 3)])
def test_training_goes_on_from_a_file_as_if_nothing_had_been(servers: int, others: int, tmp_path: Path) -> None:
    path = tmp_path / "users.safetensors"

    def through(ps: Session) -> torch.Tensor:
        users = open_users(ps, life=paceline.Lifecycle(max_rows=10_000))
        train(ps, users, 3, seed=1)
        users.export(str(path))
        train(ps, users, 2, seed=2)
        return users.pull(IDS)

    def again(ps: Session) -> torch.Tensor:
        users = open_users(ps, consistency="ssp:2", life=paceline.Lifecycle(max_rows=10_000))
        users.push([1, int(IDS[5])], torch.ones(2, 3))  # what is there is written over, or stays
        ps.clock()
        users.load(path)
        assert users.statistics().num_rows == len(IDS) + 1
        train(ps, users, 2, seed=2)
        return users.pull(IDS)

    (expected,), (got,) = run_job(tmp_path, through, servers=servers), run_job(tmp_path, again, servers=others)
    assert torch.equal(got, expected)


def test_a_file_has_all_rows_of_the_clock_and_can_be_read_by_others(users: Path) -> None:
    tensors = load_file(users)
    assert torch.equal(tensors["ids"].sort().values, IDS.sort().values)
    assert tensors["values"].shape == (600, 3)
    assert {name for name in tensors if name.startswith("state.")} == {"state.z", "state.n"}
    assert [found.name for found in users.parent.glob("users*")] == ["users.safetensors"]


def test_what_was_loaded_is_seen_by_workers_that_keep_rows(users: Path, tmp_path: Path) -> None:
    values = load_file(users)

    def work(ps: Session) -> None:
        table = open_users(ps, "essp:0")
        table.pull(values["ids"])
        ps.barrier()
        if ps.rank == 0:
            table.load(users)
            assert torch.equal(table.pull(values["ids"]), values["values"])
        ps.barrier()
        ps.clock()
        assert torch.equal(table.pull(values["ids"]), values["values"])

    run_job(tmp_path, work, workers=2, servers=2)


def damage(path: Path, kind: str) -> None:
    data = bytearray(path.read_bytes())
    if kind == "bit":
        data[-5] ^= 16
    elif kind == "truncated":
        del data[len(data) // 2 :]
    elif kind == "empty":
        data.clear()
    elif kind == "noise":
        data = bytearray(torch.randint(0, 255, (5000,), dtype=torch.uint8).numpy().tobytes())
    elif kind == "foreign":
        save_file({"ids": torch.arange(4), "values": torch.ones(4, 3)}, path)
        return
    path.write_bytes(data)


@pytest.mark.parametrize("kind", ["bit", "truncated", "empty", "noise", "foreign", "missing"])
def test_a_file_that_is_no_good_is_refused_before_anything_changes(kind: str, users: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    if kind != "missing":
        path.write_bytes(users.read_bytes())
        damage(path, kind)

    def work(ps: Session) -> None:
        table = open_users(ps)
        with pytest.raises(UsageError, match=r"bad\.safetensors"):
            table.load(path)
        assert table.statistics().num_rows == 0
        train(ps, table, 1, seed=1)
        assert table.statistics().num_rows == len(IDS)

    run_job(tmp_path, work, servers=2)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"name": "items"}, "has table 'users'"),
        ({"rows": 4}, "has width '3'"),
        ({"dtype": "float64"}, "has dtype 'float32'"),
        ({"update": paceline.update.Add()}, "has rule 'ftrl'"),
    ],
)
def test_a_file_of_another_table_is_refused(other: dict[str, object], reason: str, users: Path, tmp_path: Path) -> None:
    settings = {"name": "users", "rows": 3, "update": paceline.update.FTRL(l1=0.01), **other}

    def work(ps: Session) -> None:
        table = ps.table(**settings)  # pyright: ignore
        with pytest.raises(UsageError, match=reason):
            table.load(users)
        assert table.statistics().num_rows == 0

    run_job(tmp_path, work)


def test_an_export_that_cannot_be_written_or_is_of_no_moment_is_an_error(tmp_path: Path) -> None:
    def work(ps: Session) -> None:
        users = open_users(ps, "asynchronous")
        users.push(IDS, torch.ones(len(IDS), 3))
        ps.clock()
        with pytest.raises(UsageError, match=r"cannot be written to .*No such file or directory"):
            users.export(tmp_path / "nowhere" / "users")
        pieces = users._whole.pieces

        class Moving:
            statistics = users._whole.statistics

            def pieces(self, **settings: bool) -> object:
                users.push([1], torch.ones(1, 3)).result(timeout=30)
                ps.clock()
                return pieces(**settings)

        with pytest.raises(UsageError, match=r"had 600 rows when its export .* began, and other rows came or went"):
            paceline.worker.table_calls.RowFile(tmp_path / "users", users.spec, Moving()).save()  # pyright: ignore
        assert not list(tmp_path.glob("users*"))

    run_job(tmp_path, work)


def test_rows_that_a_server_refuses_are_not_said_to_be_loaded(tmp_path: Path) -> None:
    path = tmp_path / "users"

    def work(ps: Session) -> None:
        table = open_users(ps)
        table.push(IDS, torch.ones(len(IDS), 3))
        ps.clock()
        pieces = [*table._whole.pieces(values_only=False, exact=True)] * 2  # as no server saves them: each id twice
        save_rows(path, table.spec, row_rule(table.spec.rule, None), pieces, 2 * len(IDS))
        with pytest.raises(Refused, match=r"600 of 1200 ids of rows repeat.* 0 rows are loaded for certain"):
            table.load(path)

    run_job(tmp_path, work)
