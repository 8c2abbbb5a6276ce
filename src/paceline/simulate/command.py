"""`paceline simulate`: try policies on virtual time; prints speed, waiting time and staleness."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import Parameter
from msgspec import json as as_json  # which has null for what is not finite
from msgspec.structs import replace

from paceline.core.consistency import Consistency, bsp
from paceline.core.settings import LEASE_S
from paceline.errors import UsageError
from paceline.observe.text_tables import print_tables
from paceline.simulate.outcome import Outcome, rehearse
from paceline.simulate.scenario import DataServers, Faults, Network, Scenario, SimulatedLines, Stragglers, under_policy

if TYPE_CHECKING:
    from rich.table import Table

_DEFAULT_POLICIES = ("bsp", "ssp:3", "essp:3", "asynchronous", "backup:1")
_MB = 1e6  # bytes
_MBIT = 1e6 / 8  # bytes a second
_LEAST_S, _LEAST_MBIT = 1e-9, 1e-6
_MOST = 1e9  # seconds, megabytes, and megabits a second: what is added up stays a number
_SPREAD = 0.1  # compute times vary by this share around their mean


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """Reads.

    Parameters
    ----------
    lazy
        Fetch only when the bound asks for it, as the papers on ssp do; without a bound, once in a clock. Default: in
        every read, but under essp only what servers have not sent.
    reads
        Reads of a worker in a clock, spread over its computation.
    """

    lazy: Annotated[bool, Parameter(negative="")] = False
    reads: int = 1


@dataclass(frozen=True, kw_only=True)
class LineOptions:
    """Lines and servers.

    Parameters
    ----------
    bandwidth_mbit
        Megabits a second of the line of each worker, server and data server, in each direction. Default: unlimited.
    model_mb
        Megabytes of a push, and of the values of a read; all servers together have them.
    handle_s
        Seconds that a server takes for a message.
    apply_s
        Seconds that a server takes to apply a push.
    data_servers
        Number of data servers, which make batches for the workers.
    batch_s
        Seconds that a data server takes for a batch.
    batch_mb
        Megabytes of a batch.
    """

    bandwidth_mbit: float | None = None
    model_mb: float = 0.0
    handle_s: float = 0.0
    apply_s: float = 0.0
    data_servers: int = 0
    batch_s: float = 0.0
    batch_mb: float = 0.0


@dataclass(frozen=True, kw_only=True)
class FaultOptions:
    """Workers that come and go.

    Parameters
    ----------
    deaths
        Number of workers that are killed, at random times.
    restart_s
        Seconds after which a killed worker runs again. Default: never.
    lease_s
        Seconds after which servers go on without a worker whose connection is gone.
    joins
        Number of workers that join later.
    leaves
        Number of workers that leave before their last clock.
    """

    deaths: int = 0
    restart_s: float | None = None
    lease_s: float = LEASE_S
    joins: int = 0
    leaves: int = 0


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """The model that is trained.

    Parameters
    ----------
    loss
        Train a quadratic loss, on the values that workers read, and say how far each policy came.
    rate
        Learning rate of the mean gradient of a clock.
    """

    loss: Annotated[bool, Parameter(negative="")] = False
    rate: float = 0.4


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Files.

    Parameters
    ----------
    picture
        Draw the outcome to this file: staleness, time, lines, and the loss.
    trace
        Write a trace of each policy to a folder in this one, for `paceline report` and `paceline trace`.
    """

    picture: Path | None = None
    trace: Path | None = None


def simulate(
    *,
    consistency: Annotated[tuple[str, ...], Parameter(negative="")] = _DEFAULT_POLICIES,
    workers: int = 4,
    servers: int = 1,
    clocks: int = 200,
    stragglers: str = "transient:0.1:4",
    compute_s: float = 0.05,
    latency_s: float = 0.0005,
    seed: int = 0,
    json: Annotated[bool, Parameter(negative="")] = False,
    read: Annotated[ReadOptions, Parameter(name="*")] = ReadOptions(),
    lines: Annotated[LineOptions, Parameter(name="*")] = LineOptions(),
    faults: Annotated[FaultOptions, Parameter(name="*")] = FaultOptions(),
    model: Annotated[LossOptions, Parameter(name="*")] = LossOptions(),
    out: Annotated[OutputOptions, Parameter(name="*")] = OutputOptions(),
) -> int:
    """Rehearse policies on virtual time: the real protocol, with simulated computation and network.

    Prints for each policy the clocks a second, the share of time that workers wait, and the age of the values that they
    compute on. With --loss they train a small model on these values.

    Parameters
    ----------
    consistency
        bsp, ssp:S, essp:S, asynchronous, backup:B or adaptive:L:S, separated by commas or given several times. A policy
        may also be given by its axes, on its own: bound=2,visible=on_clock.
    workers
        Number of workers.
    servers
        Number of servers.
    clocks
        Number of clocks of each worker.
    stragglers
        none, transient:SHARE:FACTOR (that share of all clocks takes so many times as long) or persistent:FACTOR
        (worker 0 is always slow).
    compute_s
        Seconds of computation of a clock, within a tenth.
    latency_s
        Seconds that a message takes, within a half.
    seed
        Seed of all random numbers; equal seeds give equal results.
    json
        Print one JSON object instead of a table.
    read
        How workers read.
    lines
        Lines between processes, and the time that servers take.
    faults
        Workers that die, join and leave.
    model
        What is trained.
    out
        Pictures and traces.
    """
    base = _scenario(workers, servers, clocks, Stragglers.parse(stragglers), compute_s, latency_s, seed)
    scenario = _with_options(base, read, lines, faults, model)
    wanted = _policies(consistency)
    _require_a_worker(wanted, workers + faults.joins)
    keeps = out.trace is not None
    reference = rehearse(under_policy(scenario, bsp(), lazy=read.lazy), keeps_happenings=keeps and bsp() in wanted)
    others = {policy: under_policy(scenario, policy, lazy=read.lazy) for policy in wanted if policy != bsp()}
    rehearsed = {policy: rehearse(other, keeps_happenings=keeps) for policy, other in others.items()}
    outcomes = [rehearsed.get(policy, reference) for policy in wanted]
    told = explain(scenario, reference, outcomes)
    if json:
        print(as_json.encode(_as_json(scenario, reference, outcomes, told)).decode())
    else:
        tables = _table(scenario, reference, outcomes), _table_of_resources(scenario, reference, outcomes)
        print_tables([table for table in tables if table is not None], told)
    _write_files(scenario, outcomes, out)
    return 0


def _write_files(scenario: Scenario, outcomes: Sequence[Outcome], out: OutputOptions) -> None:
    """Write the picture and the traces that are asked for, and say on stderr where they are."""
    if out.picture is not None:
        from paceline.simulate.picture import draw_outcomes

        write_picture(out.picture, draw_outcomes(scenario, outcomes))
        print(f"picture: {out.picture}", file=sys.stderr)
    if out.trace is not None:
        from paceline.simulate.recording import write_trace

        folders = [write_trace(outcome, out.trace) for outcome in outcomes]
        print(f"traces, for paceline report: {' '.join(map(str, folders))}", file=sys.stderr)


def write_picture(path: Path, png: bytes) -> None:
    """Write a picture; raise UsageError if that cannot be."""
    try:
        path.write_bytes(png)
    except OSError as error:
        raise UsageError(f"--picture {path}: {error.strerror}. Name a file in a folder that exists.") from error


def explain(scenario: Scenario, reference: Outcome, outcomes: Sequence[Outcome]) -> str:
    """Explain the numbers by the fastest policy: any if one worker is always slow, else a bounded one."""
    if scenario.num_workers == 1:
        return "One worker waits for no other, so there is nothing that a policy could hide: take two or more."
    stragglers = scenario.stragglers
    bounded = [outcome for outcome in outcomes if outcome.consistency.bound is not None]
    candidates = outcomes if stragglers.kind == "persistent" else bounded or outcomes
    best = max(candidates, key=lambda outcome: outcome.clocks_per_s)
    gain = best.clocks_per_s / reference.clocks_per_s
    example = (
        f"{best.consistency} finishes {gain:.2f} times the clocks of bsp, on values {best.mean_lag:.1f} clocks behind "
        f"on average and {best.max_lag} at most."
    )
    if stragglers.kind == "persistent":
        return (
            f"Worker 0 is always {stragglers.factor:g} times slower, so under any bound the others soon run at its "
            f"pace, and only policies that do not wait for it gain: {example}"
        )
    if stragglers.kind == "transient":
        return (
            f"{stragglers.share:.0%} of the clocks take {stragglers.factor:g} times as long, and bsp waits for the "
            f"slowest of {scenario.num_workers} workers in every one: {example}"
        )
    return f"All workers are equally fast, so there is little to wait for: {example}"


def _scenario(
    workers: int, servers: int, clocks: int, stragglers: Stragglers, compute_s: float, latency_s: float, seed: int
) -> Scenario:
    for name, value in (("--workers", workers), ("--servers", servers), ("--clocks", clocks)):
        if value < 1:
            raise UsageError(f"{name} is {value}, expected 1 or more.")
    if not _LEAST_S <= compute_s <= _MOST:
        raise UsageError(f"--compute-s is {compute_s}, expected {_LEAST_S:g} to {_MOST:g} seconds.")
    if not 0 <= latency_s <= _MOST:
        raise UsageError(f"--latency-s is {latency_s}, expected 0 to {_MOST:g} seconds.")
    return Scenario(
        bsp(),
        num_workers=workers,
        num_servers=servers,
        num_clocks=clocks,
        compute_s=(compute_s * (1 - _SPREAD), compute_s * (1 + _SPREAD)),
        stragglers=stragglers,
        network=Network(latency_s=(latency_s / 2, latency_s * 3 / 2)),
        retry_s=100 * (latency_s + compute_s * stragglers.factor),
        seed=seed,
    )


def _with_options(
    scenario: Scenario, read: ReadOptions, lines: LineOptions, faults: FaultOptions, model: LossOptions
) -> Scenario:
    """Return the scenario with reads, lines, faults and the model as asked."""
    _refuse_below_zero(lines, faults)
    if read.reads < 1:
        raise UsageError(f"--reads is {read.reads}, expected 1 or more.")
    if lines.bandwidth_mbit is not None and lines.bandwidth_mbit < _LEAST_MBIT:
        raise UsageError(f"--bandwidth-mbit is {lines.bandwidth_mbit}, expected {_LEAST_MBIT:g} or more.")
    if not 0 < model.rate < inf:
        raise UsageError(f"--rate is {model.rate}, expected more than 0.")
    size, rate = lines.model_mb * _MB, lines.bandwidth_mbit
    return replace(
        scenario,
        lines=SimulatedLines(
            inf if rate is None else rate * _MBIT, gradient_bytes=size, value_bytes=size, early=rate is not None
        ),
        data=DataServers(lines.data_servers, lines.batch_s, lines.batch_mb * _MB),
        fate=Faults(
            deaths=faults.deaths,
            restart=faults.restart_s is not None,
            restart_s=faults.restart_s or 0.0,
            joins=faults.joins,
            leaves=faults.leaves,
        ),
        lease_s=faults.lease_s,
        apply_s=lines.apply_s,
        handle_s=lines.handle_s,
        num_reads=read.reads,
        loss=model.loss,
        rate=model.rate,
    )


def _refuse_below_zero(*groups: LineOptions | FaultOptions) -> None:
    """Raise UsageError for an option below 0, beyond all machines, or that is not a number."""
    for group in groups:
        for option in fields(group):
            value = getattr(group, option.name)
            if value is not None and not 0 <= value <= _MOST:
                raise UsageError(f"--{option.name.replace('_', '-')} is {value}, expected 0 to {_MOST:g}.")


def _policies(texts: Iterable[str]) -> list[Consistency]:
    names = [name for text in texts for name in ([text] if "=" in text else text.split(","))]
    return list(dict.fromkeys(Consistency.parse(name) for name in names))


def _require_a_worker(wanted: Iterable[Consistency], workers: int) -> None:
    """Raise UsageError if a clock would wait for no worker. One worker alone may have any policy."""
    for policy in wanted:
        if policy.backups >= workers > 1:
            raise UsageError(
                f"--consistency {policy} leaves out {policy.backups} of {workers} workers, so that no clock waits for "
                f"any: expected at most {workers - 1}, or more --workers."
            )


def _table(scenario: Scenario, reference: Outcome, outcomes: Iterable[Outcome]) -> Table:
    workers = "1 worker" if scenario.num_workers == 1 else f"{scenario.num_workers} workers"
    title = f"{workers}, {scenario.num_clocks} clocks each, on virtual time"
    return _columns(_empty(title), _COLUMNS, reference, outcomes)


def _table_of_resources(scenario: Scenario, reference: Outcome, outcomes: Iterable[Outcome]) -> Table | None:
    """Return the table of what the scenario has beside workers and a network that costs nothing, None without any."""
    columns = [column for column in _RESOURCES if column.is_told(scenario)]
    return _columns(_empty(""), columns, reference, outcomes) if columns else None


def _empty(title: str) -> Table:
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("consistency", header_style="dim", overflow="fold")
    return table


def _columns(table: Table, columns: Sequence[_Column], reference: Outcome, outcomes: Iterable[Outcome]) -> Table:
    for column in columns:
        table.add_column(column.heading, justify="right", header_style="dim")
    for outcome in outcomes:
        table.add_row(str(outcome.consistency), *(column.text(outcome, reference) for column in columns))
    return table


class _Column(msgspec.Struct, frozen=True):
    """A column of the table: its heading, its text for an outcome beside bsp's, and whether the scenario has such."""

    heading: str
    text: Callable[[Outcome, Outcome], str]
    is_told: Callable[[Scenario], bool] = lambda _: True


_COLUMNS = (
    _Column("clocks/s", lambda outcome, _: f"{outcome.clocks_per_s:,.1f}"),
    _Column("per worker", lambda outcome, _: _span(outcome.clocks_per_s_by_worker)),
    _Column("vs bsp", lambda outcome, bsp_: f"{outcome.clocks_per_s / bsp_.clocks_per_s:.2f}x"),
    _Column("waiting", lambda outcome, _: f"{outcome.wait_share:.0%}"),
    _Column("clocks behind", lambda outcome, _: f"{outcome.mean_lag:.2f}"),
    _Column("at most", lambda outcome, _: f"{outcome.max_lag}"),
)
_RESOURCES = (
    _Column("waiting for batches", lambda outcome, _: f"{outcome.load_share:.0%}", lambda s: s.data.num_servers > 0),
    _Column("server busy", lambda outcome, _: f"{outcome.server_busy:.0%}", lambda s: s.apply_s + s.handle_s > 0),
    _Column(
        "busiest line",
        lambda outcome, _: f"{max(max(use.sending, use.receiving) for use in outcome.uses.values()):.0%}",
        lambda s: s.lines.bytes_per_s < inf,
    ),
    _Column("refused", lambda outcome, _: f"{outcome.num_refused}", lambda s: s.fate != Faults()),
    _Column("loss", lambda outcome, _: _in_digits(outcome.last_loss), lambda s: s.loss),
)


def _in_digits(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.4g}"


def _span(rates: tuple[float, ...]) -> str:
    low, high = f"{min(rates):,.1f}", f"{max(rates):,.1f}"
    return low if low == high else f"{low} .. {high}"


def _as_json(scenario: Scenario, reference: Outcome, outcomes: Iterable[Outcome], told: str) -> dict[str, object]:
    return {
        "workers": scenario.num_workers,
        "servers": scenario.num_servers,
        "clocks": scenario.num_clocks,
        "seed": scenario.seed,
        "policies": [
            {
                "consistency": str(outcome.consistency),
                "clocks_per_s": outcome.clocks_per_s,
                "clocks_per_s_by_worker": outcome.clocks_per_s_by_worker,
                "speedup_over_bsp": outcome.clocks_per_s / reference.clocks_per_s,
                "wait_share": outcome.wait_share,
                "mean_lag_clocks": outcome.mean_lag,
                "max_lag_clocks": outcome.max_lag,
                "differentials": outcome.differentials,
                "seconds": outcome.seconds,
                "load_share": outcome.load_share,
                "server_busy_share": outcome.server_busy,
                "lines": {
                    kind: {"sending_share": use.sending, "receiving_share": use.receiving, "sent_bytes": use.sent_bytes}
                    for kind, use in outcome.uses.items()
                },
                "loss": outcome.last_loss,
                "refused": outcome.num_refused,
                "deaths": outcome.num_deaths,
                "joined": outcome.num_joined,
                "left": outcome.num_left,
            }
            for outcome in outcomes
        ],
        "told": told,
    }
