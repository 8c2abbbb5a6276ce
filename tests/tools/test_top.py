"""`paceline top` refuses what it cannot do, in one line."""

from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.tools.top import top


@pytest.mark.parametrize("interval", [0.0, -1.0, float("nan"), float("inf")])
def test_an_interval_that_is_no_time_is_refused(interval: float, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--interval is .* s, expected more than 0 and at most 3600"):
        top(str(tmp_path), json=True, interval=interval)
