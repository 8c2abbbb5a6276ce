"""A factorization machine: rows of numbers for the features, and beside them a network with other rules of consistency.

    python examples/factorization_machine.py
    paceline run --workers 4 --servers 2 examples/factorization_machine.py TRAIN TEST --batch 256 --picture fm.png

Every feature has a weight (FTRL) and 8 factors (Adagrad) on the servers, under ssp: a worker pulls those of its batch
and pushes their gradients, which autograd finds. Two features that meet in a sample add the product of their factors to
its score, whether they have met before or not. The network, an ordinary torch module, is trained under bsp.

Without files it learns which handwritten digits are odd: plain logistic regression can only add up the ink of pixels.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from machine_model import NUM_FACTORS, Batch, Model, new_network
from machine_picture import Curve, Point, draw
from pictures import check_matplotlib
from sparse_batches import area_under_curve, log_loss
from sparse_samples import Samples, digits, held_out, read_samples
from torch.nn import functional

import paceline

ALPHA, FACTOR_RATE, NETWORK_RATE = 0.5, 0.05, 3e-3
NUM_LOOKS = 40
KINDS = ("logistic regression", "factorization machine", "factorization machine and network")


@dataclass(frozen=True, slots=True)
class Data:
    """The batches of this worker, which come again and again, and the samples to test with."""

    batches: Sequence[Batch]
    test: Batch


def build(ps: paceline.Session, name: str, consistency: str) -> Model:
    """Open the tables of one kind of model."""
    weights = ps.table(f"{name}: weights", rows=1, update=paceline.update.FTRL(ALPHA), consistency=consistency)
    if name == KINDS[0]:
        return Model(weights, None, None)
    factors = ps.table(
        f"{name}: factors",
        rows=NUM_FACTORS,
        # Each push is a step: with more workers there are more of them, and they are taken on older values.
        update=paceline.update.Adagrad(FACTOR_RATE / ps.size**0.5),
        consistency=consistency,
        init=paceline.first.normal(0.05, seed=0),
    )
    return Model(weights, factors, new_network() if name == KINDS[2] else None)


def train(ps: paceline.Session, name: str, data: Data, options: Namespace) -> Curve:
    """Train one kind of model; worker 0 looks at how good it is."""
    model, points = build(ps, name, options.consistency), list[Point]()
    optimizer = None
    if model.network:
        plain = torch.optim.Adam(model.network.parameters(), NETWORK_RATE)
        optimizer = paceline.distributed(plain, consistency="bsp", name="network")
    for clock in range(options.clocks):
        if ps.rank == 0 and clock % max(1, options.clocks // NUM_LOOKS) == 0:
            points.append(look(clock, model, data.test))
        batch = data.batches[clock % len(data.batches)]
        rows = model.pull(batch.ids)
        loss = functional.binary_cross_entropy_with_logits(model.scores(batch, rows), batch.labels)
        if optimizer:
            optimizer.zero_grad()
        loss.backward()
        model.push(batch.ids, rows)
        if optimizer:
            optimizer.step(samples=len(batch.labels))  # finishes the clock of all tables
        else:
            ps.clock()
    ps.barrier()
    return Curve(name, [*points, look(options.clocks, model, data.test)])


@torch.no_grad()
def look(clock: int, model: Model, test: Batch) -> Point:
    """Measure a model as it is on the servers, or was a moment ago."""
    scores = model.scores(test, model.pull(test.ids)).double().numpy()
    labels = test.labels.double().numpy()
    return Point(clock, log_loss(scores, labels), area_under_curve(scores, labels))


def parse() -> Namespace:
    """Read the command line."""
    parser = ArgumentParser(description="Logistic regression, a factorization machine, and one with a network.")
    parser.add_argument("train", nargs="?", type=Path, help="samples in libsvm form; without, handwritten digits")
    parser.add_argument("test", nargs="?", type=Path, help="samples to test with; without, every fifth of the others")
    parser.add_argument("--batch", type=int, default=32, help="samples of a worker in a clock")
    parser.add_argument("--clocks", type=int, default=480)
    parser.add_argument("--consistency", default="ssp:2", help="of weights and factors")
    parser.add_argument("--picture", type=Path, help="draw a picture there")
    return parser.parse_args()


def read(options: Namespace) -> tuple[Samples, Samples]:
    """Return samples to train on, and samples to test with."""
    if options.train and options.test:
        return read_samples(options.train), read_samples(options.test)
    return held_out(read_samples(options.train) if options.train else digits())


def cut(share: Samples, num_samples: int) -> list[Batch]:
    """Return the samples in batches of about so many."""
    num_batches = max(1, len(share) // num_samples)
    return [Batch.of(share.every(num_batches, number)) for number in range(num_batches)]


def main() -> None:
    options = parse()
    torch.set_num_threads(1)  # more would only wait for each other in batches this small
    if options.picture:
        check_matplotlib()
    samples, test = read(options)
    ps = paceline.init()
    data = Data(cut(samples.every(ps.size, ps.rank), options.batch), Batch.of(test))
    curves = [train(ps, name, data, options) for name in KINDS]
    if ps.rank:
        return
    facts = (
        f"{options.train.name if options.train else 'digits, odd or even'}: {len(samples):,} samples to train with, "
        f"{len(test):,} to test   ·   {ps.size} worker(s), batches of {options.batch}   ·   weights and factors under "
        f"{options.consistency}, the network under bsp"
    )
    print(facts)
    for curve in curves:
        print(f"{curve.name:38}  test log loss {curve.points[-1].loss:.4f}   test AUC {curve.points[-1].auc:.4f}")
    if options.picture:
        draw(options.picture, facts, curves)


if __name__ == "__main__":
    main()
