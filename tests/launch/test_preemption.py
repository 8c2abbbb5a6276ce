"""Told to leave: noted once, heeded where a step ends, and obeyed at once where no step would heed it."""

import faulthandler
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.errors import EXIT_PREEMPTED
from paceline.launch.signals import (
    ENDING_SIGNALS,
    PREEMPTION_SIGNALS,
    REPEAT_WINDOW_S,
    PreemptionNotice,
    at_first_signal,
)


@pytest.fixture
def before() -> Iterator[None]:
    """Signals do what they do by default, and will again."""
    handlers = {number: signal.signal(number, signal.SIG_DFL) for number in PREEMPTION_SIGNALS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def left(notice: PreemptionNotice) -> bool:
    """Whether the end of a step ends the process."""
    calls: list[None] = []
    try:
        notice.exit_if_preempted(lambda: calls.append(None))
    except SystemExit as stop:
        return (stop.code, len(calls)) == (EXIT_PREEMPTED, 1)
    return False


@pytest.mark.usefixtures("before")
@pytest.mark.parametrize("number", PREEMPTION_SIGNALS)
def test_a_signal_is_noted_and_heeded_where_a_step_ends(number: signal.Signals) -> None:
    notice = PreemptionNotice(now=lambda: 5.0)
    notice.listen()
    assert not left(notice)

    signal.raise_signal(number)
    signal.raise_signal(signal.SIGTERM)  # a whole group is told at once, and the launcher tells once more

    assert left(notice)


@pytest.mark.usefixtures("before")
def test_a_script_that_asks_sees_to_it_itself() -> None:
    notice = PreemptionNotice()
    notice.listen()
    assert not notice.check_preempted()
    signal.raise_signal(signal.SIGTERM)
    assert not left(notice)
    assert notice.check_preempted()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel says which processes have handlers")
@pytest.mark.usefixtures("before")
def test_a_handler_that_dumps_stacks_stays(tmp_path: Path) -> None:
    with (tmp_path / "stacks").open("w+") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks)
        notice = PreemptionNotice()
        notice.listen()
        signal.raise_signal(signal.SIGUSR1)
        faulthandler.unregister(signal.SIGUSR1)
        notice.close()
        assert not left(notice)
        stacks.seek(0)
        assert "test_a_handler_that_dumps_stacks_stays" in stacks.read()


@pytest.mark.usefixtures("before")
def test_handlers_of_the_script_stay_and_ours_go() -> None:
    seen: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: seen.append(number))
    notice = PreemptionNotice()
    notice.listen()
    signal.raise_signal(signal.SIGTERM)
    assert (seen, notice.check_preempted()) == ([signal.SIGTERM], False)

    notice.close()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    signal.raise_signal(signal.SIGTERM)
    assert len(seen) == 2


@pytest.mark.usefixtures("before")
def test_a_process_that_was_told_is_not_cut_short_while_it_ends() -> None:
    notice = PreemptionNotice()
    notice.listen()
    signal.raise_signal(signal.SIGTERM)
    notice.close()
    signal.raise_signal(signal.SIGTERM)
    assert left(notice)


@pytest.mark.usefixtures("before")
def test_only_the_main_thread_has_signals() -> None:
    notice = PreemptionNotice()
    thread = threading.Thread(target=notice.listen)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


ENDS_AT_ONCE = {
    "a second order": f"clock[0] += {REPEAT_WINDOW_S}; tell(); print('after the second')",
    "a run that is called off": "off.touch(); tell(); print('after it was called off')",
    "a process that was forked": "pid = os.fork(); tell() if pid == 0 else sys.exit(os.waitpid(pid, 0)[1])",
}


@pytest.mark.parametrize("then", ENDS_AT_ONCE.values(), ids=ENDS_AT_ONCE)
def test_ended_at_once(then: str, tmp_path: Path) -> None:
    script = f"""
import os, signal, sys
from pathlib import Path
from paceline.launch.signals import PreemptionNotice
off, clock = Path(sys.argv[1]) / "off", [0.0]
def tell(): os.kill(os.getpid(), signal.SIGTERM)
notice = PreemptionNotice(off, lambda: clock[0])
notice.listen()
{"tell()" if "second" in then else ""}
{then}
"""
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=200)
    assert (abs(ended.returncode), ended.stdout) == (signal.SIGTERM, ""), ended.stderr


@pytest.mark.usefixtures("before")
def test_a_script_that_may_be_saving_is_not_cut_short_when_the_run_is_called_off(tmp_path: Path) -> None:
    called_off = tmp_path / "off"
    called_off.touch()
    notice = PreemptionNotice(called_off)
    notice.may_save = lambda: True
    notice.listen()

    signal.raise_signal(signal.SIGTERM)

    assert notice.check_preempted()


def test_the_first_signal_to_end_acts_once_and_leaves_the_second_to_the_system() -> None:
    seen: list[int] = []
    before = {number: signal.getsignal(number) for number in ENDING_SIGNALS}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        with at_first_signal(seen.append):
            signal.raise_signal(signal.SIGHUP)
            assert seen == []
            signal.raise_signal(signal.SIGTERM)
            assert seen == [signal.SIGTERM]
            assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is before[signal.SIGTERM]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
