"""A worker's script for tests of lost servers: trains without end, and saves its model when a call fails.

`saver.py FOLDER [PATIENCE_S]`: with a patience, calls wait no longer for a server that is silent, and worker 1 saves
only when it has been told to leave meanwhile.
"""

import os
import sys

import torch
from torch import nn

import paceline
from paceline.errors import PeerError

folder, patience_s = sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
ps = paceline.init()
optimizer = paceline.distributed(torch.optim.SGD(model.parameters(), lr=0.01), model=model, views=ps.rank == 0)


def say(*words: object) -> None:
    """Write a line as a whole."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


step = 0
try:
    while True:
        optimizer.zero_grad()
        model(torch.randn(32, 64)).square().mean().backward()
        optimizer.step()
        step += 1
        if step == 5:
            ps.node.waits.timeout_s = patience_s or 600.0
            say("going", os.getpid())
except PeerError as error:
    say("caught", type(error).__name__, error)
    while patience_s and ps.rank == 1 and not paceline.preempted():
        pass
    torch.save(model.state_dict(), f"{folder}/model-{ps.rank}.pt")
    say("saved after", step, "steps")
    raise
