"""Parameters on a CUDA device: push and pull beside the link to it, and the step of several workers beside NCCL.

    python benchmarks/gpu.py --workers 2

Where the workers have to share a device, which NCCL refuses, Gloo reduces the same tensors instead. All sides are
alive all the time and take turns with copies from and to page-locked memory, which are the limit of the link.
"""

import sys
import time
from dataclasses import dataclass, field
from typing import Annotated, Final

import torch
import work
from cyclopts import App, Parameter
from dense_sides import compare
from measuring import Sample, machine, print_json, progress
from turns import BENCHMARKS, PlayFailed, Side, Stage

NUM_WARM_UP: Final = 3
TOLERANCE: Final = 1e-5  # of the values: they are of size 1, and the sides add the gradients in different orders

app = App(name="gpu.py", help="Measure training on a CUDA device.", help_format="plaintext")


@dataclass(frozen=True, slots=True)
class Sides:
    """The sides that take turns: one worker of Paceline, several of it, and as many of a peer."""

    one: Side
    ours: Side
    theirs: Side


@dataclass(slots=True)
class Rounds:
    """What was measured, one number a round: seconds of a step, and bytes a second over the link."""

    one_s: list[float] = field(default_factory=list[float])
    ours_s: list[float] = field(default_factory=list[float])
    theirs_s: list[float] = field(default_factory=list[float])
    to_host: list[float] = field(default_factory=list[float])
    to_device: list[float] = field(default_factory=list[float])

    @property
    def ratio(self) -> Sample:
        """How many times the peer's step takes as long as ours."""
        return Sample.of([theirs / ours for ours, theirs in zip(self.ours_s, self.theirs_s, strict=True)])

    def link_fraction(self, size_bytes: int) -> Sample:
        """Return which part of one worker's step its gradient and values need on the link alone."""
        return Sample.of(
            [
                (size_bytes / to_host + size_bytes / to_device) / one_s
                for one_s, to_host, to_device in zip(self.one_s, self.to_host, self.to_device, strict=True)
            ]
        )


class Link:
    """Measures how fast a device and page-locked memory exchange bytes."""

    def __init__(self, num_elements: int) -> None:
        self._here = torch.empty(num_elements, pin_memory=True)
        self._there = torch.empty(num_elements, device="cuda")

    def to_host(self) -> float:
        """Copy from the device once; return the bytes of a second."""
        return self._copy(self._there, self._here)

    def to_device(self) -> float:
        """Copy to the device once; return the bytes of a second."""
        return self._copy(self._here, self._there)

    def _copy(self, source: torch.Tensor, out: torch.Tensor) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        out.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return source.nbytes / (time.perf_counter() - start)


@app.default
def gpu(
    *,
    workers: Annotated[int, Parameter(alias="-n")] = 2,
    parameters: int = 25_000_000,
    rounds: int = 15,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Take steps of all sides in turn; print their times and what of the link is used.

    Parameters
    ----------
    workers
        Number of workers on each side; they share the devices that are here.
    parameters
        Number of float32 parameters.
    rounds
        Number of measured rounds, after a few to warm up.
    json
        Print only one line of JSON on stdout.
    """
    if not torch.cuda.is_available():
        progress("There is no CUDA device here, so nothing is measured.")
        print_json({"name": "gpu", "skipped": "no CUDA device"})
        return 0
    # NCCL takes one rank for each device.
    backend = "nccl" if torch.cuda.device_count() >= workers else "gloo"
    try:
        with Stage() as stage:
            progress(f"Starting {workers} workers of Paceline and over {backend}, {parameters:,} parameters")
            peer = [sys.executable, str(BENCHMARKS / "peers" / "gpu_reduce.py")]
            sides = Sides(
                stage.start("one", our_command(1, parameters), 1),
                stage.start("paceline", our_command(workers, parameters), workers),
                stage.start(backend, [*peer, "{stage}", backend, str(workers), str(parameters)], workers),
            )
            measured = take_turns(sides, parameters, rounds)
            difference = compare(stage.folder, sides.ours, sides.theirs)
    except PlayFailed as failure:
        print(failure, file=sys.stderr)
        return 1
    tell(backend, workers, parameters, measured, difference, only_json=json)
    return 0 if difference <= TOLERANCE else 1


def our_command(num_workers: int, num_parameters: int) -> list[str]:
    """Return how Paceline's side is started: as a user would."""
    script = [str(BENCHMARKS / "gpu_worker.py"), "{stage}", str(num_parameters)]
    return [sys.executable, "-m", "paceline", "run", "-n", str(num_workers), "--quiet", *script]


def take_turns(sides: Sides, num_parameters: int, num_rounds: int) -> Rounds:
    """Have all sides take a step a round, in another order every round; the warm-up is not counted."""
    link, measured = Link(num_parameters), Rounds()
    turns = [(sides.one, measured.one_s), (sides.ours, measured.ours_s), (sides.theirs, measured.theirs_s)]
    for number in range(-NUM_WARM_UP, num_rounds):
        if number == 0:
            for seconds in (times for _, times in turns):
                seconds.clear()
        for side, seconds in turns[number % 3 :] + turns[: number % 3]:
            side.ask("prepare", number % work.NUM_GRADIENTS)
            seconds.append(side.ask("step").seconds)
        rates = link.to_host(), link.to_device()
        if number >= 0:
            measured.to_host.append(rates[0])
            measured.to_device.append(rates[1])
    return measured


def tell(
    backend: str, num_workers: int, num_parameters: int, measured: Rounds, difference: float, *, only_json: bool
) -> None:
    """Print what was measured."""
    size_bytes = 4 * num_parameters
    one, ours, theirs = (_ms(seconds) for seconds in (measured.one_s, measured.ours_s, measured.theirs_s))
    to_host, to_device = Sample.of(measured.to_host).median / 1e9, Sample.of(measured.to_device).median / 1e9
    rate = Sample.of([2 * size_bytes / seconds / 1e9 for seconds in measured.one_s])
    fraction, ratio, device = measured.link_fraction(size_bytes), measured.ratio, torch.cuda.get_device_name()
    if not only_json:
        why = "" if backend == "nccl" else ", as NCCL takes one worker for each device"
        print(f"push + update + pull of {num_parameters:,} float32 on {device}; {machine()}")
        print(f"  the link              {to_host:.1f} GB/s to the host, {to_device:.1f} GB/s to the device")
        print(f"  Paceline, 1 worker    {one.text(' ms')}, pushed and pulled at {rate.text(' GB/s')},")
        print(f"                        {fraction.text('', 2)} of what the link allows")
        print(f"  Paceline, {num_workers} workers   {ours.text(' ms')}")
        print(f"  all-reduce over {backend:<5} {theirs.text(' ms')}{why}")
        print(f"  ratio                 {ratio.text('x', 2)}")
        verdict = "equal" if difference <= TOLERANCE else "NOT EQUAL"
        print(f"  results               {verdict}: differ by at most {difference:.1e} (tolerance {TOLERANCE:.0e})")
    print_json(
        {
            "name": "gpu",
            "device": device,
            "workers": num_workers,
            "parameters": num_parameters,
            "to_host_gb_per_s": to_host,
            "to_device_gb_per_s": to_device,
            "push_pull_gb_per_s": rate.median,
            "link_fraction": fraction.median,
            "link_fraction_spread": [fraction.low, fraction.high],
            "one_worker_ms": one.median,
            "backend": backend,
            "ratio": ratio.median,
            "ratio_spread": [ratio.low, ratio.high],
            "ours_ms": ours.median,
            "peer_ms": theirs.median,
            "difference": difference,
            "tolerance": TOLERANCE,
        }
    )


def _ms(seconds: list[float]) -> Sample:
    return Sample.of([1e3 * each for each in seconds])


if __name__ == "__main__":
    sys.exit(app())
