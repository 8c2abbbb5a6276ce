"""How much training a search with pruning needs to find what random search finds: the digits of scikit-learn.

    python benchmarks/tune.py [--trials 40] [--seeds 5] [--pruning halving] [--json]

Random search trains every trial to its end. TPE suggests, and stops trials that are behind, until one is at least as
good as the best of random search; it has seeds of its own. Steps are batches trained on, those of stopped trials too.
Suggestions, pruning and examples/digits_search.yaml are those of `paceline tune`; trials train in this process, one
after another, as starting jobs would take most of the time and change nothing of what is counted.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Final

import msgspec
import torch
from cyclopts import App, Parameter
from measuring import machine, print_json, progress
from torch import nn
from torch.nn import functional

from paceline.launch.config import Choice, read_mapping
from paceline.tools.tune.search_space import Pruning, Search, read_search
from paceline.tools.tune.study import Study

SEARCH: Final = Path(__file__).parents[1] / "examples" / "digits_search.yaml"
NUM_TRAINING: Final = 1440
NUM_EPOCHS: Final = 9

app = App(name="tune.py", help="Compare searches by the training that they need.", help_format="plaintext")


class Digits:
    """Handwritten digits, as in examples/digits.py: 1440 to train on, 357 held out."""

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        numbers, digits = load_digits(return_X_y=True)
        order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
        self.images, self.labels = torch.from_numpy(numbers)[order].float() / 16, torch.from_numpy(digits)[order]

    def train(self, parameters: Mapping[str, Choice]) -> Iterator[tuple[int, float]]:
        """Train, and yield the steps of each epoch and the loss on what is held out."""
        lr, momentum, decay = (float(parameters[name]) for name in ("lr", "momentum", "weight-decay"))
        batch, hidden = int(parameters["batch"]), int(parameters["hidden"])
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, weight_decay=decay)
        generator = torch.Generator().manual_seed(0)
        for _ in range(NUM_EPOCHS):
            batches = torch.randperm(NUM_TRAINING, generator=generator).split(2 * batch)  # two workers take one each
            for chosen in batches:
                optimizer.zero_grad()
                functional.cross_entropy(model(self.images[chosen]), self.labels[chosen]).backward()
                optimizer.step()
            with torch.no_grad():
                held_out = functional.cross_entropy(model(self.images[NUM_TRAINING:]), self.labels[NUM_TRAINING:])
            yield len(batches), held_out.item()


@dataclass(frozen=True, slots=True)
class Found:
    """What a search has found, and with how much training."""

    best: float
    steps: int
    trials: int


def run_search(digits: Digits, search: Search, goal: float, max_steps: float) -> Found:
    """Search until a trial is at least as good as the goal, or the trials are over, or there were too many steps."""
    study, steps, num_trials = Study.open(search), 0, 0
    best = float("inf")
    while best > goal and steps < max_steps and (trial := study.ask()) is not None:
        num_trials += 1
        losses: list[float] = []
        for num_steps, loss in digits.train(trial.parameters):
            steps += num_steps
            losses.append(loss)
            if study.report(trial.number, losses):
                study.prune(trial.number, "was behind")
                break
        else:
            if losses[-1] == losses[-1]:
                best = min(best, losses[-1])
                study.finish(trial.number, losses[-1], losses)
            else:
                study.prune(trial.number, "diverged")
    return Found(best, steps, num_trials)


@app.default
def tune(
    *,
    trials: int = 40,
    seeds: int = 5,
    pruning: Pruning = "halving",
    json: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Compare random search with TPE that stops trials.

    Parameters
    ----------
    trials
        Of random search; the other one may have ten times as many, and as many steps.
    seeds
        How often both are run.
    pruning
        Which trials TPE stops.
    json
        Print one JSON object at the end.
    """
    torch.set_num_threads(1)
    digits = Digits()
    told = {**read_mapping(SEARCH), "run": {}}
    ratios: list[float] = []
    runs: list[tuple[Found, Found]] = []
    for seed in range(seeds):
        search = read_search({**told, "method": "random", "pruning": "none", "trials": trials, "seed": seed}, "random")
        random = run_search(digits, search, goal=0.0, max_steps=float("inf"))
        pruned = msgspec.structs.replace(search, method="tpe", pruning=pruning, trials=10 * trials, seed=seeds + seed)
        tpe = run_search(digits, pruned, random.best, max_steps=random.steps)
        runs.append((random, tpe))
        ratios.append(tpe.steps / random.steps if tpe.best <= random.best else float("inf"))
        progress(
            f"seed {seed}: random {random.best:.4f} after {random.trials} trials, {random.steps} steps; "
            f"tpe {tpe.best:.4f} after {tpe.trials} trials, {tpe.steps} steps: {ratios[-1]:.2f}"
        )
    progress(f"steps of tpe with {pruning} pruning by those of random search: {median(ratios):.2f}; {machine()}")
    if json:
        print_json(
            {
                "name": "tune",
                "ratio": median(ratios),
                "ratios": ratios,
                "pruning": pruning,
                "random_steps": median(random.steps for random, _ in runs),
                "tpe_steps": median(tpe.steps for _, tpe in runs),
                "tpe_trials": median(tpe.trials for _, tpe in runs),
                "random_best": median(random.best for random, _ in runs),
            }
        )


if __name__ == "__main__":
    sys.exit(app())
