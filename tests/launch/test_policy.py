"""What the end of a worker means."""

import pytest

from paceline.launch.policy import CrashDecision, Policy, describe_exit, shell_code


@pytest.mark.parametrize(
    ("policy", "exit_code", "num_restarts", "decision"),
    [
        (Policy(), 0, 0, CrashDecision.CONTINUE),
        (Policy(on_crash="stop"), 0, 0, CrashDecision.CONTINUE),
        (Policy(), 1, 0, CrashDecision.STOP),
        (Policy(on_error="continue"), 1, 0, CrashDecision.CONTINUE),
        (Policy(on_crash="restart"), 1, 0, CrashDecision.STOP),
        (Policy(), -9, 0, CrashDecision.CONTINUE),
        (Policy(on_crash="stop"), -9, 0, CrashDecision.STOP),
        (Policy(on_crash="restart", max_restarts=2), -9, 1, CrashDecision.RESTART),
        (Policy(on_crash="restart", max_restarts=2), -9, 2, CrashDecision.STOP),
        (Policy(on_crash="restart", max_restarts=0), -9, 0, CrashDecision.STOP),
    ],
)
def test_decisions(policy: Policy, exit_code: int, num_restarts: int, decision: CrashDecision) -> None:
    assert policy.decide(exit_code, num_restarts) is decision


def test_ends_in_words_and_in_numbers() -> None:
    assert describe_exit(3) == "ended with exit code 3"
    assert describe_exit(-11) == "was killed by SIGSEGV"
    assert describe_exit(-40) == "was killed by signal 40"
    assert (shell_code(0), shell_code(3), shell_code(-15)) == (0, 3, 143)
