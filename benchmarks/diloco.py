"""What workers lose that exchange every 10 or 50 steps, what that saves, and which outer optimizer bears no lockstep.

    python benchmarks/diloco.py [--steps 500] [--seeds 3] [--picture docs/pictures/diloco.png] [--json]

First, for real: four workers and a server over tcp learn the next letter of a text; losses after equally many samples
are on held-out text, and bytes are those of all frames of worker 0. Then, on virtual time: four workers
of different speeds (0.58 to 3.33 s a step) through the real update rules, as `diloco_toy.py` says.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import diloco_toy as toy
import torch
from measuring import machine, print_json, progress

HERE = Path(__file__).resolve().parent
TIMEOUT_S = 1500.0
LOCKSTEP = "bsp"
COLOURS = ("#222222", "#D55E00", "#56B4E9", "#009E73", "#0072B2", "#CC79A7")


def real_runs(num_steps: int, num_seeds: int) -> list[dict[str, Any]]:
    """Run the job of four workers; return what worker 0 found, strategy by strategy and seed by seed."""
    command = [sys.executable, "-m", "paceline", "run", "-n", "4", "-m", "1", "--transport", "tcp", "--quiet"]
    command += ["--no-progress", str(HERE / "diloco_worker.py"), "--steps", str(num_steps), "--seeds", str(num_seeds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=False)
    lines = [line.partition("found ")[2] for line in done.stdout.splitlines() if "found " in line]
    if done.returncode or not lines:
        raise SystemExit(f"the run failed:\n{done.stdout}")
    return [json.loads(line) for line in lines]


def summed_up(found: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return of each strategy the last loss (mean of the seeds), how far that is above lockstep, and bytes."""
    names = list(dict.fromkeys(run["strategy"] for run in found))
    results: dict[str, dict[str, float]] = {}
    for name in names:
        runs = [run for run in found if run["strategy"] == name]
        base = {run["seed"]: run for run in found if run["strategy"] == LOCKSTEP}
        gaps = [run["curve"][-1][1] - base[run["seed"]]["curve"][-1][1] for run in runs]
        own, all_steps = runs[0], base[runs[0]["seed"]]
        results[name] = {
            "loss": mean(run["curve"][-1][1] for run in runs),
            "gap": mean(gaps),
            "largest_gap": max(gaps),
            "mb": (own["bodies"] + own["headers"]) / 1e6,
            "times_fewer_bytes": (all_steps["bodies"] + all_steps["headers"]) / (own["bodies"] + own["headers"]),
            "times_fewer_tensor_bytes": all_steps["bodies"] / own["bodies"],
        }
    return results


def toy_runs(num_seeds: int, hidden: int, num_rounds: int) -> dict[str, list[toy.Curve]]:
    """Run the workers of different speeds under every policy."""
    torch.set_num_threads(1)
    curves: dict[str, list[toy.Curve]] = {}
    for name, policy in toy.POLICIES.items():
        progress(f"virtual: {name}")
        curves[name] = [toy.run(policy, seed, hidden=hidden, num_rounds=num_rounds) for seed in range(num_seeds)]
    return curves


def draw(found: list[dict[str, Any]], curves: dict[str, list[toy.Curve]], path: Path) -> None:
    """Draw losses by samples: of the real workers, and of those of different speeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.8), dpi=140, facecolor="white", layout="constrained")
    left, right = figure.subplots(1, 2)
    for (name, numbers), colour in zip(summed_up(found).items(), COLOURS, strict=False):
        runs = [run["curve"] for run in found if run["strategy"] == name]
        losses = [mean(curve[index][1] for curve in runs) for index in range(len(runs[0]))]
        left.plot([step for step, _ in runs[0]], losses, color=colour, label=f"{name}, {numbers['mb']:.1f} MB")
    left.set_title("Four workers over tcp, with the bytes of each", loc="left")
    left.set_xlabel("steps of each worker")
    left.set_ylabel("loss on held-out text (nats a letter)")
    for (name, runs), colour in zip(curves.items(), COLOURS, strict=False):
        losses = [mean(curve.losses[index] for curve in runs) for index in range(len(runs[0].losses))]
        right.plot(runs[0].rounds, losses, color=colour, label=name)
    right.set_title("Workers of 0.58 to 3.33 s a step (virtual time)", loc="left")
    right.set_xlabel("rounds of 20 steps, of all workers together")
    right.set_ylabel("loss on held-out points")
    right.set_yscale("log")
    right.set_yticks([1, 1.5, 2, 3, 4], labels=["1", "1.5", "2", "3", "4"])
    right.minorticks_off()
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(visible=True, axis="y", color="#e6e6e6")
    figure.savefig(path)


def main() -> None:
    """Measure both, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="of each worker, in hundreds")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=512, help="width of the toy's perceptron")
    parser.add_argument("--rounds", type=int, default=60, help="of the toy's workers together")
    parser.add_argument("--picture", type=Path, help="draw the losses to this file")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    found = real_runs(options.steps, options.seeds)
    real = summed_up(found)
    curves = toy_runs(options.seeds, options.hidden, options.rounds)
    print(machine())
    for name, numbers in real.items():
        print(
            f"{name:14} loss {numbers['loss']:.3f}, {numbers['gap']:+.3f} beside {LOCKSTEP} (at most "
            f"{numbers['largest_gap']:+.3f}), {numbers['mb']:.2f} MB a worker, 1/{numbers['times_fewer_bytes']:.2f} "
            f"of the bytes, 1/{numbers['times_fewer_tensor_bytes']:.2f} of those of tensors"
        )
    virtual = {
        name: {
            "loss": mean(run.losses[-1] for run in runs),
            "highest_loss": max(max(run.losses) for run in runs),
            "virtual_s": mean(run.seconds[-1] for run in runs),
        }
        for name, runs in curves.items()
    }
    for name, numbers in virtual.items():
        print(
            f"{name:42} loss {numbers['loss']:.3f}, on the way up to {numbers['highest_loss']:.2f}, "
            f"{numbers['virtual_s']:.0f} virtual s"
        )
    if options.picture:
        draw(found, curves, options.picture)
    if options.json:
        print_json({"name": "diloco", "steps": options.steps, "seeds": options.seeds, "real": real, "virtual": virtual})


if __name__ == "__main__":
    main()
