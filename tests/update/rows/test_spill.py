from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.update.rows.stores import held, ids_of, push, rows_of, store_of

from paceline.errors import UsageError
from paceline.update.named_rules import SGD
from paceline.update.rows.contribution import RowContribution
from paceline.update.rows.layout import least_bytes
from paceline.update.rows.rules import row_rule
from paceline.update.rows.spec import Lifecycle
from paceline.update.rows.store import RowStore

BUDGET = 8 * 2**20
RULE = SGD(lr=0.5, momentum=0.5)
NUM_ROWS = 24_000


def spilling(folder: Path, budget_bytes: int = BUDGET, width: int = 64, **life: int) -> RowStore:
    return store_of(rows_of(RULE, Lifecycle(memory_bytes=budget_bytes, spill=str(folder), **life), width), "")


def mapped_bytes() -> int:
    """What this process has mapped of files without a name: they are shown as deleted."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            ours = line.endswith("(deleted)")
        elif ours and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


def test_rows_beyond_the_budget_are_read_back_exactly(tmp_path: Path) -> None:
    others = mapped_bytes()  # what tests before this one have left mapped in this process
    store, plain = spilling(tmp_path), store_of(rows_of(RULE, width=64), "")
    random, most = torch.Generator().manual_seed(0), 0
    for clock in range(3):
        for ids in torch.randperm(NUM_ROWS, generator=random).split(NUM_ROWS // 6):
            push_ = RowContribution(ids * 7919 - 10**6, torch.randn(len(ids), 64, generator=random))
            assert torch.equal(store.apply([push_], clock), plain.apply([push_], clock))
            most = max(most, mapped_bytes() - others)
    found = store.statistics()
    assert found.spilled_bytes == NUM_ROWS * (8 + 2 * 64 * 4) > BUDGET
    ids = torch.randint(NUM_ROWS, (1000,), generator=random) * 7919 - 10**6
    assert torch.equal(store.read(ids, 3), plain.read(ids, 3))
    most = max(most, mapped_bytes() - others)
    assert 0 < most <= BUDGET - found.index_bytes
    assert mapped_bytes() - others <= store.statistics().column_bytes
    assert list(tmp_path.iterdir()) == []
    store.close()
    assert mapped_bytes() <= others


def test_rows_come_and_go_in_files(tmp_path: Path) -> None:
    store = spilling(tmp_path, 2 * BUDGET, 4, expire_after=2, max_rows=1200)
    plain = store_of(rows_of(RULE, Lifecycle(expire_after=2, max_rows=1200), 4))
    random = torch.Generator().manual_seed(1)
    for clock in range(6):
        push_ = RowContribution(torch.randint(4000, (1000,), generator=random), torch.ones(1000, 4))
        for each in (store, plain):
            each.apply([push_], clock)
        assert store.advance(clock + 1).tolist() == plain.advance(clock + 1).tolist()
    ours, theirs = held(store), held(plain)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(row, theirs[key]) for key, row in ours.items())
    assert mapped_bytes() <= 2 * BUDGET
    store.close()


def test_a_budget_that_cannot_hold_the_index_refuses_new_rows_and_keeps_the_others(tmp_path: Path) -> None:
    spec = rows_of(life=Lifecycle(memory_bytes=1 << 40, spill=str(tmp_path)))
    least = least_bytes(spec, row_rule(spec.rule, None))
    store = store_of(rows_of(life=Lifecycle(memory_bytes=least + 8 * 4096, spill=str(tmp_path))))
    push(store, list(range(3000)))
    before = store.statistics()
    with pytest.raises(UsageError, match=r"does not suffice for 3101 rows, expected at least \d+") as refusal:
        push(store, [*range(2999, 3100), -1])
    assert str(least + 8 * 4096) in str(refusal.value)
    assert store.statistics() == before
    push(store, [5, 2999])
    assert store.read(ids_of(5, 3000), 0).tolist() == [[2.0, 2.0], [0.0, 0.0]]
    store.close()


def test_a_budget_below_what_any_table_needs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'rows': memory_bytes=1000 does not suffice for any rows"):
        spilling(tmp_path, 1000)


@pytest.mark.parametrize("kind", ["missing", "a file"])
def test_a_directory_of_no_use_is_refused(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "there"
    if kind == "a file":
        folder.write_text("")
    num_files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(UsageError, match=r"Row table 'rows': .*there"):
        spilling(folder)
    assert len(os.listdir("/proc/self/fd")) == num_files


def test_a_full_disk_refuses_new_rows_and_keeps_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = spilling(tmp_path)
    push(store, list(range(10)))

    def full(descriptor: int, start: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UsageError, match="No space left"):
        push(store, list(range(100_000)))
    push(store, [3])
    assert len(store) == 10
    assert sorted(held(store)) == list(range(10))
    store.close()


KILLED = """
import sys, torch
from tests.update.rows.stores import push
from tests.update.rows.test_spill import spilling
from pathlib import Path
store = spilling(Path(sys.argv[1]))
push(store, list(range(1000)))
print("ready", flush=True)
sys.stdin.read()
"""


def test_no_file_survives_a_kill(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        assert list(tmp_path.iterdir()) == []
        child.send_signal(signal.SIGKILL)
        child.wait(120)
    assert list(tmp_path.iterdir()) == []
