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
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import torch
from pictures import COLOURS, check_matplotlib, make_quiet, new_picture
from torch import Tensor, nn

import paceline

NUM_POLES, NUM_STEPS = 16, 100  # that an actor balances at once, and for how long at most
DISCOUNT, STEP_S, FORCE, LENGTH, GRAVITY, POLE, CART = 0.98, 0.02, 10.0, 0.5, 9.8, 0.1, 1.0
PER_VERSION = 2  # samples that the learner makes one version from


class Poles:
    """Carts with poles on them: (carts, position, speed, angle and its speed). A pole that has fallen stays down."""

    def __init__(self, num: int) -> None:
        self.state = 0.1 * torch.rand(num, 4) - 0.05
        self.up = torch.ones(num, dtype=torch.bool)

    def push(self, right: Tensor) -> Tensor:
        """Push each cart to one side for a moment; return 1 for each pole that still stands."""
        _, speed, angle, turning = self.state.unbind(1)
        total, moment = CART + POLE, POLE * LENGTH
        force = torch.where(right, FORCE, -FORCE)
        pushed = (force + moment * turning.square() * angle.sin()) / total
        falling = GRAVITY * angle.sin() - angle.cos() * pushed
        falling = falling / (LENGTH * (4 / 3 - POLE * angle.cos().square() / total))
        rates = torch.stack([speed, pushed - moment * falling * angle.cos() / total, turning, falling], 1)
        self.state = torch.where(self.up[:, None], self.state + STEP_S * rates, self.state)
        self.up = self.up & (self.state[:, 0].abs() < 2.4) & (self.state[:, 2].abs() < 0.21)
        return self.up.float()


@dataclass(frozen=True, slots=True)
class Sample:
    """What an actor did: (steps, poles) each, states with their 4 numbers; `odds` are log-probabilities as it acted."""

    ticket: object
    states: Tensor
    right: Tensor
    odds: Tensor
    rewards: Tensor


def make_policy() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))


@torch.no_grad()
def act(policy: nn.Module, ticket: object, wait_s: float) -> Sample:
    poles, done = Poles(NUM_POLES), list[tuple[Tensor, ...]]()
    for _ in range(NUM_STEPS):
        state = poles.state
        wanted = torch.distributions.Bernoulli(logits=policy(state).squeeze(1))
        right = wanted.sample()
        done.append((state, right, wanted.log_prob(right), poles.push(right.bool())))
    time.sleep(wait_s)  # as where an environment is another program, on another machine
    states, rights, odds, rewards = (torch.stack(column) for column in zip(*done, strict=True))
    return Sample(ticket, states, rights, odds, rewards)


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


def draw(path: Path, runs: list[dict[str, object]]) -> None:
    """Draw throughput and return against the bound, and how stale samples were."""
    figure = new_picture(14.0, 4.6)
    axes = figure.subplots(1, 3)
    names = ["none" if each["bound"] is None else str(each["bound"]) for each in runs]
    for panel, key, title in ((axes[0], "samples_per_s", "Samples a second"), (axes[1], "return", "Return at the end")):
        panel.bar(names, [each[key] for each in runs], color=COLOURS[0])
        panel.set_title(f"{title}, by the bound", loc="left")
        make_quiet(panel)
    for each, name, colour in zip(runs, names, COLOURS, strict=False):
        found = each["staleness"]
        assert isinstance(found, dict)
        total = sum(found.values())
        axes[2].plot(list(found), [num / total for num in found.values()], "o-", color=colour, label=f"bound {name}")
    axes[2].set_title("Share of samples by staleness", loc="left")
    axes[2].legend(frameon=False)
    make_quiet(axes[2])
    figure.savefig(path)


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
