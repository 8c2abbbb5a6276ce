"""A mistake is told in words: what happened, where, what was expected and got, what to do. And the job ends soon."""

import os
import re
from pathlib import Path

import pytest
from tests.faults.running import Run, run_to_end, running, went_on_without, write_script

from paceline.cli import answer
from paceline.errors import EXIT_LOST
from paceline.transport.frames import WIRE_VERSION

# -- before anything is started ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--consistency", "bps"], r"'bps'.*bsp, ssp:S"),
        (["--consistency", "ssp:-1"], r"staleness bound is -1, expected 0 or more clocks"),
        (["--consistency", "ssp:many"], r"'ssp:many'"),
        (["-n", "0"], r"--workers must be at least 1, got 0"),
        (["-m", "0"], r"--servers must be at least 1, got 0"),
        (["--transport", "smoke"], r"smoke"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = write_script(tmp_path, "")

    assert answer(["run", *options, str(script)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("paceline: ")
    assert re.search(message, line)


def test_a_script_that_is_not_there_is_named_with_what_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_script(tmp_path, "")

    assert answer(["run", str(tmp_path / "scirpt.py")]) == 2
    assert "did you mean" in capsys.readouterr().err


# -- inside a job, told by the worker that met it ---------------------------------------------------------------------

OPEN = """
import math, os, sys, time
import torch, paceline
ps = paceline.init()
def table(name="w", size=256, **settings):
    return ps.table(name, shape=(size,), update=settings.pop("update", paceline.update.Add()), **settings)
"""


def run_script(folder: Path, text: str, *options: str, wrap: str = "") -> tuple[int, Run]:
    return run_to_end(folder / "run", write_script(folder, text), options=options, wrap=wrap)


# What a worker does wrong, and what it is told. Each is tried on a table of its own, by one worker after the other.
MISTAKES = {
    "table(name, size=1)": r"table '\w+': 2 servers for a table of 1 parameters. Use at most 1 server",
    "table(name, size=256 + ps.rank)": (
        r"parameter 0 is '\w+' \(25\d,\) here and '\w+' \(25\d,\) there\. Every worker must build the same model"
    ),
    "table(name, update=paceline.update.SGD(lr=0.1 + ps.rank))": r"lr of group 0 is [\d.]+ here and [\d.]+ there\.",
    "table(name, update=paceline.update.torch_optim('Adamm', lr=0.1))": (
        r"There is no optimizer class 'torch.optim.Adamm' in torch .*Check its spelling"
    ),
    "table(name, consistency='ssp:-2')": r"staleness bound is -2, expected 0 or more clocks",
    "table(name).push(torch.ones(3))": (
        r"a push to table '\w+' has shape \(3,\), expected \(256,\); worker \d, clock \d+"
    ),
    "table(name, nonfinite='halt').push(torch.full((256,), math.nan))": (
        r"worker \d, clock \d+: 256 of 256 elements of the gradient for table '\w+' are NaN or infinite.*clip gradients"
    ),
    "table(name).push(torch.ones(256)); ps.barrier()": (
        r"pushed to table '\w+' during clock \d+, .*call clock\(\) first"
    ),
}

TRY_ALL = """
for number, mistake in enumerate(MISTAKES):
    name = f"t{number}"
    for turn in range(ps.size):
        if ps.rank == turn:
            try:
                exec(mistake)
            except PacelineError as error:
                print("told", number, error, flush=True)
        ps.clock()
        ps.barrier()
"""


NAN = """
bad = torch.full((256,), math.nan)
reject, zero = table("reject"), table("zero", nonfinite="zero")
outcomes = [t.push(bad) for t in (reject, zero)]
ps.clock()
assert (reject.pull() == 0).all() and (zero.pull() == 0).all()
print(f"{outcomes[0].result(timeout=30).reason}\\n", end="")  # at once: another thread writes there, too
print(f"zeroed {outcomes[1].result(timeout=30).applied}\\n", end="")
"""


@pytest.fixture(scope="module")
def mistaken(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A job of two workers that make every mistake, and go on."""
    text = f"{OPEN}from paceline.errors import PacelineError\nMISTAKES = {list(MISTAKES)}\n{TRY_ALL}{NAN}"
    options = ("-n", "2", "-m", "2", "--transport", "memory")
    code, run = run_script(tmp_path_factory.mktemp("mistaken"), text, *options)
    assert code == 0, run.output
    return run


def test_every_mistake_is_told_with_what_to_do(mistaken: Run) -> None:
    for number, (mistake, message) in enumerate(MISTAKES.items()):
        told = mistaken.saying(f"told {number} ")
        assert told, f"{mistake} goes unnoticed"
        assert all(re.search(message, line) for line in told), told


def test_gradients_that_are_not_finite_never_reach_the_values(mistaken: Run) -> None:
    reason = "256 of 256 elements of the gradient for table 'reject' are NaN or infinite; it was not sent"
    lines = mistaken.saying(reason)  # the script prints the outcome, and each worker tells it by itself
    assert len(lines) == 4
    assert sum("a push of 'reject' was refused" in line for line in lines) == 2
    assert len(mistaken.saying("zeroed True")) == 2


def test_a_mistake_that_is_not_caught_ends_the_job_without_a_traceback(tmp_path: Path) -> None:
    code, run = run_script(tmp_path, f"{OPEN}\nif ps.rank == 1:\n    table(size=-1)\nps.barrier()", "-n", "2")

    assert code == 1
    assert "Traceback" not in run.output
    assert run.lines[:2] == [
        "[worker 1] paceline: Table 'w': parameter 0 ('w') has shape (-1,), expected sizes of 0 or more.",
        f"[worker 1]   at {tmp_path / 'script.py'}:6; run with --traceback for more",  # where `table` calls ours
    ]
    assert run.told()[-1] == "paceline: worker 1 ended with exit code 1; the run stops"


def test_a_traceback_is_shown_when_it_is_asked_for(tmp_path: Path) -> None:
    code, run = run_script(tmp_path, OPEN + "table(size=-1)", "-n", "1", "--transport", "memory", "--traceback")

    assert code == 1
    assert "Traceback (most recent call last)" in run.output
    assert run.saying("script.py"), "the script is part of it"
    assert not run.saying("runpy"), "what started the script is not"


WRONG_TOKEN = """
import os
from pathlib import Path
if os.environ["PACELINE_RANK"] == "1":
    from paceline.job.credentials import holders
    holders.read_token = lambda folder, name="token": bytes(32)
"""

OTHER_VERSION = """
import os
if os.environ["PACELINE_RANK"] == "1":
    from paceline.transport import handshake
    handshake.WIRE_VERSION = 99
"""


@pytest.mark.parametrize(
    ("transport", "stranger", "message"),
    [
        ("tcp", WRONG_TOKEN, r"refused the proof of our token: the token or the job '\w+' is not"),
        (
            "shm",
            OTHER_VERSION,
            rf"speaks wire version {WIRE_VERSION}, expected 99: install the same paceline on both sides",
        ),
    ],
    ids=["wrong token", "other version"],
)
def test_a_stranger_is_refused_and_told_why(transport: str, stranger: str, message: str, tmp_path: Path) -> None:
    code, run = run_script(tmp_path, stranger + OPEN + "ps.barrier()", "-n", "2", "--transport", transport)

    assert code == 1
    assert any(re.search(message, line) for line in run.saying("[worker 1] paceline: ")), run.output
    assert "Traceback" not in run.output
    assert run.told()[-1] == "paceline: worker 1 ended with exit code 1; the run stops"


# -- a script that fails, or ends early -------------------------------------------------------------------------------

FAILING = """
w = table()
for clock in range(1000):
    w.push(torch.ones(256)); ps.clock()
    if ps.rank == 1 and clock == 3:
        w.push(torch.ones(256))   # this clock is never completed
        print("failing now", flush=True)
        END
    w.pull()
    if clock == 10: break
print("came to the end")
"""


@pytest.mark.parametrize(("end", "code"), [("raise ValueError('no data')", 1), ("sys.exit(7)", 7)])
def test_a_script_that_fails_on_one_rank_ends_the_job_soon(end: str, code: int, tmp_path: Path) -> None:
    script = write_script(tmp_path, OPEN + FAILING.replace("END", end))
    with running(tmp_path / "run", script, options=("-n", "2")) as run:
        run.wait_for("failing now")

        assert run.end() == code  # in time: the other worker would wait for longer than that
    assert f"paceline: worker 1 ended with exit code {code}; the run stops" in run.told()
    if code == 1:
        assert run.lines.count("[worker 1] ValueError: no data") == 1, "what it wrote is told, and once"
        assert "runpy" not in run.output


def test_a_script_that_fails_on_one_rank_may_be_gone_on_without(tmp_path: Path) -> None:
    text = OPEN + FAILING.replace("END", "sys.exit(7)")
    code, run = run_script(tmp_path, text, "-n", "2", "--on-error", "continue")

    assert code == EXIT_LOST, run.output
    assert len(run.saying("came to the end")) == 1
    assert run.told() == went_on_without("worker 1", "ended with exit code 7")


def test_a_worker_that_never_takes_part_or_ends_without_leave_holds_up_no_other(tmp_path: Path) -> None:
    text = """
import os, sys

if os.environ["PACELINE_RANK"] == "1": sys.exit(0)
""" + (OPEN + FAILING.replace("ps.rank == 1", "ps.rank == 2").replace("END", "os._exit(0)"))
    code, run = run_script(tmp_path, text, "-n", "3", "--timeout", "1000")  # for which a worker may be late

    assert code == 0, run.output
    assert len(run.saying("came to the end")) == 1


# -- shared memory ----------------------------------------------------------------------------------------------------

LARGE = """
w = table(size=1_000_000)
for _ in range(3):
    w.push(torch.ones(1_000_000)); ps.clock()
    w.pull()
print("sum", w.pull().sum().item())
"""


def test_where_no_shared_memory_is_to_be_had_the_socket_carries_all_with_one_notice_each(tmp_path: Path) -> None:
    code, run = run_script(tmp_path, OPEN + LARGE, "-n", "1", wrap="ulimit -f 1024; exec")  # KiB a file may have

    assert code == 0, run.output
    assert run.saying("sum 3000000.0")
    notices = run.saying("cannot be allocated (File too large); such bodies are copied through the socket instead")
    assert [line.split("]")[0] for line in sorted(notices)] == ["[server 0", "[worker 0"]
    assert all("] paceline: shared memory of " in line and line.endswith("(`ulimit -f`)") for line in notices)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small /dev/shm")
def test_a_full_dev_shm_does_not_matter(tmp_path: Path) -> None:
    fill = "mount -t tmpfs -o size=2m tmpfs /dev/shm && ! dd if=/dev/zero of=/dev/shm/full bs=1M 2> /dev/null"
    script = write_script(tmp_path, OPEN + LARGE)
    wrap = f"""exec unshare -m bash -c '{fill} && exec "$@"' bash"""
    code, run = run_to_end(tmp_path / "run", script, options=("-n", "1"), wrap=wrap)

    assert code == 0, run.output
    assert run.saying("sum 3000000.0")
    assert not run.saying("cannot be allocated")
