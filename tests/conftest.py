"""What holds for all tests."""

import gc
import os
import signal
import sys

import pytest
from hypothesis import HealthCheck, settings

# An example may take any time, as other programs run here too; and two runs over one code find the same.
# `make campaign` draws more of them, and others each time, as does `pytest --hypothesis-profile search`.
settings.register_profile(
    "search",
    deadline=None,
    max_examples=500,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("suite", settings.get_profile("search"), derandomize=True, max_examples=40)
settings.load_profile("suite")

# Hundreds of processes start from here, and each would compile all that it imports.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Every process that a test starts overwrites memory that becomes free: a late look at it finds NaN.
os.environ["PACELINE_CHECK_MEMORY"] = "1"
os.environ["PACELINE_KEEP_RUNS"] = "0"  # in the home of the user

# A background shell ignores Ctrl-C, and `nohup` a hangup; so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True, scope="module")
def _leave_out_what_was_there_before() -> None:
    """Let tests that look for garbage look at what came since their module began: the rest is most of their time."""
    gc.collect()
    gc.freeze()
