"""RestartDelays before restarts: they double, have an end, and begin anew after a life that went well."""

from paceline.launch.crash_policy import FIRST_PAUSE_S, HEALTHY_S, LONGEST_PAUSE_S, RestartDelays


def test_pauses_double_up_to_the_longest() -> None:
    pauses = RestartDelays()
    pauses.note_start("worker 0", 0.0)
    assert [pauses.after_crash("worker 0", 0.1) for _ in range(9)] == [0.5, 1, 2, 4, 8, 16, 30, 30, LONGEST_PAUSE_S]


def test_a_life_that_went_well_makes_the_next_pause_short() -> None:
    pauses = RestartDelays()
    pauses.note_start("worker 0", 0.0)
    for _ in range(5):
        pauses.after_crash("worker 0", 1.0)
    pauses.note_start("worker 0", 10.0)
    assert pauses.after_crash("worker 0", 10.0 + HEALTHY_S - 0.1) == 16.0
    pauses.note_start("worker 0", 100.0)
    assert pauses.after_crash("worker 0", 100.0 + HEALTHY_S) == FIRST_PAUSE_S


def test_processes_pause_by_themselves() -> None:
    pauses = RestartDelays()
    for name in ("worker 0", "worker 1"):
        pauses.note_start(name, 0.0)
    assert [pauses.after_crash(name, 0.0) for name in ("worker 0", "worker 0", "worker 1")] == [0.5, 1.0, 0.5]
