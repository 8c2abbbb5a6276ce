"""A worker's script for tests that kill servers: every push leaves a mark of its own, and a model is trained beside.

`outlived.py CONSISTENCY NUM_CLOCKS`: at the end each worker prints the marks that are missing or there
twice, its longest step, and a digest of all values.
"""

import glob
import hashlib
import os
import sys
import time

import torch

import paceline

CONSISTENCY, NUM_CLOCKS = sys.argv[1], int(sys.argv[2])
CLOCKS_ALONE, PATIENCE_S = 16, 300.0
WIDTH = 1 << 14  # more than a chunk for each thread of an update


def say(*words: object) -> None:
    """Write a line as a whole."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def wait_repaired() -> None:
    """Block while a server has one copy alone (`struck.py`), so that there is something to kill after some clocks."""
    pattern = os.environ.get("STRUCK", "::").rsplit(":", 2)[0] + "-*.alone"
    deadline_s = time.monotonic() + PATIENCE_S
    while glob.glob(pattern):
        assert time.monotonic() < deadline_s, "no replica was made anew"
        time.sleep(0.02)


torch.set_num_threads(1)
with paceline.connect() as ps:
    rng = torch.Generator().manual_seed(ps.rank)
    marks = ps.table(
        "marks", shape=(ps.size, NUM_CLOCKS, 8), update=paceline.update.Add(), consistency=CONSISTENCY, scale="sum"
    )
    rows = ps.table("rows", rows=ps.size, update=paceline.update.Add(), consistency=CONSISTENCY, scale="sum")
    model = ps.table(
        "model", shape=(WIDTH,), update=paceline.update.Adam(lr=0.01), consistency=CONSISTENCY, scale="mean", view=True
    )
    own = ps.table(
        "own", shape=(9,), update=paceline.update.rule("struck:Fading", lr=0.1), consistency=CONSISTENCY, scale="mean"
    )
    ids, worst_s, acks = torch.arange(NUM_CLOCKS) * 7919, 0.0, []
    for clock in range(NUM_CLOCKS):
        if clock % CLOCKS_ALONE == 0:
            wait_repaired()
            ps.barrier()  # no replica is made while a push waits for the clock of a worker that waits for the replica
        began_s = time.monotonic()
        mark, row = torch.zeros(ps.size, NUM_CLOCKS, 8), torch.zeros(1, ps.size)
        mark[ps.rank, clock] = row[0, ps.rank] = 1.0
        gradient = model.pull() * 0.1 + torch.randn(WIDTH, generator=rng)
        acks += [marks.push(mark), rows.push(ids[clock : clock + 1], row), model.push(gradient), own.push(gradient[:9])]
        ps.clock()
        seen = marks.pull()
        assert ((seen == 0) | (seen == 1)).all(), f"a push counts twice: {seen}"
        worst_s = max(worst_s, time.monotonic() - began_s)
        if clock in (2, NUM_CLOCKS // 2):
            say("at clock", clock)
    ps.barrier()
    exact = CONSISTENCY != "asynchronous"
    values, counts = marks.pull(exact=exact), rows.pull(ids, exact=exact)
    refused = sum(not ack.result(timeout=60).applied for ack in acks)
    lost, doubled = int((values != 1).sum() + (counts != 1).sum()), int((values > 1).sum() + (counts > 1).sum())
    content = b"".join(
        part.numpy().tobytes() for part in (values, counts, model.pull(exact=exact), own.pull(exact=exact))
    )
    say("ended", refused, lost, doubled, f"{worst_s:.3f}", hashlib.sha256(content).hexdigest())
