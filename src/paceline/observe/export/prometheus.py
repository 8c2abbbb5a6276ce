"""Metrics in the text format of Prometheus, and a small server that answers scrapes with them."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Final, final

from paceline.errors import UsageError
from paceline.observe.export.run_metrics import METRICS, STALENESS
from paceline.observe.http_server import REQUEST_TIMEOUT_S, BoundedHttpServer

if TYPE_CHECKING:
    from paceline.observe.export.run_metrics import Metric, RunMetrics

PATH: Final = "/metrics"
LOOPBACK: Final = "127.0.0.1"
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_MOST_LABEL: Final = 200  # characters
_MOST_DIGITS: Final = 5  # of a port

Sources = Mapping[tuple[tuple[str, str], ...], "RunMetrics"]


def exposition(sources: Sources) -> str:
    r"""Return the metrics of several runs as text; the key of each has labels that tell it from the others.

    >>> from paceline.observe.export.run_metrics import RunMetrics
    >>> from paceline.observe.trace import Step
    >>> metrics = RunMetrics()
    >>> metrics.add(Step(1.0, 0, 4, samples=32, loss=0.5, wait_s=0.0, step_s=0.25))
    >>> [line for line in exposition({(): metrics}).splitlines() if "samples" in line][-1]
    'paceline_worker_samples_total{worker="0"} 32'
    """
    lines: list[str] = []
    collected = {more: dict(metrics.collect()) for more, metrics in sources.items()}
    for metric in METRICS:
        told = [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}"]
        if metric is STALENESS:
            found = [line for more, metrics in sources.items() for line in _histogram(metrics, more)]
        else:
            found = [
                f"{metric.name}{_labels(metric, labels, more)} {_value(value)}"
                for more, series in collected.items()
                for labels, value in series[metric].items()
            ]
        lines += [*told, *found] if found else []
    return "".join(f"{line}\n" for line in lines)


def _histogram(metrics: RunMetrics, more: Iterable[tuple[str, str]]) -> list[str]:
    lines: list[str] = []
    for labels, seen in metrics.collect_staleness().items():
        below = 0
        for most, count in zip((*STALENESS.buckets, math.inf), seen.counts, strict=True):
            below += count
            bucket = (*more, ("le", _value(most)))
            lines.append(f"{STALENESS.name}_bucket{_labels(STALENESS, labels, bucket)} {below}")
        lines.append(f"{STALENESS.name}_sum{_labels(STALENESS, labels, more)} {_value(seen.total)}")
        lines.append(f"{STALENESS.name}_count{_labels(STALENESS, labels, more)} {below}")
    return lines


def _labels(metric: Metric, values: tuple[str, ...], more: Iterable[tuple[str, str]]) -> str:
    pairs = [*zip(metric.labels, values, strict=True), *more]
    named = ",".join(f'{name}="{value[:_MOST_LABEL].translate(_ESCAPES)}"' for name, value in pairs)
    return f"{{{named}}}" if named else ""


def _value(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def listen(address: str) -> socket.socket:
    """Return a socket that listens at `PORT` of this machine alone, or at `HOST:PORT`; port 0 takes a free one.

    Raises:
        UsageError: it is not a valid address, or cannot be bound.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]") or LOOPBACK
    if not (port.isascii() and port.isdecimal() and len(port) <= _MOST_DIGITS and int(port) < 1 << 16):
        raise UsageError(f"--metrics is {address[:60]!r}, expected a port, such as 9464, or HOST:PORT")
    try:
        return socket.create_server(
            (host, int(port)), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=16
        )
    except (OSError, UnicodeError) as error:  # the latter for a host whose parts are no names
        reason = str(getattr(error, "strerror", None) or error).partition(" (")[0]
        raise UsageError(f"--metrics {address}: {reason}; name another port") from error


def check_free(address: str) -> None:
    """Raise as `listen` does, for a process that is to listen later."""
    listen(address).close()


@final
class MetricsServer:
    """Answers scrapes, in a thread of its own, until it is closed. Readers that stall hold up no other.

    server = MetricsServer(listen("9464"), lambda: {(): metrics})
    """

    def __init__(self, listening: socket.socket, sources: Callable[[], Sources]) -> None:
        """Serve from now on what `sources` returns at each scrape; takes over the socket."""

        class Scrape(BaseHTTPRequestHandler):
            timeout = REQUEST_TIMEOUT_S

            def do_GET(self) -> None:
                if self.path.partition("?")[0] != PATH:
                    self.send_error(404, f"metrics are at {PATH}")
                    return
                body = exposition(sources()).encode()
                self.send_response(200)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Log nothing: scrapes come every few seconds."""

        self._server = BoundedHttpServer(("", 0), Scrape, listens=False)
        self._server.socket.close()
        self._server.socket = listening
        self._server.daemon_threads = True
        self._server.block_on_close = False
        host, port = listening.getsockname()[:2]
        self.url: Final = f"http://{f'[{host}]' if ':' in host else host}:{port}{PATH}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="paceline-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer no more."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
