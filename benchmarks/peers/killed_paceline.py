"""Paceline beside the others, its server is killed: `killed_paceline.py FOLDER CLOCKS`, started by `paceline run`."""

import sys

import torch
from kill_log import DECAY, LR, MOMENTUM, WIDTH, Log, noise

import paceline


def main() -> None:
    """Train for so many clocks; the server is found by its parent, as it knows nothing of this folder."""
    folder, num_clocks = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    with paceline.connect() as ps:
        log = Log(folder, ps.rank, is_target=False)
        update = paceline.update.SGD(lr=LR, momentum=MOMENTUM)
        model = ps.table("model", shape=(WIDTH,), update=update, consistency="bsp", scale="mean")
        values = model.pull()
        for clock in range(num_clocks):
            model.push(values * DECAY + noise(ps.rank, clock))
            ps.clock()
            values = model.pull()
            log.step(clock)
        log.end(values.numpy())
        ps.barrier()


if __name__ == "__main__":
    main()
