"""Two faults of the benchmark of verdicts, in one real job."""

import os
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
from benchmarks.__main__ import HERE


def test_a_worker_that_sleeps_and_then_is_stopped_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HERE)  # as where it is run as a script
    import culprit

    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with ExitStack() as stack:
        job = stack.enter_context(culprit.running("sleeps", 10_000, None, run_dir, 2))
        named = (verdict for verdict in job.looks(240) if (verdict.kind, verdict.subject) == ("worker", "worker 1"))
        assert "the others wait" in next(named).text
        os.kill(job.pid("worker", 1), signal.SIGSTOP)
        stack.callback(os.kill, job.pid("worker", 1), signal.SIGCONT)
        stopped = next(verdict for verdict in job.looks(240) if verdict.kind == "stopped")
        assert stopped.subject == "worker 1"
        assert job.process.poll() is None
