"""Trains in lockstep, calling the others each time, until a file appears; once under way, waits may take 5 seconds."""

import sys
from pathlib import Path

import torch

import paceline

ps = paceline.init()
table = ps.table("w", shape=(2,), update=paceline.update.Add(), scale="sum", consistency="bsp")
goes_on, clocks = True, 0
while goes_on:
    table.push([1.0, 1.0])
    clocks = ps.clock()
    assert table.pull().tolist() == [2.0 * clocks] * 2
    goes_on = bool(paceline.all_reduce(torch.tensor([float(not Path(sys.argv[1]).exists())]), op="min"))
    if clocks == 20:
        paceline.init(timeout_s=5.0)
        print("under way", flush=True)
print("went on", flush=True)
