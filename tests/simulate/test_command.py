"""`paceline simulate`: what it prints, what it refuses, and that its numbers make sense."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from paceline.core.consistency import Consistency, asynchronous, bsp, essp, ssp
from paceline.errors import UsageError
from paceline.observe.runs import read_run
from paceline.observe.summary import summarize
from paceline.simulate.command import (
    FaultOptions,
    LineOptions,
    LossOptions,
    OutputOptions,
    ReadOptions,
    rehearse,
    simulate,
)
from paceline.simulate.scenario import Scenario, Stragglers

TRANSIENT = Scenario(num_clocks=150, stragglers=Stragglers("transient", share=0.1, factor=6), refresh=1.0)


def told(capsys: pytest.CaptureFixture[str], **options: object) -> dict[str, object]:
    assert simulate(**options, json=True) == 0  # type: ignore[arg-type]
    return json.loads(capsys.readouterr().out)


def under(scenario: Scenario, consistency: Consistency) -> Scenario:
    return replace(scenario, consistency=consistency)


def test_the_table_names_every_policy_and_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(clocks=20) == 0
    out = capsys.readouterr().out
    for text in ("bsp", "ssp:3", "essp:3", "asynchronous", "backup:1", "vs bsp", "1.00x", "clocks behind"):
        assert text in out
    assert "10% of the clocks take 4 times as long" in " ".join(out.split())


def test_of_one_worker_it_says_that_none_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(workers=1, clocks=5) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "1 worker, 5 clocks each" in out
    assert "One worker waits for no other" in out
    assert "slowest" not in out


def test_json_has_the_numbers_of_every_policy(capsys: pytest.CaptureFixture[str]) -> None:
    told_ = told(capsys, consistency=("ssp:2, bsp", "bound=1,visible=on_clock"), clocks=30, workers=3)
    rows = {row["consistency"]: row for row in told_["policies"]}  # type: ignore[attr-defined]
    assert list(rows) == ["ssp:2", "bsp", "bound=1,visible=on_clock,deliver=on_pull,backups=0"]
    assert rows["bsp"]["speedup_over_bsp"] == 1.0
    assert rows["bsp"]["differentials"] == {"-1": 90}
    assert len(rows["ssp:2"]["clocks_per_s_by_worker"]) == 3
    assert rows["ssp:2"]["max_lag_clocks"] <= 2


def test_a_loss_that_diverges_is_null_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    told_ = told(capsys, consistency=("bsp",), clocks=20, model=LossOptions(loss=True, rate=1e308))
    assert [row["loss"] for row in told_["policies"]] == [None]  # type: ignore[attr-defined]


def test_the_same_seed_gives_the_same_numbers_and_another_others(capsys: pytest.CaptureFixture[str]) -> None:
    first, again, other = (told(capsys, clocks=20, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first["policies"] != other["policies"]


def test_a_bound_absorbs_transient_stragglers() -> None:
    slow, fast = rehearse(TRANSIENT), rehearse(under(TRANSIENT, ssp(3)))
    assert fast.clocks_per_s > 1.2 * slow.clocks_per_s
    assert fast.wait_share < slow.wait_share
    assert fast.max_lag <= 3


def test_t34_no_bound_helps_against_a_persistent_straggler() -> None:
    persistent = Scenario(num_clocks=150, stragglers=Stragglers("persistent", factor=3))
    reference = rehearse(persistent).clocks_per_s
    assert rehearse(under(persistent, ssp(3))).clocks_per_s < 1.15 * reference
    assert rehearse(under(persistent, essp(8))).clocks_per_s < 1.15 * reference
    assert rehearse(under(persistent, asynchronous())).clocks_per_s > 2 * reference


def test_t8_the_differentials_count_every_read_and_stay_within_the_bound() -> None:
    outcome = rehearse(under(TRANSIENT, ssp(2)))
    assert sum(outcome.differentials.values()) == TRANSIENT.num_workers * TRANSIENT.num_clocks
    assert set(outcome.differentials) <= {-1, -2, -3}
    assert rehearse(under(TRANSIENT, bsp())).mean_lag == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "--workers is 0, expected 1 or more"),
        ({"servers": 0}, "--servers is 0"),
        ({"clocks": 0}, "--clocks is 0"),
        ({"compute_s": 0.0}, "--compute-s is 0.0"),
        ({"compute_s": float("nan")}, "--compute-s is nan"),
        ({"compute_s": 1e308}, "--compute-s is 1e+308"),
        ({"latency_s": -1.0}, "--latency-s is -1.0"),
        ({"latency_s": float("inf")}, "--latency-s is inf"),
        ({"stragglers": "persistent:inf"}, "unknown straggler model 'persistent:inf'"),
        ({"stragglers": "transient:0.1:inf"}, "unknown straggler model 'transient:0.1:inf'"),
        ({"lines": LineOptions(apply_s=1e308)}, "--apply-s is 1e+308"),
        ({"lines": LineOptions(bandwidth_mbit=1e-320)}, "--bandwidth-mbit is 1e-320"),
        ({"stragglers": "sometimes"}, "unknown straggler model 'sometimes'"),
        ({"stragglers": "transient:2:4"}, "unknown straggler model 'transient:2:4'"),
        ({"consistency": ("bsp,nope",)}, "unknown consistency 'nope'"),
        ({"consistency": ("bsp,backup:2",), "workers": 2}, "--consistency backup:2 leaves out 2 of 2 workers"),
        ({"read": ReadOptions(reads=0)}, "--reads is 0"),
        ({"lines": LineOptions(bandwidth_mbit=0.0)}, "--bandwidth-mbit is 0.0"),
        ({"lines": LineOptions(model_mb=float("nan"))}, "--model-mb is nan"),
        ({"lines": LineOptions(batch_s=-1.0)}, "--batch-s is -1.0"),
        ({"faults": FaultOptions(deaths=-1)}, "--deaths is -1"),
        ({"model": LossOptions(rate=0.0)}, "--rate is 0.0"),
        ({"clocks": 5, "out": OutputOptions(picture=Path("/nowhere/x.png"))}, "--picture /nowhere/x.png: No such file"),
        ({"clocks": 5, "out": OutputOptions(trace=Path("/dev/null"))}, "--trace /dev/null"),
    ],
)
def test_what_cannot_be_rehearsed_is_a_usage_error(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        simulate(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["none", "transient:0.25:3", "persistent:2"])
def test_every_straggler_model_is_explained(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    sentence = told(capsys, stragglers=text, clocks=20)["told"]
    assert "the clocks of bsp, on values" in str(sentence)


def test_it_starts_without_torch() -> None:
    code = (
        "import sys; from paceline.cli import answer; "
        "answer(['simulate', '--clocks', '5']); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_a_trace_of_a_rehearsal_says_what_its_outcome_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = told(
        capsys, clocks=40, servers=2, consistency=("ssp:2,bsp",), out=OutputOptions(trace=tmp_path), seed=3,
        model=LossOptions(loss=True), faults=FaultOptions(joins=1),
    )["policies"]  # fmt: skip
    assert {path.name for path in tmp_path.iterdir()} == {"ssp-2", "bsp"}
    for row in rows:  # type: ignore[attr-defined]
        run = read_run(tmp_path / row["consistency"].replace(":", "-"))
        found = summarize(run)
        assert {str(age): count for age, count in found.differentials.items()} == row["differentials"]
        assert found.seconds == pytest.approx(row["seconds"], rel=0.01)
        assert len(found.workers) == 5
        assert {record.event for record in run.memberships} == {"joined", "left"}
        assert found.loss_by_clock[-1].loss < found.loss_by_clock[0].loss
        assert found.wait_share_mean == pytest.approx(row["wait_share"], abs=0.1)


def test_an_older_trace_is_replaced(tmp_path: Path) -> None:
    for workers in (5, 2):
        simulate(clocks=5, workers=workers, consistency=("bsp",), out=OutputOptions(trace=tmp_path))
    assert len(summarize(read_run(tmp_path / "bsp")).workers) == 2


def test_a_picture_is_drawn_of_all_that_there_is(tmp_path: Path) -> None:
    plain, rich = tmp_path / "plain.png", tmp_path / "rich.png"
    simulate(clocks=5, consistency=("bsp",), out=OutputOptions(picture=plain))
    everything = LineOptions(bandwidth_mbit=100.0, model_mb=1.0, data_servers=1, batch_s=0.01, batch_mb=0.1)
    simulate(clocks=5, lines=everything, model=LossOptions(loss=True), out=OutputOptions(picture=rich))
    assert plain.read_bytes()[:4] == rich.read_bytes()[:4] == b"\x89PNG"
    assert len(rich.read_bytes()) > len(plain.read_bytes())


def test_the_table_has_columns_for_what_is_simulated_beside_workers(capsys: pytest.CaptureFixture[str]) -> None:
    simulate(clocks=5, consistency=("bsp",))
    assert "busiest line" not in capsys.readouterr().out
    resources = LineOptions(bandwidth_mbit=100.0, model_mb=1.0, data_servers=1, batch_s=0.01)
    simulate(clocks=5, lines=resources, model=LossOptions(loss=True), faults=FaultOptions(joins=1))
    out = capsys.readouterr().out
    for heading in ("waiting for batches", "busiest line", "refused", "loss"):
        assert heading in out


def test_lazy_reads_of_ssp_are_older_than_deliveries_of_essp(capsys: pytest.CaptureFixture[str]) -> None:
    lazy = told(
        capsys,
        consistency=("ssp:3,essp:3,asynchronous",),
        stragglers="none",
        clocks=60,
        read=ReadOptions(lazy=True, reads=10),
    )["policies"]
    ssp_, essp_, free = (row["mean_lag_clocks"] for row in lazy)  # type: ignore[attr-defined]
    assert ssp_ > 1.5 > 0.8 > essp_
    assert free < 1.5  # without a bound it fetches: else it would compute on the first values for ever
