"""`paceline top` refuses what it cannot do, in one line."""

from pathlib import Path

import pytest

from paceline import cli
from paceline.errors import UsageError
from paceline.tools.top import top


@pytest.mark.parametrize("interval", [0.0, -1.0, float("nan"), float("inf")])
def test_an_interval_that_is_no_time_is_refused(interval: float, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--interval is .* s, expected more than 0 and at most 3600"):
        top(str(tmp_path), json=True, interval=interval)


@pytest.mark.parametrize("options", [["--once"], ["--once", "--json"], []])
def test_records_that_cannot_be_read_are_no_healthy_job(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / "worker-0.jsonl").write_text("this is no record\n")
    assert cli.answer(["top", *options, str(tmp_path)]) == 2
    assert "worker-0.jsonl is not a trace of this version of paceline" in capsys.readouterr().err
