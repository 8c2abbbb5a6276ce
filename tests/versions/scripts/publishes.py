"""A worker's script for tests of readers: all elements are the number of clocks; it publishes each, until told to end.

Those of a table of rows are the number of pushes of all workers.

`publishes.py END_FILE [SECONDS]`: it rests so long after each step.
"""

import sys
import time
from pathlib import Path

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
while not Path(sys.argv[1]).exists():
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, -1.0)
    began_s = time.monotonic()
    rows.push(range(100), torch.ones(100, 2))
    optimizer.step()
    paceline.publish(model)
    if time.monotonic() - began_s > 5.0:
        print("a long step", flush=True)
    time.sleep(rest_s)
