"""A stage of a pipeline whose layer sleeps for each sample, forward and twice as long backward, and counts itself."""

import argparse
import json
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import mse_loss

import paceline

WIDTH = 256
BATCH_SIZE = 32


@dataclass
class Busy:
    """The seconds that this worker's layer has been at work."""

    seconds: float = 0.0

    def sleep(self, seconds: float) -> None:
        """Be at work for so long."""
        began_s = time.perf_counter()
        time.sleep(seconds)
        self.seconds += time.perf_counter() - began_s


class Sleep(torch.autograd.Function):
    """Passes values on after a sleep, and gradients after one of twice the length."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, busy: Busy, seconds: float) -> Tensor:  # noqa: ANN401 - torch's
        """Sleep."""
        ctx.busy, ctx.seconds = busy, seconds
        busy.sleep(seconds)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401 - torch's
        """Sleep twice as long."""
        ctx.busy.sleep(2 * ctx.seconds)
        return gradient, None, None


class SlowLayer(nn.Module):
    """A small layer that takes as long as a large one."""

    def __init__(self, busy: Busy, sample_s: float) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self._busy, self._sample_s = busy, sample_s

    def forward(self, values: Tensor) -> Tensor:
        """Return the values through the layer, late."""
        return Sleep.apply(torch.tanh(self.inner(values)), self._busy, self._sample_s * len(values))


@dataclass
class Kept:
    """Bytes that the graph keeps for backward: now, and at most so far. Parameters do not count."""

    parameters: set[int]
    now: int = 0
    most: int = 0

    def pack(self, tensor: Tensor) -> "Held":
        """Note a tensor that is kept."""
        return Held(self, tensor)


@dataclass
class Held:
    """One kept tensor; it counts until it is let go of."""

    kept: Kept
    tensor: Tensor
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        """Count it."""
        own = self.tensor.data_ptr() not in self.kept.parameters
        self.num_bytes = self.tensor.nbytes if own else 0
        self.kept.now += self.num_bytes
        self.kept.most = max(self.kept.most, self.kept.now)

    def __del__(self) -> None:
        """Count it no longer."""
        self.kept.now -= self.num_bytes


def main() -> None:
    """Time each number of micro-batches, and what each schedule keeps with the largest."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--micro-batches", type=json.loads, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--sample-ms", type=float, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ps = paceline.init()
    inputs, targets = torch.randn(BATCH_SIZE, WIDTH), torch.randn(BATCH_SIZE, WIDTH)
    for num in options.micro_batches:
        for schedule in ("gpipe", "1f1b"):
            if schedule == "1f1b" and num < ps.size:
                continue
            busy = Busy()
            layers = [SlowLayer(busy, options.sample_ms / 1000) for _ in range(ps.size)]
            model = paceline.parallelize(
                nn.Sequential(*layers), loss=mse_loss, pipeline=ps.size, schedule=schedule, micro_batches=num
            )
            model.forward_backward(inputs, targets)
            busy.seconds = 0.0
            ps.barrier()
            began_s = time.perf_counter()
            for _ in range(options.steps):
                model.forward_backward(inputs, targets)
            ps.barrier()
            wall_s, busy_s = time.perf_counter() - began_s, busy.seconds
            kept = Kept({parameter.data_ptr() for parameter in model.parameters()})
            with saved_tensors_hooks(kept.pack, lambda held: held.tensor):
                model.forward_backward(inputs, targets)
            told = {"schedule": schedule, "micro_batches": num, "rank": ps.rank, "kept_bytes": kept.most}
            told |= {"step_s": wall_s / options.steps, "busy_s": busy_s / options.steps}
            print("found " + json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
