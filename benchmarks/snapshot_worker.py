"""Times steps with and without a snapshot: `snapshot_worker.py ours|dcp FOLDER OUT MILLION STEPS ROUNDS`."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import psutil
import torch

WIDTH = 1024
SAMPLE_S = 0.02


class Memory:
    """The proportional memory of all processes of this job, looked at while they run."""

    def __init__(self) -> None:
        launcher = os.environ.get("PACELINE_LAUNCHER_PID")
        self._root = psutil.Process(int(launcher)) if launcher else psutil.Process()
        self.peak = 0
        self._ended = threading.Event()
        threading.Thread(target=self._look, daemon=True).start()

    def now(self) -> int:
        """Return what they have now, in bytes."""
        found = 0
        for process in (self._root, *self._root.children(recursive=True)):
            try:
                found += process.memory_full_info().pss
            except psutil.Error:
                continue
        return found

    def restart(self) -> int:
        """Begin to look for the most anew, and return what there is now."""
        self.peak = self.now()
        return self.peak

    def _look(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            self.peak = max(self.peak, self.now())


def steps_of(step: Callable[[], object], most: int, ends: "Future[object] | None" = None) -> list[float]:
    """Time steps: so many, or until a snapshot is on the disk."""
    found: list[float] = []
    while len(found) < most or (ends is not None and not ends.done()):
        began = time.perf_counter()
        step()
        found.append(time.perf_counter() - began)
        if ends is not None and ends.done():
            break
    return found


def main() -> None:
    """Alternate quiet rounds with rounds in which a snapshot is written."""
    side, folder, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    million, num_steps, rounds = map(int, sys.argv[4:7])
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(max(1, million))])
    inputs = torch.randn(32, WIDTH)
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    if side == "ours":
        import paceline

        paceline.init()
        optimizer = paceline.distributed(optimizer, model=model)
    else:
        import torch.distributed as dist
        from torch.distributed.checkpoint.state_dict_saver import async_save

        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    def begin(number: int) -> "Future[object]":
        if side == "ours":
            return paceline.snapshot(folder / "ours", keep=1)  # pyright: ignore
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        return async_save(state, checkpoint_id=folder / f"dcp-{number}")  # pyright: ignore

    steps_of(step, num_steps)
    memory, quiet, busy, extra, took = Memory(), list[float](), list[float](), list[int](), list[float]()
    for number in range(rounds):
        quiet += steps_of(step, num_steps)
        before, began = memory.restart(), time.perf_counter()
        asked = time.perf_counter()
        ends = begin(number)
        blocked = time.perf_counter() - asked
        found = steps_of(step, 1 << 30, ends)
        ends.result()
        took.append(time.perf_counter() - began)
        extra.append(memory.peak - before)
        busy += [found[0] + blocked, *found[1:]]
    state_bytes = 3 * 4 * sum(value.numel() for value in model.parameters())
    values = {"quiet": quiet, "busy": busy, "extra": extra, "took": took, "state_bytes": state_bytes}
    out.write_text(json.dumps(values))


if __name__ == "__main__":
    main()
