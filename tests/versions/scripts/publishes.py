"""A worker's script for tests of readers: all elements are the number of clocks; it publishes each, until told to end.

Those of a table of rows are the number of pushes of all workers.

`publishes.py END_FILE [SECONDS]`: it rests so long after each step. At the end it tells how long its steps took, and
how many of them were held up for longer than another step takes, with its rest.
"""

import sys
import time
from pathlib import Path
from statistics import median

import torch

import paceline

rest_s = float(sys.argv[2]) if len(sys.argv) > 2 else 0.002
paceline.init()
model = torch.nn.Linear(300, 400)
for parameter in model.parameters():
    torch.nn.init.zeros_(parameter)
rows = paceline.init().table("rows", rows=2, update=paceline.update.Add())
optimizer = paceline.distributed(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
paceline.publish(model)
took_s: list[float] = []
while not Path(sys.argv[1]).exists():
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, -1.0)
    began_s = time.monotonic()
    rows.push(range(100), torch.ones(100, 2))
    optimizer.step()
    paceline.publish(model)
    took_s.append(time.monotonic() - began_s)
    time.sleep(rest_s)
if took_s:
    usual_s = median(took_s)
    num_held_up = sum(each_s > 2 * usual_s + rest_s for each_s in took_s)
    print(f"{len(took_s)} steps of {usual_s:.4f} s, {num_held_up} held up, the longest {max(took_s):.4f} s", flush=True)
