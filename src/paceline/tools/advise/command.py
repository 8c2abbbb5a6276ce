"""`paceline advise`: rehearse a recorded run under other policies, servers and placements, and say what is faster."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from cyclopts import Parameter
from msgspec import json as as_json  # which has null for what is not finite
from msgspec.structs import replace

from paceline.core.consistency import Consistency
from paceline.errors import UsageError
from paceline.observe.text_tables import print_tables
from paceline.simulate.outcome import Outcome, rehearse
from paceline.simulate.scenario import Scenario, under_policy
from paceline.tools.advise.recorded import RecordedRun, read_recorded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

_POLICIES: Final = ("bsp", "ssp:1", "ssp:2", "ssp:3", "ssp:5", "ssp:8", "essp:3", "asynchronous")
_WITH_BACKUP: Final = "backup:1"  # from three workers on
_SERVERS: Final = (1, 2, 4, 8)
_MOST_SERVERS: Final = 10_000
_LEAST_GAIN: Final = 1.05  # less is not worth a change
_AS_FAST: Final = 1.03  # of what is nearly as fast, that with the freshest values is advised
_TRUSTED: Final = 0.15
_ONE_RATE: Final = (
    "Over tcp that rests on a line of one rate for each machine, which is found from the whole run: try it before you "
    "rely on it where machines differ, or share a line."
)
_BUSY: Final = 0.3  # from this share on, servers or lines may be what workers wait for


class Variant(msgspec.Struct, frozen=True):
    """Another way to do the recorded run, and its rehearsal."""

    consistency: Consistency
    num_servers: int
    is_beside: bool
    outcome: Outcome

    @property
    def clock_s(self) -> float:
        """Seconds of a clock of a worker, averaged over the workers."""
        return self.outcome.clock_s

    @property
    def servers(self) -> str:
        """How many servers it has, and where."""
        return f"{self.num_servers} beside workers" if self.is_beside else str(self.num_servers)


def advise(
    run: Path | None = None,
    /,
    *,
    consistency: str | None = None,
    beside: Annotated[bool, Parameter(negative="")] = False,
    policies: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    servers: Annotated[tuple[int, ...], Parameter(negative="")] = (),
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Say which consistency, number of servers and placement would have made a recorded run faster, and by how much.

    It rehearses the run in the simulator on the delays that were recorded: first as it was, which says how far to trust
    the rest, then with other policies and servers. How well a model learns from older values is not known from a trace:
    try what is advised, and look at the loss.

    Parameters
    ----------
    run
        Folder of the run (--run-dir of paceline run); by default the last one on this machine that was kept.
    consistency
        What the run had, if its script and not the launcher said so.
    beside
        The run had its servers on the machines of its workers, one each, and several machines.
    policies
        Policies to rehearse, separated by commas. Default: bsp, several bounds, and asynchronous.
    servers
        Numbers of servers to rehearse. Default: other numbers only where servers or lines were busy.
    json
        Print one JSON object instead of a table.
    """
    from paceline.launch.running import last_run

    recorded = read_recorded(last_run() if run is None else run, consistency, is_beside=beside)
    variants = _variants(recorded, _wanted(recorded, policies), _numbers_of_servers(recorded, servers))
    best = _best(recorded, variants)
    told = explain(recorded, best)
    if json:
        print(as_json.encode(_as_json(recorded, variants, best, told)).decode())
    else:
        print_tables([_table(recorded, variants)], told)
    return 0


def _wanted(recorded: RecordedRun, texts: Sequence[str]) -> list[Consistency]:
    """Return the policies to rehearse, with the recorded one."""
    named = [name for text in texts for name in ([text] if "=" in text else text.split(","))]
    usual = (*_POLICIES, _WITH_BACKUP) if recorded.scenario.num_workers > 2 else _POLICIES
    return list(dict.fromkeys([recorded.consistency, *map(Consistency.parse, named or usual)]))


def _numbers_of_servers(recorded: RecordedRun, numbers: Sequence[int]) -> list[int]:
    """Return the numbers of servers to rehearse, with the recorded one."""
    wrong = [number for number in numbers if not 1 <= number <= _MOST_SERVERS]
    if wrong:
        raise UsageError(f"--servers is {wrong[0]}, expected 1 to {_MOST_SERVERS}.")
    outcome, num_servers = recorded.rehearsed, recorded.scenario.num_servers
    busiest = max(outcome.server_busy, *(max(use.sending, use.receiving) for use in outcome.uses.values()))
    usual = _SERVERS if busiest >= _BUSY else ()
    return sorted({num_servers, *(numbers or usual)})


def _variants(recorded: RecordedRun, policies: Sequence[Consistency], numbers: Sequence[int]) -> list[Variant]:
    """Rehearse every policy as the run was otherwise; then, under the fastest and the recorded one, other servers."""
    scenario, own = recorded.scenario, recorded.scenario.num_servers
    was_beside = scenario.lines.beside
    found = [_variant(recorded, policy, own, is_beside=was_beside) for policy in policies]
    fastest = min(found, key=lambda variant: variant.clock_s).consistency
    has_lines = scenario.lines.bytes_per_s < inf
    for policy in dict.fromkeys((recorded.consistency, fastest)):
        for number in numbers:
            for is_beside in (False, True) if has_lines else (was_beside,):
                if number != own or is_beside != was_beside:
                    found.append(_variant(recorded, policy, number, is_beside=is_beside))
    return found


def advise_on(
    recorded: RecordedRun, policy: Consistency, num_servers: int | None = None, *, is_beside: bool | None = None
) -> Outcome:
    """Rehearse a recorded run under a policy, with other servers if these are given."""
    scenario = recorded.scenario
    number = scenario.num_servers if num_servers is None else num_servers
    return _variant(
        recorded, policy, number, is_beside=scenario.lines.beside if is_beside is None else is_beside
    ).outcome


def _variant(recorded: RecordedRun, policy: Consistency, num_servers: int, *, is_beside: bool) -> Variant:
    scenario = recorded.scenario
    is_same = num_servers == scenario.num_servers and is_beside == scenario.lines.beside
    is_recorded = policy == recorded.consistency and is_same
    if is_recorded:
        return Variant(policy, num_servers, is_beside, recorded.rehearsed)
    return Variant(policy, num_servers, is_beside, rehearse(_under(scenario, policy, num_servers, is_beside=is_beside)))


def _under(scenario: Scenario, policy: Consistency, num_servers: int, *, is_beside: bool) -> Scenario:
    """Return the scenario under a policy, with that many servers, each with its share of the work."""
    was_lazy = scenario.consistency.deliver == "on_pull" and scenario.refresh < 1
    return replace(
        under_policy(scenario, policy, lazy=was_lazy),
        num_servers=num_servers,
        apply_s=scenario.apply_s * scenario.num_servers / num_servers,
        lines=replace(scenario.lines, beside=is_beside),
    )


def _best(recorded: RecordedRun, variants: Sequence[Variant]) -> Variant | None:
    """Return the variant to advise: of those nearly as fast as the fastest the freshest; None if nothing gains."""
    fastest = min(variant.clock_s for variant in variants)
    near = [variant for variant in variants if variant.clock_s <= fastest * _AS_FAST]
    best = min(near, key=lambda one: (one.outcome.mean_lag, one.num_servers, one.is_beside))
    return best if recorded.rehearsed_clock_s >= _LEAST_GAIN * best.clock_s else None


def explain(recorded: RecordedRun, best: Variant | None) -> str:
    """Say what is advised, and how far to trust it."""
    as_it_was = (
        f"The run took {recorded.clock_s * 1e3:.1f} ms a clock under {recorded.consistency}; rehearsed as it was, "
        f"{recorded.rehearsed_clock_s * 1e3:.1f} ms ({recorded.error:+.0%})."
    )
    if abs(recorded.error) > _TRUSTED:
        as_it_was += " That is too far off to trust what follows: something slowed it down that its trace does not say."
    if best is None:
        return f"{as_it_was} Nothing that was rehearsed is {_LEAST_GAIN - 1:.0%} faster: leave it as it is."
    gain = recorded.rehearsed_clock_s / best.clock_s
    is_moved = best.is_beside != recorded.scenario.lines.beside or best.num_servers != recorded.scenario.num_servers
    place = " beside workers" if best.is_beside else ""
    servers = f" with {best.num_servers} servers{place}" if is_moved else ""
    age = f"values {best.outcome.mean_lag:.1f} clocks behind on average and {best.outcome.max_lag} at most"
    told = f"{as_it_was} {best.consistency}{servers} would make {gain:.2f} times the clocks, on {age}."
    return f"{told} {_ONE_RATE}" if is_moved and recorded.is_network else told


def _table(recorded: RecordedRun, variants: Sequence[Variant]) -> Table:
    from rich.table import Table

    scenario = recorded.scenario
    title = f"{scenario.num_workers} workers, {scenario.num_clocks} recorded clocks, on virtual time"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("consistency", header_style="dim", no_wrap=True)
    for heading in ("servers", "ms a clock", "gain", "waiting", "behind", "at most"):
        table.add_column(heading, justify="right", header_style="dim")
    for variant in variants:
        outcome = variant.outcome
        table.add_row(
            str(variant.consistency),
            variant.servers,
            f"{variant.clock_s * 1e3:.1f}",
            f"{recorded.rehearsed_clock_s / variant.clock_s:.2f}x",
            f"{outcome.wait_share:.0%}",
            f"{outcome.mean_lag:.2f}",
            str(outcome.max_lag),
        )
    return table


def _as_json(recorded: RecordedRun, variants: Sequence[Variant], best: Variant | None, told: str) -> dict[str, object]:
    return {
        "consistency": str(recorded.consistency),
        "workers": recorded.scenario.num_workers,
        "servers": recorded.scenario.num_servers,
        "clocks": recorded.scenario.num_clocks,
        "clock_s": recorded.clock_s,
        "rehearsed_clock_s": recorded.rehearsed_clock_s,
        "mean_lag_clocks": recorded.mean_lag,
        "wait_share": recorded.wait_share,
        "losses": recorded.losses,
        "line_bytes_per_s": None if recorded.scenario.lines.bytes_per_s == inf else recorded.scenario.lines.bytes_per_s,
        "variants": [_variant_json(variant) for variant in variants],
        "advised": None if best is None else _variant_json(best),
        "told": told,
    }


def _variant_json(variant: Variant) -> dict[str, object]:
    return {
        "consistency": str(variant.consistency),
        "servers": variant.num_servers,
        "beside_workers": variant.is_beside,
        "clock_s": variant.clock_s,
        "wait_share": variant.outcome.wait_share,
        "mean_lag_clocks": variant.outcome.mean_lag,
        "max_lag_clocks": variant.outcome.max_lag,
    }
