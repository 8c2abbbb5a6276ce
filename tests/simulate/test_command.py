"""`paceline simulate`: what it prints, what it refuses, and that its numbers make sense."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from paceline.core.consistency import Consistency, asynchronous, bsp, essp, ssp
from paceline.errors import UsageError
from paceline.simulate.command import rehearse, simulate
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


def test_json_has_the_numbers_of_every_policy(capsys: pytest.CaptureFixture[str]) -> None:
    told_ = told(capsys, consistency=("ssp:2, bsp", "bound=1,visible=on_clock"), clocks=30, workers=3)
    rows = {row["consistency"]: row for row in told_["policies"]}  # type: ignore[attr-defined]
    assert list(rows) == ["ssp:2", "bsp", "bound=1,visible=on_clock,deliver=on_pull,backups=0"]
    assert rows["bsp"]["speedup_over_bsp"] == 1.0
    assert rows["bsp"]["differentials"] == {"-1": 90}
    assert len(rows["ssp:2"]["clocks_per_s_by_worker"]) == 3
    assert rows["ssp:2"]["max_lag_clocks"] <= 2


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
        ({"latency_s": -1.0}, "--latency-s is -1.0"),
        ({"stragglers": "sometimes"}, "unknown straggler model 'sometimes'"),
        ({"stragglers": "transient:2:4"}, "unknown straggler model 'transient:2:4'"),
        ({"consistency": ("bsp,nope",)}, "unknown consistency 'nope'"),
    ],
)
def test_what_cannot_be_rehearsed_is_a_usage_error(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("(", r"\(")):
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
