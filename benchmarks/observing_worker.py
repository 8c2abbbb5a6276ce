"""One worker of `benchmarks/observing.py`: trains a small model, and says what a step takes of processor and time."""

import json
import sys
import time
from pathlib import Path

import torch

import paceline


def main() -> None:
    """Train for so many steps, with or without values that are reported, and write down what they took."""
    num_steps, reports, folder = int(sys.argv[1]), sys.argv[2] == "on", Path(sys.argv[3])
    paceline.init()
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    optimizer = paceline.distributed(torch.optim.SGD(model.parameters(), lr=0.01), model=model)
    inputs = torch.randn(256, 512)
    for step in range(num_steps + 20):
        if step == 20:
            cpu_s, wall_s = time.process_time(), time.perf_counter()
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        if reports:
            paceline.report(loss=loss.item(), grad_norm=1.0, lr=0.01)
        else:
            loss.item()
        optimizer.step()
    took = {"cpu_s": (time.process_time() - cpu_s) / num_steps, "wall_s": (time.perf_counter() - wall_s) / num_steps}
    (folder / f"worker-{paceline.rank()}.json").write_text(json.dumps(took))


if __name__ == "__main__":
    main()
