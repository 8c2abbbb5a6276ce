"""Actors balance poles with the newest policy that is published, a learner learns from what they did, behind a gate.

    python examples/actor_learner.py
    python examples/actor_learner.py --bounds 0,1,2,4,8,inf --versions 150 --picture gate.png

The gate bounds how many versions old a policy may be when the learner uses what was done with it. At 0 actors and
learner take turns; the larger the bound, the more they do at once, and the staler is what is learned from.
"""

from __future__ import annotations

import json
import threading
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from queue import SimpleQueue

import torch
from gate_picture import draw
from pictures import check_matplotlib
from poles import DISCOUNT, NUM_POLES, NUM_STEPS, Sample, act, make_policy
from torch import Tensor, nn

import paceline

PER_VERSION = 2  # samples that the learner makes one version from


def loss_of(policy: nn.Module, samples: list[Sample]) -> Tensor:
    """Return what makes good pushes likelier, weighed by how much likelier they are than when they were made."""
    losses = list[Tensor]()
    for sample in samples:
        returns = torch.zeros_like(sample.rewards)
        following = torch.zeros(NUM_POLES)
        for step in reversed(range(NUM_STEPS)):
            following = returns[step] = sample.rewards[step] + DISCOUNT * following
        stood = torch.cat([torch.ones(1, NUM_POLES), sample.rewards[:-1]])
        better = (returns - returns.mean(1, keepdim=True)) / (returns.std() + 1e-6)
        odds = torch.distributions.Bernoulli(logits=policy(sample.states).squeeze(2)).log_prob(sample.right)
        ratio = (odds - sample.odds).exp()
        gain = torch.minimum(ratio * better, ratio.clamp(0.8, 1.2) * better)
        losses.append(-(gain * stood).sum() / stood.sum())
    return torch.stack(losses).mean()


def run(bound: int | None, options: Namespace) -> dict[str, object]:
    """Learn for so many versions; return how it went."""
    with paceline.connect() as ps:
        paceline.init(ps)
        policy = make_policy()
        rule = torch.optim.Adam(policy.parameters(), lr=options.lr)
        optimizer = paceline.distributed(rule, model=policy)
        gate, samples, over = paceline.gate(bound, PER_VERSION), SimpleQueue[Sample](), threading.Event()
        paceline.publish(policy)

        def live() -> None:
            own = make_policy()
            with paceline.subscribe(ps) as reader, reader.into(own) as updates:
                while not over.is_set():
                    try:
                        (ticket,) = gate.admit(timeout_s=0.1)
                    except paceline.errors.DeadlineExceeded:
                        continue
                    updates.wait(ticket.version, timeout_s=60.0)
                    samples.put(act(own, ticket, options.wait_s))

        actors = [threading.Thread(target=live) for _ in range(options.actors)]
        scores, began_s = list[float](), time.monotonic()
        for actor in actors:
            actor.start()
        try:
            for _ in range(options.versions):
                batch = list[Sample]()
                while len(batch) < PER_VERSION or not gate.can_advance:
                    batch.append(samples.get(timeout=60.0))
                    gate.consume(batch[-1].ticket)
                optimizer.zero_grad()
                loss_of(policy, batch).backward()
                optimizer.step()
                paceline.publish(policy)
                gate.advance()
                scores += [sample.rewards.sum(0).mean().item() for sample in batch]
        finally:
            over.set()
            for actor in actors:
                actor.join(60.0)
        took_s = time.monotonic() - began_s
    tenth = max(1, len(scores) // 10)
    return {
        "bound": bound,
        "samples_per_s": len(scores) / took_s,
        "return": sum(scores[-tenth:]) / tenth,
        "scores": scores,
        "staleness": gate.histogram(),
    }


def main() -> None:
    options = parse()
    if options.picture:
        check_matplotlib()
    torch.set_num_threads(1)
    runs = list[dict[str, object]]()
    for text in options.bounds.split(","):
        found = run(None if text == "inf" else int(text), options)
        runs.append(found)
        print(
            f"bound {text:>3}: {found['samples_per_s']:.1f} samples/s, poles stand for {found['return']:.0f} of "
            f"{NUM_STEPS} steps, staleness {json.dumps(found['staleness'])}",
            flush=True,
        )
    if options.picture:
        draw(options.picture, runs)


def parse() -> Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--bounds", default="0,2,inf")
    parser.add_argument("--versions", type=int, default=60)
    parser.add_argument("--actors", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--wait-s", type=float, default=0.05)
    parser.add_argument("--picture", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
