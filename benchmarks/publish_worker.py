"""The worker of `publish.py`: trains in rounds, with and without publishing, until the file that ends it is there.

`publish_worker.py FOLDER NUM_ROUNDS NUM_ELEMENTS`: publishes once, begins when the file `begin` is there, and writes
the times of its steps, the processor time of the job in both kinds of rounds, and when it published what.
"""

import json
import os
import sys
import time
from pathlib import Path

import psutil
import torch

import paceline
from paceline.api.session import Session
from paceline.job.environment import LAUNCHER

STEPS_PER_ROUND, STEPS_PER_VERSION = 20, 10


def spent_s() -> float:
    """Return the processor time of all processes of this job so far."""
    launcher = psutil.Process(int(os.environ[LAUNCHER]))
    return sum(sum(each.cpu_times()[:2]) for each in (launcher, *launcher.children(recursive=True)))


def publish_sparse(ps: Session, num_elements: int) -> None:
    """Publish two versions of a table, between which one element of a hundred changes."""
    table = ps.table("sparse", shape=(num_elements,), update=paceline.update.Add(), dtype="bfloat16")
    for share in (1.0, 0.01):
        table.push((torch.rand(num_elements) < share) * torch.randn(num_elements))
        ps.clock()
        made = paceline.publish(table, name="sparse", keep=2)
        assert made is not None
        made.wait()


def main() -> None:
    """Train, and write what it took."""
    folder, num_rounds, num_elements = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    with paceline.connect() as ps:
        paceline.init(ps)
        model = torch.nn.Linear(num_elements // 1024, 1024, bias=False)
        optimizer = paceline.distributed(torch.optim.SGD(model.parameters(), lr=0.01), model=model)
        samples = torch.randn(64, model.in_features)
        publish_sparse(ps, num_elements)
        model(samples).square().mean().backward()
        optimizer.step()
        paceline.publish(model)
        while not (folder / "begin").exists():
            time.sleep(0.05)
        taken: dict[str, list[float]] = {"quiet": [], "publishing": []}
        spent = dict.fromkeys(taken, 0.0)
        published: dict[int, float] = {}
        for number in range(2 * num_rounds):
            kind = "publishing" if number % 2 else "quiet"
            spent_before_s, began_s = spent_s(), time.perf_counter()
            for step in range(STEPS_PER_ROUND):
                optimizer.zero_grad()
                model(samples).square().mean().backward()
                optimizer.step()
                if kind == "publishing" and step % STEPS_PER_VERSION == 0:
                    published[ps.node.clock] = time.monotonic()
                    paceline.publish(model)
            taken[kind].append((time.perf_counter() - began_s) / STEPS_PER_ROUND)
            spent[kind] += spent_s() - spent_before_s
        (folder / "written").write_text(json.dumps({"taken": taken, "spent": spent, "published": published}))
        (folder / "written").rename(folder / "steps.json")
        while not (folder / "end").exists():
            time.sleep(0.05)


if __name__ == "__main__":
    main()
