"""What staleness costs, and what fresh values save: matrix factorization under eight policies, with one step size.

    python examples/matrix_factorization_figure.py
    python examples/matrix_factorization_figure.py ml-1m/ratings.dat --clock-ms 200

First the largest step is searched at which bsp is stable. Then every policy learns with the same share of it, on the
same ratings in the same order: real jobs of `matrix_factorization.py`. Under ssp a worker asks for a row again only
when the bound forces it, so rows grow old even though all workers are equally fast; under essp servers send what
changed after every clock. For each run: the square loss over all ratings, from copies of all rows that a further
worker takes, and how old every row was that was read, from the traces.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from pathlib import Path

from matrix_factorization_outcomes import Outcome, differentials, table
from matrix_factorization_picture import draw
from pictures import check_matplotlib

SCRIPT = Path(__file__).with_name("matrix_factorization.py")
POLICIES = ("bsp", "ssp:0", "ssp:2", "ssp:3", "ssp:5", "ssp:10", "essp:0", "essp:10")
FIRST_STEP, PRECISION = 0.02, 1.1  # of the search: where it begins, and the ratio of its last two steps


def main() -> None:
    options = parse()
    check_matplotlib()
    limit = options.limit or search_limit(options)
    step = options.share * limit
    print(
        f"bsp is stable up to a step of {limit:.3g}; all policies take {options.share:g} of it, {step:.3g}", flush=True
    )
    outcomes = [
        learn(policy, seed, step, options.clock_ms, options)
        for seed in range(options.seeds)
        for policy in (*dict.fromkeys(("bsp", *options.only)),)
    ]
    print(table(outcomes))
    facts = {"limit": limit, "step": step, "workers": options.workers, "outcomes": [asdict(one) for one in outcomes]}
    options.picture.with_suffix(".json").write_text(json.dumps(facts))
    draw(options.picture, outcomes, caption(limit, step, options))
    print(f"picture: {options.picture}")


def search_limit(options: Namespace) -> float:
    """Return the largest step, to a tenth, at which bsp is stable; found by halving and doubling, then by bisection."""

    def is_stable(step: float) -> bool:
        return learn("bsp", 0, step, 0.0, options).is_stable

    low = high = FIRST_STEP
    if is_stable(FIRST_STEP):
        while is_stable(high := 2 * high):
            low = high
    else:
        while not is_stable(low := low / 2):
            high = low
    while high / low > PRECISION:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if is_stable(middle) else (low, middle)
    return low


def learn(policy: str, seed: int, step: float, clock_ms: float, options: Namespace) -> Outcome:
    """Run one job, tell how it ended, and check that no read was older than its policy allows."""
    with tempfile.TemporaryDirectory(prefix="factorization-") as folder:
        run, losses = Path(folder) / "run", Path(folder) / "losses.json"
        job = [sys.executable, "-m", "paceline", "run", "--quiet", "--no-progress", f"--run-dir={run}"]
        job += [f"--workers={options.workers + 1}", f"--servers={options.servers}", f"--consistency={policy}"]
        job += [str(SCRIPT), *map(str, filter(None, [options.ratings])), f"--watch={losses}", f"--step={step}"]
        job += [f"--seed={seed}", f"--clocks={options.clocks}", f"--clock-ms={clock_ms}"]
        subprocess.run(job, check=True)
        outcome = Outcome(policy, seed, json.loads(losses.read_text()), differentials(run / "trace"))
    oldest = -1 - int(policy.partition(":")[2] or 0)
    assert all(oldest <= differential <= -1 for differential in outcome.reads), (policy, outcome.reads)
    clock, seconds, loss = outcome.curve[-1]
    print(f"step {step:.4f}  seed {seed}  {policy:8}{clock:5} clocks{seconds:7.1f} s   loss {loss:,.0f}", flush=True)
    return outcome


def caption(limit: float, step: float, options: Namespace) -> str:
    """Say what was done."""
    data = options.ratings.name if options.ratings else "made-up ratings"
    servers = "1 server" if options.servers == 1 else f"{options.servers} servers"
    pace = f", of {options.clock_ms:g} ms for every worker (by sleeping)" if options.clock_ms else ""
    return (
        f"{data}  ·  {options.workers} workers, {servers}  ·  a clock is 1 % of a worker's ratings{pace}\n"
        f"step {step:.3g} for every rating, each push applied in full: {options.share:g} of bsp's largest stable step, "
        f"{limit:.3g}  ·  lines: medians of {options.seeds} seeds; pale: all of them"
    )


def parse() -> Namespace:
    parser = ArgumentParser(description="Compare policies by how a factorization of ratings learns under each.")
    parser.add_argument("ratings", type=Path, nargs="?", help="u.data, ratings.dat, ratings.csv or moviedata.mat")
    parser.add_argument("--picture", type=Path, default=Path("matrix_factorization.png"))
    parser.add_argument("--workers", type=int, default=4, help="that learn; one more takes the copies")
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--clocks", type=int, default=150)
    parser.add_argument("--clock-ms", type=float, default=60.0, help="what computing a clock takes, by sleeping")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.75, help="of bsp's largest stable step")
    parser.add_argument("--limit", type=float, help="bsp's largest stable step, if it is known already")
    parser.add_argument("--only", nargs="+", default=POLICIES, help="policies to compare with bsp")
    return parser.parse_args()


if __name__ == "__main__":
    main()
