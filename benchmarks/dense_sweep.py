"""The dense step at every size beside DDP over Gloo, with default settings; one worker alone beside plain torch, too.

    python benchmarks/dense_sweep.py --picture docs/pictures/dense_sweep.png

Small models take many steps in a row, as a training loop does: only the time within `step` counts, the slowest
worker's. The floor is the memory that a step has to move, at the rate at which this machine copies.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, cast

from cyclopts import App, Parameter
from dense_sides import PEERS, Measured, Peer, floor_bytes, measure
from measuring import Sample, machine, print_json, progress
from turns import PlayFailed

SIZES: Final = (1_000, 10_000, 100_000, 1_000_000, 25_000_000)
WORKERS: Final = (1, 2, 4)
STEPS_AT_ONCE: Final = {1_000: 40, 10_000: 40, 100_000: 20, 1_000_000: 5}  # in one turn; larger models take one
PICTURE: Final = Path("report") / "dense_sweep.png"
COLOURS: Final = {"ours": "#0072B2", "peer": "#D55E00", "floor": "#999999"}

app = App(name="dense_sweep.py", help="Measure the dense step at every size beside DDP.", help_format="plaintext")


@dataclass(frozen=True, slots=True)
class Point:
    """One size with one number of workers beside one peer: what is measured there."""

    peer: Peer
    workers: int
    parameters: int

    @property
    def name(self) -> str:
        """Return a name that stands for this point alone."""
        return f"{self.peer}-{self.workers}-{self.parameters}"

    @property
    def steps_at_once(self) -> int:
        """Return how many steps a turn takes."""
        return STEPS_AT_ONCE.get(self.parameters, 1)

    def measure(self, rounds: int) -> Measured:
        """Start both sides, and measure this many rounds."""
        return measure(self.peer, self.workers, self.parameters, rounds, steps_at_once=self.steps_at_once)


def points(sizes: tuple[int, ...], workers: tuple[int, ...]) -> Iterator[Point]:
    """Return all points: each size beside DDP, and one worker alone beside plain torch."""
    for num_workers in workers:
        for peer in ("torch", "ddp") if num_workers == 1 else ("ddp",):
            for size in sizes:
                yield Point(peer, num_workers, size)


def result(point: Point, measured: Measured) -> dict[str, object]:
    """Return the measurement of a point, as it is printed."""
    rounds = measured.rounds
    ours_ms, peer_ms = (1e3 * Sample.of(times).median for times in (rounds.ours_s, rounds.peer_s))
    return {
        "name": point.name,
        "peer": point.peer,
        "parameters": point.parameters,
        "workers": point.workers,
        "ratio": rounds.ratio.median,
        "ratio_spread": [rounds.ratio.low, rounds.ratio.high],
        "ours_ms": ours_ms,
        "peer_ms": peer_ms,
        "floor_ms": 1e3 * floor_bytes(point.workers, point.parameters) / Sample.of(rounds.copy_rate).median,
        "difference": measured.difference,
    }


def draw(results: list[dict[str, object]], path: Path) -> None:
    """Draw the step of both sides and the floor against the size, one plot for each number of workers."""
    from matplotlib.figure import Figure

    workers = sorted({cast("int", each["workers"]) for each in results})
    figure = Figure(figsize=(4.2 * len(workers), 3.9), dpi=140, facecolor="white", layout="constrained")
    all_axes = figure.subplots(1, len(workers), sharey=True, squeeze=False)[0]
    for axes, num_workers in zip(all_axes, workers, strict=True):
        of_these = [each for each in results if each["workers"] == num_workers]
        by_peer = {peer: [each for each in of_these if each["peer"] == peer] for peer in ("ddp", "torch")}
        lines = [("Paceline", "ours_ms", by_peer["ddp"], "-", COLOURS["ours"])]
        lines.append((PEERS["ddp"].title, "peer_ms", by_peer["ddp"], "-", COLOURS["peer"]))
        if by_peer["torch"]:
            lines.append((PEERS["torch"].title, "peer_ms", by_peer["torch"], "--", COLOURS["peer"]))
        lines.append(("memory floor", "floor_ms", by_peer["ddp"], ":", COLOURS["floor"]))
        for label, key, found, style, colour in lines:
            axes.loglog(
                [each["parameters"] for each in found],
                [each[key] for each in found],
                style,
                marker="" if key == "floor_ms" else "o",
                markersize=4,
                color=colour,
                label=label,
            )
        axes.set_title("one worker alone" if num_workers == 1 else f"{num_workers} workers", loc="left", fontsize=10)
        axes.set_xlabel("float32 parameters")
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    all_axes[0].set_ylabel("ms a step")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


@app.default
def sweep(
    *,
    rounds: int = 9,
    sizes: tuple[int, ...] = SIZES,
    workers: tuple[int, ...] = WORKERS,
    picture: Path = PICTURE,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Measure every size beside DDP; print a line for each, and draw them.

    Parameters
    ----------
    rounds
        Number of measured rounds at each point, after a few to warm up.
    sizes
        Numbers of float32 parameters.
    workers
        Numbers of workers on each side.
    picture
        Where to write the picture.
    json
        Print only one line of JSON on stdout.
    """
    results: list[dict[str, object]] = []
    for point in points(sizes, workers):
        progress(f"{point.workers} workers, {point.parameters:,} parameters, beside {PEERS[point.peer].title}")
        try:
            results.append(result(point, point.measure(rounds)))
        except PlayFailed as failure:
            print(failure, file=sys.stderr)
            return 1
    if not json:
        print(
            f"{'workers':>7} {'parameters':>11}  {'ours':>10} {'peer':>10} {'floor':>10}  ratio  beside   ({machine()})"
        )
        for each in results:
            times = " ".join(f"{each[key]:>7.3f} ms" for key in ("ours_ms", "peer_ms", "floor_ms"))
            print(f"{each['workers']:>7} {each['parameters']:>11,}  {times}  {each['ratio']:>5.2f}  {each['peer']}")
    draw(results, picture)
    progress(f"Drawn: {picture}")
    print_json({"name": "dense-sweep", "sizes": results})
    return 0


if __name__ == "__main__":
    sys.exit(app())
