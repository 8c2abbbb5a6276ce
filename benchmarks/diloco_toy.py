"""Four workers of different speeds out of step, on virtual time: what the outer optimizer does to what they learn.

Simulated are time and the way between workers and servers: a step of a worker takes the seconds below, an exchange
none. Real are the training (AdamW on a perceptron, 32 clouds of points in four classes) and the update rules of the
servers, which are those that a job runs.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import paceline
from paceline.core.partition import Range
from paceline.training.flat import FlatParameters, segments_of
from paceline.update.named_rules import resolve
from paceline.update.rules import RuleSpec
from paceline.update.shard import Shard
from paceline.update.summing import Contribution
from paceline.update.table import TableSpec

STEP_S = (0.58, 0.75, 1.51, 3.33)  # of each worker, virtual
INNER_STEPS = 20
SIZE, NUM_CLOUDS, NUM_CLASSES, BATCH = 512, 32, 4, 32
INNER_LR = 2e-4


@dataclass(frozen=True, slots=True)
class Policy:
    """How pushes become updates: all workers in step, or each on its own."""

    rule: RuleSpec
    in_step: bool = False


POLICIES = {
    "in step, lr 0.7, momentum 0.9": Policy(paceline.update.SGD(0.7, 0.9, nesterov=True), in_step=True),
    "out of step, lr 0.7, momentum 0.9": Policy(paceline.update.SGD(0.7, 0.9, nesterov=True)),
    "out of step, lr 0.07, momentum 0.9": Policy(paceline.update.SGD(0.07, 0.9, nesterov=True)),
    "out of step, lr 0.7, no momentum": Policy(paceline.update.SGD(0.7)),
    "out of step, lr 0.7, momentum 0.9 delayed": Policy(paceline.update.DelayedNesterov(0.7, 0.9, every=len(STEP_S))),
}
NAIVE = "out of step, lr 0.7, momentum 0.9"


@dataclass(frozen=True, slots=True)
class Clouds:
    """Points around the centres of clouds; which class a cloud is of has no pattern."""

    centres: Tensor
    classes: Tensor

    @staticmethod
    def of(seed: int) -> "Clouds":
        """Lay the clouds out."""
        generator = torch.Generator().manual_seed(seed)
        centres = torch.randn(NUM_CLOUDS, SIZE, generator=generator)
        return Clouds(centres * 0.15, torch.randint(NUM_CLASSES, (NUM_CLOUDS,), generator=generator))

    def draw(self, num_points: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return points and their classes."""
        which = torch.randint(NUM_CLOUDS, (num_points,), generator=generator)
        return self.centres[which] + torch.randn(num_points, SIZE, generator=generator), self.classes[which]


@dataclass(slots=True)
class Learner:
    """One worker: its model and inner optimizer, and the values that it started its round from."""

    flat: FlatParameters
    model: nn.Module
    inner: torch.optim.Optimizer
    clouds: Clouds
    generator: torch.Generator
    start: Tensor = field(init=False)

    def take(self, values: Tensor) -> None:
        """Go on from the servers' values."""
        self.start = values.clone()
        self.flat.unpack(values)

    def learn(self) -> Tensor:
        """Take the inner steps of a round; return old values minus new ones."""
        for _ in range(INNER_STEPS):
            points, classes = self.clouds.draw(BATCH, self.generator)
            self.inner.zero_grad()
            cross_entropy(self.model(points), classes).backward()
            self.inner.step()
        reached = self.flat.empty()
        self.flat.pack_values(reached)
        return self.start - reached


@dataclass(slots=True)
class Curve:
    """Loss on points that no worker learned from, after so many rounds of all workers together."""

    rounds: list[int] = field(default_factory=list[int])
    seconds: list[float] = field(default_factory=list[float])
    losses: list[float] = field(default_factory=list[float])


def perceptron(hidden: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(SIZE, hidden), nn.ReLU(), nn.Linear(hidden, NUM_CLASSES))


def learner(hidden: int, seed: int, rank: int) -> Learner:
    model = perceptron(hidden, seed)
    inner = torch.optim.AdamW(model.parameters(), lr=INNER_LR)
    named, _ = segments_of(inner, model)
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return Learner(FlatParameters.over(named), model, inner, Clouds.of(seed), generator)


def arrivals(*, in_step: bool) -> Iterator[tuple[float, list[int]]]:
    """Say when which workers have ended a round, in virtual seconds: all, or one at a time."""
    if in_step:
        while True:
            yield INNER_STEPS * max(STEP_S), list(range(len(STEP_S)))
    due = [(INNER_STEPS * each, rank) for rank, each in enumerate(STEP_S)]
    heapq.heapify(due)
    before = 0.0
    while True:
        now, rank = heapq.heappop(due)
        yield now - before, [rank]
        before = now
        heapq.heappush(due, (now + INNER_STEPS * STEP_S[rank], rank))


def run(policy: Policy, seed: int, *, hidden: int, num_rounds: int) -> Curve:
    """Train until the workers have ended so many rounds together, so that all policies learn from as many points."""
    learners = [learner(hidden, seed, rank) for rank in range(len(STEP_S))]
    _, segments = segments_of(learners[0].inner, learners[0].model)
    table = TableSpec("toy", segments, "float32", policy.rule, "asynchronous", "mean", "reject")
    shard = Shard(table, Range(0, 0, table.numel), rule=resolve(table.rule, None))
    first = learners[0].flat.empty()
    learners[0].flat.pack_values(first)
    shard.store(first)
    for each in learners:
        each.take(first)
    held_out = learners[0].clouds.draw(2000, torch.Generator().manual_seed(seed + 7777))
    judge, curve, done, now = learner(hidden, seed, 0), Curve(), 0, 0.0
    for took_s, ranks in arrivals(in_step=policy.in_step):
        now += took_s
        shard.apply([Contribution(learners[rank].learn(), worker=rank) for rank in ranks])
        for rank in ranks:
            learners[rank].take(shard.values)
        done += len(ranks)
        if done % len(STEP_S) == 0:
            judge.take(shard.values)
            with torch.no_grad():
                loss = cross_entropy(judge.model(held_out[0]), held_out[1]).item()
            curve.rounds.append(done)
            curve.seconds.append(now)
            curve.losses.append(loss)
        if done >= num_rounds:
            return curve
    raise AssertionError("workers go on for ever")
