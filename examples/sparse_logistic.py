"""Sparse logistic regression: an L1 penalty on a table of rows with one number each, and filters that save bytes.

    python examples/sparse_logistic.py
    paceline run --workers 4 --servers 2 examples/sparse_logistic.py -- TRAIN TEST --picture sparse.png

Without files it learns which paragraphs of Python's manual speak of errors. Two solvers:

- proximal: each clock a worker pushes the gradient of its whole share; the servers step, and small weights become 0.
- ftrl: each clock a worker pushes the gradient of one batch, for the ids in it; every weight has a rate of its own.
"""

from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pictures import check_matplotlib
from sparse_batches import Batch, area_under_curve, log_loss
from sparse_counts import count, sent
from sparse_picture import Curve, Point, draw
from sparse_report import Run, report, say_words
from sparse_samples import Floats, Samples, held_out, paragraphs, read_samples
from sparse_solvers import ALPHA, NUM_BATCHES, RATE, RESET_EVERY, Solver, ftrl, proximal

import paceline

NUM_CLOCKS = {"proximal": 600, "ftrl": 160}
NUM_LOOKS = 60  # along the curves of the picture


@dataclass(frozen=True, slots=True)
class Problem:
    """The mean log loss of all samples, plus l1 times the sum of |weight|, is to be small."""

    train: Batch
    test: Batch
    l1: float

    def look(self, clock: int, weights: Floats, table: paceline.RowTable) -> Point:
        """Return how good weights are."""
        objective = log_loss(self.train.scores(weights), self.train.labels) + self.l1 * float(np.abs(weights).sum())
        auc = area_under_curve(self.test.scores(weights), self.test.labels)
        num_filtered, num_pushed = table.filtered.dropped, table.filtered.given
        return Point(clock, objective, auc, int(np.count_nonzero(weights)), num_filtered, num_pushed)

    def violation(self, weights: Floats) -> float:
        """Return by how much the gradient exceeds the penalty at some weight of 0: by nothing at the optimum."""
        gradient = self.train.gradient(weights) / len(self.train.labels)
        return float(np.max(np.abs(gradient[weights == 0]) - self.l1, initial=0.0))


def train(ps: paceline.Session, name: str, solver: Solver, problem: Problem, options: Namespace) -> Run:
    """Learn all weights from 0."""
    ids = problem.train.ids
    table = ps.table(
        name,
        rows=1,
        update=solver.rule,
        consistency=options.consistency,
        dtype="float64",
        filters=solver.filters[name],
    )
    seen, first = np.zeros(len(ids)), sent(table)
    looks = [problem.look(0, seen, table)]
    for clock in range(1, options.clocks + 1):
        number = clock % len(solver.batches)
        batch = solver.batches[number]
        weights = table.pull(batch.ids).numpy()[:, 0]
        table.push(batch.ids, batch.gradient(weights)[:, np.newaxis] / solver.divisors[number])
        ps.clock()
        if clock == len(solver.batches):
            first = sent(table)  # now every list of ids was sent once
        seen[np.searchsorted(ids, batch.ids)] = weights
        if ps.rank == 0 and clock < options.clocks and clock % max(1, options.clocks // NUM_LOOKS) == 0:
            looks.append(problem.look(clock, seen, table))
    ps.barrier()
    counts = count(ps, table, first)
    weights = table.pull(ids, exact=True).numpy()[:, 0]
    return Run(name, [*looks, problem.look(options.clocks, weights, table)], weights, counts)


def parse() -> Namespace:
    """Read the command line."""
    parser = ArgumentParser(description="Sparse logistic regression with an L1 penalty.")
    parser.add_argument(
        "train", nargs="?", type=Path, help="samples in libsvm form; without, text that comes with Python"
    )
    parser.add_argument("test", nargs="?", type=Path, help="samples to test with; without, every fifth of the others")
    parser.add_argument("--solver", choices=list(NUM_CLOCKS), default="proximal")
    parser.add_argument("--l1", type=float, default=1e-3, help="the penalty beside the mean log loss")
    parser.add_argument("--clocks", type=int, default=0)
    parser.add_argument("--consistency", default="ssp:2")
    parser.add_argument("--picture", type=Path, help="draw a picture there")
    options = parser.parse_args()
    options.clocks = -(-(options.clocks or NUM_CLOCKS[options.solver]) // RESET_EVERY) * RESET_EVERY
    return options


def read(options: Namespace) -> tuple[Samples, Samples, dict[int, str]]:
    """Return samples to train on, samples to test with, and the words behind ids."""
    if options.train is None:
        samples, words = paragraphs()
        return *held_out(samples), words
    if options.test is None:
        return *held_out(read_samples(options.train)), {}
    return read_samples(options.train), read_samples(options.test), {}


def facts(samples: Samples, problem: Problem, options: Namespace, size: int) -> str:
    """Describe the task, the workers and the pace."""
    source = "paragraphs of Python's manual" if options.train is None else options.train.name
    num, num_test, num_ids = len(samples), len(problem.test.labels), len(problem.train.ids)
    step = {
        "proximal": f"a clock steps by {RATE} times the mean gradient of all samples: {RATE / num:.1e} a sample",
        "ftrl": f"a push is the mean gradient of {num // size // NUM_BATCHES['ftrl']:,} samples; alpha {ALPHA}, beta 1",
    }
    return (
        f"{source}: {num:,} samples to train with, {num_test:,} to test, {num_ids:,} ids   ·   {size} worker(s), "
        f"{options.consistency}   ·   l1 {options.l1:g}\n{options.solver}: {step[options.solver]}"
    )


def main() -> None:
    options = parse()
    if options.picture:
        check_matplotlib()
    samples, test, words = read(options)
    ids = np.unique(samples.ids)
    problem = Problem(Batch.of(samples, ids), Batch.of(test, ids), options.l1)
    with paceline.init() as ps:
        if options.solver == "proximal":
            solver = proximal(samples, ids, options.l1, ps.size, ps.rank)
        else:
            solver = ftrl(samples, options.l1, options.clocks * ps.size, ps.size, ps.rank)
        ps.clock()  # so that each run ends with a clock in which KKT lets everything pass
        runs = [train(ps, name, solver, problem, options) for name in solver.filters]
        if ps.rank:
            return
        told = facts(samples, problem, options, ps.size)
        print(told)
        report(runs, problem.violation(runs[-1].weights))
        say_words(runs[-1].weights, ids, words)
        if options.picture:
            curves = [Curve(run.name, run.looks, run.sent_bytes) for run in runs]
            draw(options.picture, "Sparse logistic regression", told, curves)


if __name__ == "__main__":
    main()
