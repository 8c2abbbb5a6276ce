"""The process that passes on what a run reports, with the libraries themselves where they are installed."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest

from paceline.cli import answer
from paceline.errors import UsageError
from paceline.job.folders import wait_for
from paceline.launch import exporter
from paceline.launch.exporter import exporting
from paceline.observe.export.options import ExportOptions
from paceline.observe.export.trackers import is_there
from paceline.observe.trace import ReportedValues, Step, Trace, trace_path

NUM_CLOCKS = 5


def needs(module: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not is_there(module), reason=f"{module} is not installed here")


def write_run(folder: Path) -> Path:
    """Two workers report a loss and a norm at each clock."""
    for worker in range(2):
        with Trace(trace_path(folder, "worker", worker)) as trace:
            for clock in range(NUM_CLOCKS):
                trace.record(ReportedValues(1.0 + clock, worker, clock, {"grad_norm": 2.0 + worker}))
                trace.record(Step(1.0 + clock, worker, clock, 8, clock + 0.5 * worker, 0.0, 1.0))
    return folder


def read_back(program: str, *words: str, **variables: str) -> object:
    """What a program that reads a tracker's files prints as JSON: a library of others may warn of much."""
    command = [sys.executable, "-W", "ignore", "-c", program, *words]
    return json.loads(subprocess.run(command, check=True, capture_output=True, env={**os.environ, **variables}).stdout)


@needs("tensorboard")
def test_tensorboard_shows_what_a_run_reports_while_prometheus_scrapes_it(tmp_path: Path) -> None:
    told: list[str] = []
    folder, curves = tmp_path / "run", tmp_path / "curves"
    with exporting(ExportOptions(f"tensorboard:{curves}", "0"), folder, told.append):
        write_run(folder)
        url = told[0].rpartition(" at ")[2]
        samples = f'paceline_worker_samples_total{{worker="1"}} {8 * NUM_CLOCKS}\n'
        while samples not in urllib.request.urlopen(url, timeout=60).read().decode():
            pass
    assert len(told) == 1
    program = """if 1:
        import json, sys
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        found = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0})
        found.Reload()
        tags = found.Tags()["scalars"]
        values = {tag: {event.step: event.value for event in found.Scalars(tag)} for tag in tags}
        print(json.dumps(values))
    """
    values = read_back(program, str(curves))
    assert isinstance(values, dict)
    assert values["loss"] == {str(clock): clock + 0.25 for clock in range(NUM_CLOCKS)}
    assert values["worker-1/loss"] == {str(clock): clock + 0.5 for clock in range(NUM_CLOCKS)}
    assert set(values["grad_norm"].values()) == {2.5}


def test_an_exporter_that_is_killed_or_hangs_leaves_the_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exporters() -> list[psutil.Process]:
        alive = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
        return [child for child in alive if "paceline.launch.exporter" in child.cmdline()]

    def begun() -> psutil.Process:
        """A program that has just begun has no command line for a moment."""
        [process] = wait_for(lambda: exporters() or None, 60, lambda: "no exporter begins")
        return process

    told: list[str] = []
    with exporting(ExportOptions(metrics="0"), tmp_path, told.append):
        process = begun()
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    monkeypatch.setattr(exporter, "_END_TIMEOUT_S", 0.1)
    with exporting(ExportOptions(metrics="0"), tmp_path, told.append):
        begun().send_signal(signal.SIGSTOP)
    assert exporters() == []
    assert told[-1] == "the last values of the run have not reached its trackers, one of which hangs"


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        (ExportOptions(log="nothing"), "--log names 'nothing', expected"),
        (ExportOptions(metrics="x"), "--metrics is 'x', expected"),
    ],
)
def test_what_cannot_be_had_is_told_before_a_run_begins(asked: ExportOptions, problem: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=problem), exporting(asked, tmp_path, print):
        pytest.fail("it has begun")


@needs("tensorboard")
def test_a_run_that_is_over_is_exported_by_its_folder(tmp_path: Path) -> None:
    write_run(tmp_path)
    program = "import sys; from paceline.cli import main; main()"
    words = ("export", str(tmp_path), "--log", f"tensorboard:{tmp_path / 'curves'}")
    subprocess.run([sys.executable, "-c", program, *words], check=True, timeout=200)
    assert len(list((tmp_path / "curves").iterdir())) == 1


def test_export_needs_to_be_told_where(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert answer(["export", str(tmp_path)]) == 2
    assert "has nowhere to go: add --log or --metrics" in capsys.readouterr().err


@contextmanager
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """What takes metrics by OTLP, and its address."""
    bodies: list[bytes] = []

    class Take(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Take)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/metrics", bodies
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@needs("opentelemetry.exporter.otlp.proto.http")
def test_opentelemetry_gets_the_same_metrics(tmp_path: Path) -> None:
    with collector() as (url, bodies):
        with exporting(ExportOptions(f"otlp:{url}"), write_run(tmp_path), print):
            pass
        program = """if 1:
            import json, sys
            from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
            request = ExportMetricsServiceRequest.FromString(bytes.fromhex(sys.argv[1]))
            metrics = request.resource_metrics[0].scope_metrics[0].metrics
            print(json.dumps({each.name: [point.as_double for point in each.sum.data_points] for each in metrics}))
        """
        body = gzip.decompress(bodies[-1]) if bodies[-1][:2] == b"\x1f\x8b" else bodies[-1]
        found = read_back(program, body.hex())
    assert isinstance(found, dict)
    assert found["paceline.worker_samples"] == [8.0 * NUM_CLOCKS] * 2


@pytest.mark.campaign
@needs("mlflow")
def test_mlflow_has_what_a_run_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    with exporting(ExportOptions("mlflow:tests"), write_run(tmp_path / "run"), print):
        pass
    program = """if 1:
        import json
        from mlflow import MlflowClient
        client = MlflowClient()
        [run] = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
        history = client.get_metric_history(run.info.run_id, "loss")
        print(json.dumps([run.info.status, {point.step: point.value for point in history}]))
    """
    expected = {str(clock): clock + 0.25 for clock in range(NUM_CLOCKS)}
    assert read_back(program, MLFLOW_TRACKING_URI=store) == ["FINISHED", expected]


@pytest.mark.campaign
@needs("trackio")
def test_trackio_has_what_a_run_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    with exporting(ExportOptions("trackio:tests"), write_run(tmp_path / "run"), print):
        pass
    program = """if 1:
        import json, sqlite3, sys
        rows = sqlite3.connect(sys.argv[1]).execute("select step, metrics from metrics order by step").fetchall()
        values = [(step, metrics if isinstance(metrics, dict) else json.loads(metrics)) for step, metrics in rows]
        print(json.dumps({step: found["loss"] for step, found in values if "loss" in found}))
    """
    found = read_back(program, str(tmp_path / "trackio" / "tests.db"))
    assert found == {str(clock): clock + 0.25 for clock in range(NUM_CLOCKS)}


@pytest.mark.campaign
@needs("wandb")
def test_weights_and_biases_has_what_a_run_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WANDB_MODE", "offline"), ("WANDB_DIR", str(tmp_path))):
        monkeypatch.setenv(name, value)
    with exporting(ExportOptions("wandb:tests"), write_run(tmp_path / "run"), print):
        pass
    [log] = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    content = log.read_bytes()
    assert content.count(b"worker-1/loss") >= NUM_CLOCKS
