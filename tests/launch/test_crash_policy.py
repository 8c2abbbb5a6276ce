"""What the end of a worker means."""

import pytest

from paceline.launch.crash_policy import CrashDecision, CrashPolicy, describe_exit, shell_code


@pytest.mark.parametrize(
    ("crash_policy", "exit_code", "num_restarts", "decision"),
    [
        (CrashPolicy(), 0, 0, CrashDecision.CONTINUE),
        (CrashPolicy(on_crash="stop"), 0, 0, CrashDecision.CONTINUE),
        (CrashPolicy(), 1, 0, CrashDecision.STOP),
        (CrashPolicy(on_error="continue"), 1, 0, CrashDecision.CONTINUE),
        (CrashPolicy(on_crash="restart"), 1, 0, CrashDecision.STOP),
        (CrashPolicy(), -9, 0, CrashDecision.CONTINUE),
        (CrashPolicy(on_crash="stop"), -9, 0, CrashDecision.STOP),
        (CrashPolicy(on_crash="restart", max_restarts=2), -9, 1, CrashDecision.RESTART),
        (CrashPolicy(on_crash="restart", max_restarts=2), -9, 2, CrashDecision.STOP),
        (CrashPolicy(on_crash="restart", max_restarts=0), -9, 0, CrashDecision.STOP),
    ],
)
def test_decisions(crash_policy: CrashPolicy, exit_code: int, num_restarts: int, decision: CrashDecision) -> None:
    assert crash_policy.decide(exit_code, num_restarts) is decision


def test_ends_in_words_and_in_numbers() -> None:
    assert describe_exit(3) == "ended with exit code 3"
    assert describe_exit(-11) == "was killed by SIGSEGV"
    assert describe_exit(-40) == "was killed by signal 40"
    assert (shell_code(0), shell_code(3), shell_code(-15)) == (0, 3, 143)
