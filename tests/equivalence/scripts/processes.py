"""Runs loops of the equivalence suite as one worker, which is a process, and tells how each has ended."""

import json
import sys
from pathlib import Path

import torch
from tests.equivalence.cells import Cell
from tests.equivalence.running import STRATEGIES, compared

import paceline

asked = json.loads(Path(sys.argv[1]).read_text())
torch.set_num_threads(1)
session = paceline.init()
outcomes = compared(session, STRATEGIES[asked["strategy"]], [Cell(**cell) for cell in asked["cells"]])
print("outcomes " + json.dumps([vars(one) for one in outcomes]))
