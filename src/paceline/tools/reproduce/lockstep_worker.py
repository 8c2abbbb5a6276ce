"""One worker that pushes gradients which follow from its rank.

`paceline run -n 2 lockstep_worker.py -- STEPS SEED FILE`: worker 0 writes the values at the end.
`gradient` is what another program needs to compute the same alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from paceline.api.connect import connect
from paceline.update.named_rules import SGD

SIZE = 64
RATE = 0.125


def gradient(values: Tensor, worker: int, step: int, seed: int) -> Tensor:
    """Return the gradient of a logistic loss on a micro-batch that is drawn for this worker and step."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step * 64 + worker)
    inputs = torch.randn(16, SIZE, generator=generator)
    labels = (inputs[:, 0] > 0).float()
    return inputs.t() @ (torch.sigmoid(inputs @ values) - labels) / 16


def main(arguments: list[str]) -> int:
    """Train in step with the other workers."""
    steps, seed, path = int(arguments[0]), int(arguments[1]), Path(arguments[2])
    torch.set_num_threads(1)
    with connect() as session:
        table = session.table("weights", shape=(SIZE,), update=SGD(lr=RATE), consistency="bsp", scale="mean")
        for step in range(steps):
            table.push(gradient(table.pull(), session.rank, step, seed))
            session.clock()
        session.barrier()
        if session.rank == 0:
            np.save(path, table.pull().numpy())
        session.barrier()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
