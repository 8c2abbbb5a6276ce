"""Metrics as Prometheus reads them: judged by its own parser, and by its rules for names."""

from __future__ import annotations

import json
import re
import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.tidy.tree import ROOT

from paceline.errors import UsageError
from paceline.observe.export import prometheus
from paceline.observe.export.prometheus import MetricsServer, exposition, listen
from paceline.observe.export.run_metrics import METRICS, MOST_SERIES, OTHER, RunMetrics
from paceline.observe.http_server import MAX_CONNECTIONS
from paceline.observe.trace import (
    AppliedRecord,
    Exit,
    MembershipRecord,
    MinClock,
    ReadRecord,
    Refusal,
    Reported,
    ReportedValues,
    RowRead,
    Sampled,
    Serving,
    Step,
    TraceRecord,
)

EVERYTHING: tuple[TraceRecord, ...] = (
    Step(1.0, 0, 0, 32, 0.5, 0.125, 1.0, 0.25, 0.25),
    Step(2.0, 0, 1, 32, 0.25, 0.125, 1.0, 0.25, 0.25),
    ReadRecord(1.0, 0, "model", 7, 2, 0.0, "fetch"),
    ReadRecord(1.0, 0, "model", 200, 0, 0.0, "fetch"),
    RowRead(1.0, 0, 'rows "of"\nits\\own', 1, {1: 3, 0: 2}, 0.0),
    Reported(1.0, 1, 0, None, "nan"),
    ReportedValues(1.0, 0, 0, {"grad_norm": "inf", "kl": -0.5}),
    Refusal(1.0, -1, 0, "model", "late"),
    MinClock(1.0, 0, "model", 2),
    AppliedRecord(1.0, 0, "model", (0,), 1, 0.5),
    Serving(1.0, 0, 2.0, 1.5, 1000, 2000, 3, num_behind=2),
    Sampled(1.0, "worker", 0, 1, 2.5, 0.5, 0.25, 7, 1, "here"),
    MembershipRecord(1.0, 0, 0, 0, "joined"),
    Exit(1.0, "worker 1", "worker", 1, 0, 9, -9, 0.0, "was killed", "the others go on"),
)


def filled(*records: TraceRecord) -> RunMetrics:
    metrics = RunMetrics()
    for record in records or EVERYTHING:
        metrics.add(record)
    return metrics


def parsed(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_its_own_parser_reads_every_metric_with_its_kind_and_value() -> None:
    text = exposition({(): filled()})
    families = {family.name: family.type for family in text_string_to_metric_families(text)}
    assert families == {metric.name.removesuffix("_total"): metric.kind for metric in METRICS}
    found = parsed(text)
    assert found["paceline_worker_samples_total", (("worker", "0"),)] == 64
    assert found["paceline_worker_compute_seconds_total", (("worker", "0"),)] == 1.0
    assert found["paceline_server_sent_bytes_total", (("server", "0"),)] == 2000
    assert found["paceline_reported_value", (("name", "grad_norm"), ("worker", "0"))] == float("inf")
    assert str(found["paceline_reported_value", (("name", "loss"), ("worker", "1"))]) == "nan"
    assert found["paceline_process_exits_total", (("role", "worker"),)] == 1


def test_the_histogram_of_staleness_is_cumulative() -> None:
    found = parsed(exposition({(): filled()}))
    name, table = "paceline_read_staleness_clocks", ("table", "model")
    buckets = [found[f"{name}_bucket", (("le", most), table)] for most in ("4", "6", "64", "+Inf")]
    assert buckets == [0, 1, 1, 2]
    assert (found[f"{name}_sum", (table,)], found[f"{name}_count", (table,)]) == (205, 2)
    assert found[f"{name}_bucket", (("le", "0"), ("table", 'rows "of"\nits\\own'))] == 3


def test_names_follow_the_conventions() -> None:
    for metric in METRICS:
        assert re.fullmatch(r"paceline_[a-z_]+", metric.name)
        assert (metric.kind == "counter") == metric.name.endswith("_total"), metric.name
        assert not re.search(r"_(ms|us|minutes|kb|mb|kib|mib)(_|$)", metric.name), "base units: seconds, bytes"
        assert metric.help.endswith(".")
        assert not {"le", "job", "instance"} & set(metric.labels)


def test_labels_have_a_bounded_number_of_values() -> None:
    steps = [Step(1.0, worker, 0, 1, None, 0.0, 1.0) for worker in range(2 * MOST_SERIES)]
    found = parsed(exposition({(): filled(*steps)}))
    samples = {labels: value for (name, labels), value in found.items() if name == "paceline_worker_samples_total"}
    assert len(samples) == MOST_SERIES + 1
    assert samples[(("worker", OTHER),)] == MOST_SERIES
    assert sum(samples.values()) == 2 * MOST_SERIES, "none is lost"


def test_runs_are_told_apart_by_a_label_of_their_own() -> None:
    text = exposition({(("namespace", "a"),): filled(), (("namespace", "b"),): filled()})
    assert parsed(text)["paceline_server_queue_frames", (("namespace", "b"), ("server", "0"))] == 3
    assert text.count("# TYPE paceline_server_queue_frames gauge") == 1


def test_scrapes_are_answered_on_this_machine_alone_until_it_is_closed() -> None:
    listening = listen("0")
    assert listening.getsockname()[0] == "127.0.0.1"
    metrics = RunMetrics()
    server = MetricsServer(listening, lambda: {(): metrics})
    stalled = socket.create_connection(listening.getsockname()[:2])  # says nothing, and holds up none
    try:
        metrics.add(Step(1.0, 3, 0, 16, None, 0.0, 1.0))
        with urllib.request.urlopen(server.url, timeout=60) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert parsed(answer.read().decode())["paceline_worker_samples_total", (("worker", "3"),)] == 16
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(server.url.replace("metrics", "etc"), timeout=60)
        assert refused.value.code == 404
        refused.value.close()
    finally:
        stalled.close()
        server.close()
    with pytest.raises(OSError, match=r"refused"):
        socket.create_connection((server.url.split("/")[2].split(":")[0], int(server.url.split(":")[2].split("/")[0])))


def test_connections_that_say_nothing_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "REQUEST_TIMEOUT_S", 1000.0)
    listening = listen("0")
    server = MetricsServer(listening, dict)
    try:
        silent = [socket.create_connection(listening.getsockname()[:2], 60) for _ in range(MAX_CONNECTIONS + 1)]
        assert silent[0].recv(1) == b""
        with urllib.request.urlopen(server.url, timeout=60) as answer:
            assert answer.status == 200
        for connection in silent:
            connection.close()
    finally:
        server.close()


def test_a_client_that_has_gone_away_is_not_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    server = MetricsServer(listen("0"), dict)
    try:
        raise ConnectionResetError
    except ConnectionResetError:
        server._server.handle_error(None, ("127.0.0.1", 1))
    finally:
        server.close()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("address", ["", "port", "70000", "-1", "127.0.0.1:", "1" * 5000])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(UsageError, match=r"--metrics is .*, expected a port"):
        listen(address)


def test_a_host_that_is_no_name_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--metrics \.a:80: .*; name another port"):
        listen(".a:80")


def test_a_port_that_is_taken_is_refused() -> None:
    with listen("0") as listening, pytest.raises(UsageError, match="in use; name another port"):
        listen(str(listening.getsockname()[1]))


def test_the_board_for_grafana_names_only_metrics_that_there_are() -> None:
    board = ROOT / "docs" / "grafana" / "paceline.json"
    queries = [
        target["expr"] for panel in json.loads(board.read_text())["panels"] for target in panel.get("targets", ())
    ]
    named = {name for query in queries for name in re.findall(r"paceline_\w+", query)}
    known = {metric.name for metric in METRICS if metric.kind != "histogram"}
    known |= {f"{metric.name}_bucket" for metric in METRICS if metric.kind == "histogram"}
    assert len(queries) >= 10
    assert named <= known
    assert Path(board).stat().st_size < 30_000
