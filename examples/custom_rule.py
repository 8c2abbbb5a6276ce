"""A table with an update rule of the user's own: the servers run `SignDescent` from `sign_rule.py`.

python examples/custom_rule.py
paceline run --workers 2 --servers 2 --consistency ssp:1 examples/custom_rule.py
"""

import torch

import paceline

target = torch.linspace(-1.0, 1.0, 8)

with paceline.connect() as ps:
    rule = paceline.update.rule("sign_rule:SignDescent", lr=0.01, decay=0.5)
    w = ps.table("w", shape=(8,), update=rule)
    for _ in range(150):
        w.push(w.pull() - target)  # the gradient of half the squared distance
        ps.clock()
    ps.barrier()
    if ps.rank == 0:
        furthest = (w.pull(exact=True) - target).abs().max().item()
        print(f"{ps.size} worker(s): at most {furthest:.3f} from the target")
