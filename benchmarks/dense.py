"""The dense step beside a peer's: push a gradient on every worker, update with momentum SGD, pull the values (bsp).

    python benchmarks/dense.py --peer ddp --workers 2
    python benchmarks/dense.py --sweep

Both sides are alive all the time and take turns; in each round both take one step on the same gradients. Beside them
is the floor: what the step has to move through memory, and over tcp what it has to send, a push and the values of each
worker, at the rate of plain sockets in the same rounds. (A ring of two workers sends half of that.)
"""

import sys
from typing import Annotated, Final, Literal

from cyclopts import App, Parameter
from dense_sides import PEERS, Measured, Peer, floor_bytes, line_floor_bytes, measure, peer_python
from dense_sweep import sweep as measure_all_sizes
from measuring import NUM_CORES, Sample, machine, print_json, progress
from turns import PlayFailed

EXIT_FAILURE: Final = 1
EXIT_USAGE: Final = 2
TOLERANCE: Final = 1e-5  # of the values: they are of size 1, and the sides add the gradients in different orders


app = App(name="dense.py", help="Measure the dense step side by side with a peer.", help_format="plaintext")


@app.default
def dense(
    *,
    peer: Peer = "ddp",
    workers: Annotated[int, Parameter(alias="-n")] = 2,
    parameters: int = 25_000_000,
    rounds: int = 15,
    transport: Literal["shm", "tcp"] = "shm",
    nonfinite: Literal["ignore", "reject"] = "ignore",
    sweep: Annotated[bool, Parameter(negative="")] = False,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Take steps of both sides in turn; print the ratio, its spread and the floor.

    Parameters
    ----------
    peer
        Peer to compare with; ray, tf and torchft need their own environment, made by benchmarks/peers/setup.py.
    workers
        Number of workers on each side.
    parameters
        Number of float32 parameters.
    rounds
        Number of measured rounds, after a few to warm up.
    transport
        Transport between Paceline's processes.
    nonfinite
        Whether Paceline checks every gradient for NaN and infinity (reject, its default), or not, as its peers
        (ignore).
    sweep
        Measure all sizes beside DDP with default settings instead, as benchmarks/dense_sweep.py does.
    json
        Print only one line of JSON on stdout.
    """
    if sweep:
        return measure_all_sizes(json=json)
    python = peer_python(peer)
    if python is None:
        print(
            f"{peer} is not installed here: run python benchmarks/peers/setup.py {PEERS[peer].environment}",
            file=sys.stderr,
        )
        return EXIT_USAGE
    try:
        progress(f"Starting {workers} workers of Paceline and of {PEERS[peer].title}, {parameters:,} parameters")
        measured = measure(peer, workers, parameters, rounds, python=python, transport=transport, nonfinite=nonfinite)
    except PlayFailed as failure:
        print(failure, file=sys.stderr)
        return EXIT_FAILURE
    tell(peer, workers, parameters, measured, only_json=json)
    return 0 if measured.difference <= TOLERANCE else EXIT_FAILURE


def tell(peer: Peer, num_workers: int, num_parameters: int, measured: Measured, *, only_json: bool) -> None:
    """Print the measurement."""
    rounds, difference, threads = measured.rounds, measured.difference, measured.threads
    ratio, ours_ms, peer_ms = rounds.ratio, _ms(rounds.ours_s), _ms(rounds.peer_s)
    copy_rate = Sample.of(rounds.copy_rate).median
    floor_ms = 1e3 * floor_bytes(num_workers, num_parameters) / copy_rate
    line = _line_floor(num_workers, num_parameters, rounds.line_rate, ours_ms)
    if not only_json:
        print(f"push + update + pull of {num_parameters:,} float32, momentum SGD, {num_workers} workers; {machine()}")
        print(f"  Paceline              {ours_ms.text(' ms')}, {threads[0]} threads a worker")
        print(f"  {PEERS[peer].title:<21} {peer_ms.text(' ms')}, {threads[1]} threads a worker")
        print(f"  ratio                 {ratio.text('x', 2)}")
        print(
            f"  memory floor          {floor_ms:.1f} ms at {copy_rate / 1e9:.1f} GB/s (copied with {NUM_CORES} "
            f"threads); ours is at {floor_ms / ours_ms.median:.2f} of that rate"
        )
        if line:
            print(
                f"  line floor            {line['line_floor_ms']:.1f} ms at {line['line_gb_per_s']:.2f} GB/s "
                f"({num_workers} plain sockets at once); ours is at {line['line_fraction']:.2f} of that rate"
            )
        verdict = "equal" if difference <= TOLERANCE else "NOT EQUAL"
        print(f"  results               {verdict}: differ by at most {difference:.1e} (tolerance {TOLERANCE:.0e})")
    print_json(
        {
            "name": f"dense-{peer}",
            "workers": num_workers,
            "parameters": num_parameters,
            "ratio": ratio.median,
            "ratio_spread": [ratio.low, ratio.high],
            "ours_ms": ours_ms.median,
            "ours_spread_ms": [ours_ms.low, ours_ms.high],
            "peer_ms": peer_ms.median,
            "peer_spread_ms": [peer_ms.low, peer_ms.high],
            "floor_ms": floor_ms,
            "floor_fraction": floor_ms / ours_ms.median,
            **line,
            "difference": difference,
            "tolerance": TOLERANCE,
        }
    )


def _line_floor(num_workers: int, num_parameters: int, rates: list[float], ours_ms: Sample) -> dict[str, float]:
    """Return the time that the bytes of a step take over plain sockets; nothing where none were measured."""
    if not rates:
        return {}
    rate = Sample.of(rates).median
    line_floor_ms = 1e3 * line_floor_bytes(num_workers, num_parameters) / rate
    return {
        "line_floor_ms": line_floor_ms,
        "line_gb_per_s": rate / 1e9,
        "line_fraction": line_floor_ms / ours_ms.median,
    }


def _ms(seconds: list[float]) -> Sample:
    return Sample.of([1e3 * each for each in seconds])


if __name__ == "__main__":
    sys.exit(app())
