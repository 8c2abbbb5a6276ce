"""Records of a made-up run under bsp, from how long each part of a clock takes."""

from collections.abc import Callable, Mapping

from paceline.observe.trace import (
    AppliedRecord,
    ArrivedRecord,
    MinClock,
    ReadRecord,
    Resources,
    Sampled,
    Serving,
    Step,
    TraceRecord,
)
from paceline.observe.window import Window

OWN_S = 0.05
NUM_CLOCKS = 14


def usual(_worker: int, _clock: int) -> float:
    """Return 0."""
    return 0.0


def story(
    num_workers: int = 3,
    num_clocks: int = NUM_CLOCKS,
    *,
    more: Callable[[int, int], float] = usual,
    load: Callable[[int, int], float] = usual,
    up: Callable[[int, int], float] = usual,
    down: Callable[[int, int], float] = usual,
    apply_s: float = 0.001,
    busy: float = 0.05,
    used: Callable[[int, int], Mapping[str, float]] = lambda _worker, _clock: {},
    hot_rows: tuple[tuple[str, int, float], ...] = (),
) -> list[TraceRecord]:
    """Return the records of a run; the functions say what a worker takes in a clock beyond the usual, in seconds."""
    records: list[TraceRecord] = []
    began = dict.fromkeys(range(num_workers), 100.0)
    waited = dict.fromkeys(range(num_workers), 0.0)
    for clock in range(num_clocks):
        ready: dict[int, float] = {}
        for worker in range(num_workers):
            took_s = OWN_S + more(worker, clock) + load(worker, clock)
            ready[worker] = began[worker] + waited[worker] + took_s
            records.append(
                Step(
                    ready[worker], worker, clock, 8, 1.0, waited[worker], waited[worker] + took_s, waited[worker],
                    load(worker, clock),
                )
            )  # fmt: skip
            records.append(
                sampled("worker", worker, ready[worker], clock, {"cpu_s": took_s} | dict(used(worker, clock)))
            )
        came = {worker: at + 0.0005 + up(worker, clock) for worker, at in ready.items()}
        records += [ArrivedRecord(at, 0, worker, clock) for worker, at in came.items()]
        applied_t = max(came.values()) + apply_s
        records.append(AppliedRecord(applied_t, 0, "w", tuple(range(num_workers)), clock + 1, apply_s))
        records.append(MinClock(applied_t, 0, "w", clock + 1))
        records.append(Serving(applied_t, 0, applied_t - 100.0, busy * (applied_t - 100.0), 0, 0, 0, hot_rows))
        for worker, at in ready.items():
            read_t = applied_t + 0.0005 + down(worker, clock)
            waited[worker], began[worker] = read_t - at, at
            records.append(ReadRecord(read_t, worker, "w", clock + 1, clock + 1, read_t - at, "fetch"))
    return records


def sampled(role: str, rank: int, t: float, clock: int, used: Mapping[str, float]) -> Sampled:
    """Return a sample whose totals have grown by `used` in each clock."""
    each = {"cpu_s": 0.0, "delayed_s": 0.0, "gc_s": 0.0, "num_faults": 0} | dict(used)
    return Sampled(
        t,
        "worker" if role == "worker" else "server",
        rank,
        1000 + rank,
        each["cpu_s"] * clock,
        each["delayed_s"] * clock,
        each["gc_s"] * clock,
        int(each["num_faults"] * clock),
        int(each.get("num_resent", 0) * clock),
    )


def left(worker: int, t: float) -> Resources:
    """Return the last record of a worker."""
    return Resources(t, worker, 0, 0, 0)


def window_of(records: list[TraceRecord]) -> Window:
    """Return the window at the end of these records."""
    window = Window()
    for record in sorted(records, key=lambda record: record.t):
        window.add(record)
    return window
