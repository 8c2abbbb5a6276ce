"""How many asynchronous workers Adagrad on the servers bears, beside a fixed rate. Time is simulated.

    python benchmarks/downpour.py [--warm-epochs 2] [--picture downpour.png] [--json]

Workers fetch, compute for 0.5 to 1.5 virtual seconds and push, then at once the next; worker 0 alone for the first two
epochs. Update rules, values and gradients (handwritten digits, a perceptron of 48) are real. A rule bears a number of
workers with a rate if all seeds come to a training loss of 0.1 within 20 epochs. Its rate is the one that needs the
fewest samples with one worker, and stays that with more.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Final

import torch
from cyclopts import App, Parameter
from downpour_race import MAX_SAMPLES, UPDATES_PER_EPOCH, Digits, Outcome, race
from measuring import machine, print_json, progress

from paceline.update.named_rules import SGD, Adagrad
from paceline.update.rules import RuleSpec

NUMS_WORKERS: Final = (1, 2, 4, 8, 16, 32, 64)
RULES: Final[Mapping[str, tuple[Callable[[float], RuleSpec], tuple[float, ...]]]] = {
    "fixed rate": (SGD, (0.05, 0.1, 0.2, 0.4, 0.8)),
    "Adagrad": (Adagrad, (0.025, 0.05, 0.1, 0.2, 0.4)),
}
COLOURS: Final = {"fixed rate": "#D55E00", "Adagrad": "#0072B2"}

app = App(name="downpour.py", help="Show how many asynchronous workers a rule bears.", help_format="plaintext")


@dataclass(frozen=True, slots=True)
class Trial:
    """A rule at one rate, with more and more workers: all seeds of each, up to the first number that it cannot bear."""

    rate: float
    runs: Mapping[int, tuple[Outcome, ...]]

    @property
    def num_borne(self) -> int:
        """The most workers with which all seeds came to the target; 0 if not even one did."""
        return max((num for num in self.runs if self.samples(num) is not None), default=0)

    def samples(self, num: int) -> float | None:
        """Return how many samples were needed, the median of the seeds; None where one failed."""
        found = [run.samples for run in self.runs.get(num, ()) if run.samples is not None]
        return median(found) if found and len(found) == len(self.runs[num]) else None

    def seconds(self, num: int) -> float:
        """Return the virtual time that was needed, the median of the seeds."""
        return median(run.seconds for run in self.runs[num])


@app.default
def downpour(
    *,
    seeds: int = 3,
    warm_epochs: int = 2,
    picture: Path | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Train under both rules with more and more virtual workers; print how many each bears.

    Parameters
    ----------
    seeds
        Number of runs of each rule, rate and number of workers.
    warm_epochs
        That worker 0 trains alone.
    picture
        Where to draw the result, as png.
    json
        Print only one line of JSON on stdout.
    """
    torch.set_num_threads(1)
    digits = Digits.load()
    trials = {name: list(tried(digits, name, warm_epochs, seeds)) for name in RULES}
    chosen = {name: min(own, key=lambda trial: trial.samples(1) or MAX_SAMPLES + 1) for name, own in trials.items()}
    if not json:
        tell(trials, chosen)
    if picture is not None:
        draw(picture, trials, chosen)
    borne = {name: trial.num_borne for name, trial in chosen.items()}
    print_json(
        {
            "name": "downpour",
            "seeds": seeds,
            "warm_epochs": warm_epochs,
            **{f"{_key(name)}_rate": trial.rate for name, trial in chosen.items()},
            **{f"{_key(name)}_workers": count for name, count in borne.items()},
            "ratio": borne["Adagrad"] / max(1, borne["fixed rate"]),
            **{f"{_key(name)}_workers_any_rate": most_at_any_rate(own) for name, own in trials.items()},
        }
    )
    return 0


def tried(digits: Digits, name: str, warm_epochs: int, num_seeds: int) -> Iterator[Trial]:
    """Yield what became of a rule at each of its rates."""
    make, rates = RULES[name]
    warm_updates = warm_epochs * UPDATES_PER_EPOCH
    for rate in rates:
        runs: dict[int, tuple[Outcome, ...]] = {}
        trial = Trial(rate, runs)
        for num in NUMS_WORKERS:
            progress(f"{name} {rate:g}, {num} workers")
            runs[num] = tuple(race(digits, make(rate), num, warm_updates, seed) for seed in range(num_seeds))
            if trial.samples(num) is None:
                break
        yield trial


def most_at_any_rate(trials: list[Trial]) -> int:
    """Return how many workers a rule bears if its rate is chosen anew for each number of them."""
    return max(trial.num_borne for trial in trials)


def tell(trials: Mapping[str, list[Trial]], chosen: Mapping[str, Trial]) -> None:
    """Print what was found."""
    print(f"samples to a training loss of 0.1, simulated time; {machine()}")
    print(
        f"{'':18}{'rate':>7}" + "".join(f"{num:>8}" for num in NUMS_WORKERS) + "  workers; - where not all seeds came"
    )
    for name, own in trials.items():
        for trial in own:
            cells = "".join(f"{_cell(trial, num):>8}" for num in NUMS_WORKERS)
            print(f"  {name:16}{trial.rate:7g}{cells}{'  <- least with one worker' if trial is chosen[name] else ''}")
    for name, trial in chosen.items():
        last = max(trial.runs)
        staleness = fmean(run.staleness for run in trial.runs[last])
        print(
            f"  {name} {trial.rate:g} bears {trial.num_borne} workers (with {last} the staleness is {staleness:.1f}); "
            f"with a rate chosen for each number of workers {most_at_any_rate(trials[name])}"
        )


def draw(path: Path, trials: Mapping[str, list[Trial]], chosen: Mapping[str, Trial]) -> None:
    """Draw the time that each rule needs at its rate, and how many workers it bears at each rate."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 3.8), dpi=150, facecolor="white", layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, trial in chosen.items():
        borne, colour = [num for num in NUMS_WORKERS if num <= trial.num_borne], COLOURS[name]
        seconds = [trial.seconds(num) for num in borne]
        left.plot(borne, seconds, marker="o", color=colour, label=f"{name} {trial.rate:g}")
        if max(trial.runs) > trial.num_borne:
            left.plot(max(trial.runs), seconds[-1], marker="x", markersize=9, color=colour)
        own = trials[name]
        right.plot([each.rate for each in own], [each.num_borne for each in own], marker="o", color=colour)
        right.plot(trial.rate, trial.num_borne, marker="o", markersize=12, fillstyle="none", color=colour)
    left.set(title="Time to the target, at the rate that is best alone", xscale="log", ylim=(0, None))
    left.set(xlabel="asynchronous workers; \N{MULTIPLICATION SIGN}: not all runs came", ylabel="virtual seconds")
    left.set_xticks(NUMS_WORKERS, map(str, NUMS_WORKERS))
    right.set(title="Workers borne at each rate", xscale="log", xlabel="rate; ringed: best alone")
    right.set_yscale("symlog", base=2, linthresh=1)
    right.set(ylim=(-0.3, 90), ylabel="asynchronous workers")
    right.set_yticks((0, *NUMS_WORKERS), map(str, (0, *NUMS_WORKERS)))
    rates = sorted({rate for _, own in RULES.values() for rate in own})
    right.set_xticks(rates, [f"{rate:g}" for rate in rates])
    left.legend(frameon=False)
    for axes in (left, right):
        axes.minorticks_off()
        axes.grid(visible=True, color="#e6e6e6", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _cell(trial: Trial, num: int) -> str:
    samples = trial.samples(num)
    return f"{samples:.0f}" if samples is not None else "-" if num in trial.runs else ""


def _key(name: str) -> str:
    return name.lower().partition(" ")[0]


if __name__ == "__main__":
    sys.exit(app())
