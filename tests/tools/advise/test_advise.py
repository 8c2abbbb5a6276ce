"""`paceline advise`: what it predicts from a trace, beside what the simulator finds when it is asked directly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from paceline.core.consistency import Consistency, asynchronous, bsp, essp, ssp
from paceline.errors import UsageError
from paceline.job.spec import ClusterSpec
from paceline.simulate.outcome import Outcome, rehearse
from paceline.simulate.recording import write_trace
from paceline.simulate.scenario import Network, Scenario, SimulatedLines, Stragglers
from paceline.tools.advise.command import advise
from paceline.tools.advise.recorded import read_recorded

TRANSIENT = Scenario(
    num_servers=1,
    num_clocks=71,
    compute_s=(0.009, 0.011),
    stragglers=Stragglers("transient", 0.1, 4),
    network=Network(latency_s=(2e-4, 2e-4)),
    apply_s=1e-4,
)


def recorded_as(scenario: Scenario, folder: Path, transport: str = "shm") -> Path:
    """Rehearse a scenario and leave its trace as a run does; return the folder of that run."""
    run = write_trace(rehearse(scenario, keeps_happenings=True), folder)
    spec = ClusterSpec(
        job="1", num_workers=scenario.num_workers, num_servers=scenario.num_servers, run_dir=str(run),
        transport="tcp" if transport == "tcp" else "shm", consistency=str(scenario.consistency),
    )  # fmt: skip
    spec.write(run / "spec.json")
    return run


def advice(capsys: pytest.CaptureFixture[str], run: Path, **options: object) -> dict[str, object]:
    assert advise(run, json=True, **options) == 0  # type: ignore[arg-type]
    return json.loads(capsys.readouterr().out)


def truth(scenario: Scenario, policy: Consistency, **changes: object) -> Outcome:
    lazy = policy.deliver == "on_clock"
    return rehearse(replace(scenario, consistency=policy, refresh=0.0 if lazy else 1.0, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("ran", [bsp(), ssp(3), asynchronous()])
def test_what_another_policy_takes_is_found_from_the_trace_of_one(
    ran: Consistency, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = advice(capsys, recorded_as(replace(TRANSIENT, consistency=ran), tmp_path))
    assert found["rehearsed_clock_s"] == pytest.approx(found["clock_s"], rel=0.05)
    variants = {row["consistency"]: row for row in found["variants"]}  # type: ignore[attr-defined]
    for policy in (bsp(), ssp(1), ssp(3), essp(3), asynchronous()):
        real = truth(TRANSIENT, policy)
        assert variants[str(policy)]["clock_s"] == pytest.approx(real.clock_s, rel=0.07), policy
        assert variants[str(policy)]["mean_lag_clocks"] == pytest.approx(real.mean_lag, abs=0.6), policy


def test_a_bound_is_advised_against_transient_stragglers_and_then_nothing_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = advice(capsys, recorded_as(TRANSIENT, tmp_path))
    advised = found["advised"]
    assert isinstance(advised, dict)
    assert Consistency.parse(advised["consistency"]).bound != 0
    assert "times the clocks" in str(found["told"])
    again = advice(capsys, recorded_as(replace(TRANSIENT, consistency=ssp(8)), tmp_path))
    assert again["advised"] is None
    assert "leave it as it is" in str(again["told"])


def test_only_asynchronous_is_advised_against_a_worker_that_is_always_slow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    always = replace(TRANSIENT, stragglers=Stragglers("persistent", factor=4))
    found = advice(capsys, recorded_as(always, tmp_path))
    assert found["advised"]["consistency"] == "asynchronous"  # type: ignore[index]


def test_the_rate_of_a_line_is_found_and_more_servers_are_advised_for_a_full_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = SimulatedLines(125e6, gradient_bytes=1e6, value_bytes=1e6, early=True)
    full = replace(TRANSIENT, stragglers=Stragglers(), lines=lines, num_clocks=40)
    found = advice(capsys, recorded_as(full, tmp_path, "tcp"))
    assert found["line_bytes_per_s"] == pytest.approx(125e6, rel=0.1)
    rows = {(row["consistency"], row["servers"], row["beside_workers"]): row for row in found["variants"]}  # type: ignore[attr-defined]
    for number in (2, 4):
        for beside in (False, True):
            real = truth(full, bsp(), num_servers=number, lines=replace(lines, beside=beside), apply_s=1e-4 / number)
            assert rows["bsp", number, beside]["clock_s"] == pytest.approx(real.clock_s, rel=0.1)
    assert found["advised"]["servers"] > 1  # type: ignore[index]
    assert "rests on a line of one rate for each machine" in str(found["told"])


def test_the_table_says_what_is_rehearsed_and_how_near_it_comes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert advise(recorded_as(TRANSIENT, tmp_path), policies=("ssp:2",), servers=(3,)) == 0
    out = capsys.readouterr().out
    for text in ("ssp:2", "bsp", "ms a clock", "rehearsed as it was", "(+0%)"):
        assert text in " ".join(out.split()).replace("(-0%)", "(+0%)")
    assert "asynchronous" not in out


def test_a_policy_of_the_script_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = recorded_as(replace(TRANSIENT, consistency=ssp(3)), tmp_path)
    spec = ClusterSpec.read(run / "spec.json")
    replace(spec, consistency=None).write(run / "spec.json")
    assert read_recorded(run).consistency == bsp()
    assert advice(capsys, run, consistency="ssp:3")["consistency"] == "ssp:3"


def test_what_cannot_be_advised_on_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read the cluster spec"):
        advise(tmp_path)
    short = recorded_as(replace(TRANSIENT, num_clocks=5), tmp_path)
    with pytest.raises(UsageError, match=r"4 whole clocks of some worker, expected 10 or more"):
        advise(short)
    whole = recorded_as(replace(TRANSIENT, num_clocks=20), tmp_path)
    with pytest.raises(UsageError, match=r"--servers is 0, expected 1 to 10000"):
        advise(whole, servers=(0,))
    with pytest.raises(UsageError, match=r"--servers is 99999999, expected 1 to 10000"):
        advise(whole, servers=(99999999,))
    with pytest.raises(UsageError, match=r"unknown consistency 'fast'"):
        advise(whole, policies=("fast",))
    for path in (whole / "trace").glob("*.jsonl"):
        path.write_text("".join(line for line in path.read_text().splitlines(True) if '"kind":"read"' not in line))
    with pytest.raises(UsageError, match=r"no reads of dense tables"):
        advise(whole)
