"""A script's first calls: they find the job, or make one of a single worker."""

import contextvars
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import paceline
from paceline.api.script import current
from paceline.errors import UsageError

SCRIPT = """
import sys, torch, paceline

first = paceline.init()
assert paceline.init() is first
print(paceline.rank(), paceline.size(), paceline.local_rank())
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
start = [parameter.detach().clone() for parameter in model.parameters()]
optimizer = paceline.distributed(torch.optim.Adam(model.parameters(), lr=0.1))
data = torch.utils.data.TensorDataset(torch.randn(20, 3))
for _ in range(2):
    for (batch,) in paceline.shard(torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        paceline.report(loss=loss.item())
with optimizer.snapshot():
    torch.save(model.state_dict(), sys.argv[1])
paceline.barrier()
print(first.node.clock, all(not torch.equal(a, b) for a, b in zip(start, model.parameters())))
"""


def run_fresh(act: Callable[[], object]) -> object:
    """Run as in a process where init was not called."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("paceline.api.script._script.session", None)
        return contextvars.Context().run(act)


def test_a_plain_script_trains_with_a_server_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-W", "error", str(script), str(tmp_path / "model.pt")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("0 1 0\n10 True\n", "", 0)
    assert sorted(torch.load(tmp_path / "model.pt", weights_only=True)) == ["bias", "weight"]


@pytest.mark.parametrize(
    "call",
    [
        paceline.rank,
        paceline.size,
        paceline.local_rank,
        paceline.barrier,
        lambda: paceline.report(loss=1.0),
        lambda: paceline.shard([1, 2]),
        lambda: paceline.distributed(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])),
    ],
)
def test_calls_before_init_say_so(call: Callable[[], object]) -> None:
    with pytest.raises(UsageError, match=r"paceline.init\(\) has not been called .*: call it first"):
        run_fresh(call)


def test_init_again_changes_nothing_and_after_leaving_it_joins_anew() -> None:
    def act() -> None:
        first = paceline.init()
        assert paceline.init() is first is current()
        first.close()
        first.close()
        second = paceline.init()
        assert second is not first
        assert second.table("w", shape=(1,), update=paceline.update.Add()).pull().tolist() == [0.0]
        second.close()

    run_fresh(act)


def test_accuracy_needs_the_loss_beside_it() -> None:
    def act() -> None:
        with paceline.init():
            paceline.report(loss=0.5, accuracy=0.9)
            with pytest.raises(UsageError, match=r"report\(accuracy=...\) also needs loss"):
                paceline.report(accuracy=0.9)

    run_fresh(act)


@pytest.mark.parametrize("begins", ["init", "connect"])
def test_a_script_that_names_code_of_its_own_by_path_does_not_train_within_itself(tmp_path: Path, begins: str) -> None:
    script = tmp_path / "trains_itself.py"
    script.write_text(f"""
import paceline
def shifted(record):
    return record
paceline.{begins}()
print("trains", __name__, flush=True)
paceline.init()
paceline.feed(paceline.sources.lines(__file__), batch_size=8, leases=False, transform="trains_itself:shifted")
""")

    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path, timeout=120)

    assert done.stdout == "trains __main__\n"
    assert "The transform trains_itself:shifted cannot be imported: UsageError: it is in a script that trains" in (
        done.stderr
    )
