"""Mistakes in what scripts give to tables are told in our words, and everything public shows itself in a short line."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.jobs import run_job
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.api.session import Session
from paceline.errors import PeerError, UsageError

SGD = paceline.update.SGD(lr=0.1)
NO_VALUES: dict[str, tuple[object, str]] = {
    "complex": (torch.ones(2, 2, dtype=torch.complex64), r"a tensor \(2, 2\) of complex64.*view_as_real"),
    "complex array": (np.ones((2, 2), dtype=complex), r"an array \(2, 2\) of complex128"),
    "text": ("x" * 1_000_000, r"is 'xxx.*\.\.\., expected a tensor"),
    "none": (None, "is None, expected a tensor, an array or a list of real numbers"),
    "ragged": ([[1.0, 2.0], [3.0]], "in equally long rows"),
    "sparse": (torch.eye(2).to_sparse(), "that is sparse.*make it dense"),
    "meta": (torch.ones(2, 2, device="meta"), "on device meta, which has no values"),
    "class": (nn.Linear, "is the class Linear"),
    "dict": ({"a": 1}, r"is \{'a': 1\}"),
    "texts": (np.array([["a", "b"], ["c", "d"]]), "an array .* of <U1"),
}


def refused(call: Callable[[], object], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        call()
    assert len(str(caught.value)) < 500, "no message prints values without bound"


def test_what_is_no_value_is_refused_by_name_and_the_worker_goes_on(tmp_path: Path) -> None:
    def work(worker: Session) -> None:
        table = worker.table("w", shape=(2, 2), update=SGD)
        rows = worker.table("r", rows=2, update=SGD)
        for value, words in NO_VALUES.values():
            refused(lambda value=value: table.push(value), f"table 'w', worker 0, clock 0: a push {words}|{words}")
            refused(lambda value=value: rows.push([1, 2], value), words)
        for out in ("x", [[0.0]], torch.empty(2, 2, dtype=torch.float64), torch.empty(2, 2, device="meta"),
                    np.empty((2, 2), dtype="int64"), torch.empty(2, 4)[:, ::2]):  # fmt: skip
            refused(lambda out=out: table.pull(out=out), r"table 'w', worker 0, clock 0: out is .*expected \(2, 2\)")
        for samples in ("many", None, -1, float("nan"), torch.ones(2), True):
            refused(lambda samples=samples: table.push(torch.ones(2, 2), samples=samples), "samples is .*0 or more")
            refused(lambda samples=samples: rows.push([1], [[1.0, 1.0]], samples=samples), "samples is .*0 or more")
        refused(lambda: worker.clock(samples="x"), "worker 0, clock 0: samples is 'x'")
        refused(lambda: rows.pull(torch.eye(2).to_sparse()), "sparse")
        for kind in (torch.ones(2, 2, requires_grad=True), np.ones((2, 2)), [[1, 1], [1, 1]], torch.ones(2, 2).int()):
            table.push(kind, samples=torch.tensor(2))
        worker.clock()
        torch.testing.assert_close(table.pull(), torch.full((2, 2), -0.1))

    run_job(tmp_path, work)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"shape": 3}, r"shape is 3, expected sizes such as \(3, 2\)"),
        ({"shape": "ab"}, "shape is 'ab'"),
        ({"shape": (1.5,)}, "shape: Expected `int`, got `float`"),
        ({"shape": (2,), "update": torch.optim.SGD}, "update is the class SGD"),
        ({"shape": (2,), "dtype": torch.float32}, "dtype is torch.float32, expected .*'float32'"),
        ({"shape": (2,), "init": "x"}, "init is 'x'"),
        ({"shape": (2,), "init": None}, "init is None"),
        ({"shape": (2,), "nonfinite": []}, "nonfinite: Expected `str`"),
        ({"rows": 1.5}, "rows: Expected `int`, got `float`"),
        ({"rows": 3, "filters": 3}, "filters is 3"),
        ({"rows": 3, "filters": [3]}, "filters: Expected `object`"),
        ({"rows": 3, "life": 3}, "life: Expected `object`"),
        ({"rows": 3, "init": "a"}, "init is 'a', expected a number or one of paceline.first"),
        ({"rows": 3, "communication": 3}, "communication is 3, expected paceline.managed"),
        ({"rows": 3, "cache_rows": "x"}, "cache_rows is 'x'"),
    ],
)
def test_settings_of_wrong_types_are_refused_before_a_server_sees_them(
    settings: dict[str, object], words: str, tmp_path: Path
) -> None:
    def work(worker: Session) -> None:
        refused(lambda: worker.table("t", **{"update": SGD, **settings}), words)
        refused(lambda: worker.table(b"t", shape=(2,), update=SGD), "named b't', expected a text")
        refused(lambda: worker.table("a\nb", shape=(2,), update=SGD), "characters that cannot be printed")
        assert worker.table("t", shape=(2,), update=SGD).pull().shape == (2,)

    run_job(tmp_path, work)


def test_everything_public_shows_itself_in_one_short_line(tmp_path: Path) -> None:
    def work(worker: Session) -> list[str]:
        for number in range(20):
            worker.table(f"table {number} " + "x" * 400, shape=(3,), update=SGD)
        table, rows = worker.table("w", shape=(3,), update=SGD), worker.table("r", rows=3, update=SGD)
        one, two = nn.Linear(3, 1), nn.Sequential(*(nn.Linear(3, 3) for _ in range(9)))
        loader = DataLoader(TensorDataset(torch.ones(10, 3)), batch_size=2)
        shown = [
            worker, table, rows, rows.pull_later([1]), worker.node, SGD, paceline.update.Adam(lr=0.1),
            paceline.distributed(torch.optim.SGD(one.parameters(), lr=0.1), model=one),
            paceline.distributed(
                torch.optim.Adam(two.parameters(), lr=0.1), model=two, name="n",
                strategy={f"{k}.*": f"ssp:{k}" for k in range(8)} | {"*": "bsp"},
            ),
            paceline.shard(loader), paceline.shard(iter([1, 2])), paceline.bsp(), paceline.Lifecycle(),
            paceline.Embedding(10, 3, name="e" * 300, update=SGD),
            paceline.sources.lines([f"{k}.txt" for k in range(10_000)]),
        ]  # fmt: skip
        return [repr(one) for one in shown]

    for text in run_job(tmp_path, work)[0]:
        assert len(text) <= 200, text
        assert "\n" not in text
        assert " object at 0x" not in text


def test_a_failure_while_leaving_at_exit_is_told_once_and_short(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(worker: Session) -> None:
        worker.node._fail("the server is gone")

        with pytest.raises(PeerError) as caught:
            worker.clock()
        monkeypatch.setattr("sys.last_value", caught.value, raising=False)
        worker.leave_at_exit()
        assert capsys.readouterr().err == "", "what ended the script was shown by Python"

    run_job(tmp_path, work)
    monkeypatch.setattr("sys.last_value", None, raising=False)

    def fail(worker: Session) -> None:
        worker.node._fail("the server is gone")
        worker.leave_at_exit()
        assert capsys.readouterr().err == "paceline: worker 0 (clock 0): the server is gone\n"

    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    run_job(other, fail)
