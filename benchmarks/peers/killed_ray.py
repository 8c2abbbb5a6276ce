"""A parameter server as a Ray actor, which is killed and started again: `killed_ray.py FOLDER CLOCKS [tuned]`.

The actor begins anew, as Ray's documentation warns; tuned, it saves its state in every clock and begins from there, and
says from which clock on gradients are wanted.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import ray
import torch
from kill_log import DECAY, LR, MOMENTUM, NUM_WORKERS, TUNED, WIDTH, Log, Vector, add_target, noise


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)
class Server:
    """Holds the values; a step takes the gradients of all workers."""

    def __init__(self, folder: str, saves: bool) -> None:
        add_target(folder)
        self._saved = Path(folder) / "saved.pt" if saves else None
        self._values = torch.nn.Parameter(torch.zeros(WIDTH))
        self._optimizer = torch.optim.SGD([self._values], lr=LR, momentum=MOMENTUM)
        self._clock = 0
        if self._saved is not None and self._saved.exists():
            state = torch.load(self._saved)
            self._values.data.copy_(state["values"])
            self._optimizer.load_state_dict(state["optimizer"])
            self._clock = state["clock"]

    def pull(self) -> tuple[int, Vector]:
        """Return the clock that gradients are wanted for, and the values."""
        return self._clock, self._values.detach().numpy().copy()

    def step(self, clock: int, *gradients: Vector) -> int:
        """Take the gradients of a clock, unless it is another one's turn; return whose turn it is."""
        if clock == self._clock:
            self._values.grad = torch.from_numpy(np.mean(gradients, axis=0, dtype=np.float32))
            self._optimizer.step()
            self._clock += 1
            if self._saved is not None:
                state = {"values": self._values.data, "optimizer": self._optimizer.state_dict(), "clock": self._clock}
                torch.save(state, self._saved.with_suffix(".new"))
                self._saved.with_suffix(".new").replace(self._saved)
        return self._clock


@ray.remote(num_cpus=0)
class Worker:
    """Makes gradients."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def gradient(self, pulled: tuple[int, Vector]) -> Vector:
        """Return this worker's gradient at the values that were pulled."""
        clock, values = pulled
        return values * np.float32(DECAY) + np.float32(noise(self._rank, clock))


def main() -> None:
    """Start Ray on this machine alone, and train for so many clocks."""
    folder, num_clocks, saves = sys.argv[1], int(sys.argv[2]), TUNED in sys.argv[3:]
    log = Log(folder, 0, is_target=False)
    with tempfile.TemporaryDirectory(prefix="ray-") as place:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=place)
        try:
            server = Server.remote(folder, saves)
            workers = [Worker.remote(rank) for rank in range(NUM_WORKERS)]
            clock = 0
            while clock < num_clocks:
                pulled = server.pull.remote()
                now, _ = ray.get(pulled)
                clock = ray.get(server.step.remote(now, *(worker.gradient.remote(pulled) for worker in workers)))
                log.step(clock - 1)
            log.end(ray.get(server.pull.remote())[1])
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main()
