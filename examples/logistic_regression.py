"""Logistic regression on the parameter server as such: a table, pull, push and clock, with numpy alone.

Run it alone, or as several workers:

    python examples/logistic_regression.py
    paceline run --workers 4 --servers 2 examples/logistic_regression.py
"""

import numpy as np

import paceline

NUM_FEATURES, NUM_SAMPLES, BATCH, NUM_CLOCKS = 20, 4000, 50, 150

rng = np.random.default_rng(0)
features = rng.normal(size=(NUM_SAMPLES, NUM_FEATURES)).astype(np.float32)
truth = rng.normal(size=NUM_FEATURES).astype(np.float32)
labels = (features @ truth > 0).astype(np.float32)

with paceline.connect() as ps:
    own = slice(ps.rank, None, ps.size)  # every size-th sample is this worker's
    mine, wanted = features[own], labels[own]
    w = ps.table("w", shape=(NUM_FEATURES,), update=paceline.update.Adagrad(lr=0.3), consistency=paceline.essp(2))

    for clock in range(NUM_CLOCKS):
        weights = w.pull(refresh=False).numpy()  # fresh within two clocks; the servers send new values by themselves
        batch = np.arange(clock * BATCH, (clock + 1) * BATCH) % len(mine)
        x, y = mine[batch], wanted[batch]
        predicted = 1 / (1 + np.exp(-x @ weights))
        w.push(x.T @ (predicted - y) / BATCH)  # a future; its push may still be under way
        ps.clock()

    ps.barrier()  # now all pushes of all workers are applied
    weights = w.pull(exact=True).numpy()
    if ps.rank == 0:
        accuracy = ((features @ weights > 0) == (labels > 0)).mean()
        print(f"{ps.size} worker(s): accuracy {accuracy:.3f}")
