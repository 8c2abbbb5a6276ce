"""How much of Paceline one training step passes: `python benchmarks/step_path.py [--steps 30] [--list] [--json]`.

Counts the files, the functions and the calls of Paceline that one `optimizer.step()` runs through under bsp, with one
worker and its server in one process, over all threads. What a thread does late for one step counts for the step that
is under way then, and a busy machine has threads wait in turns that an idle one has not: the number of calls is the
lower quartile of many steps, and a function is on the way if three steps of four call it. No time is measured: the hook
that counts makes every call slower.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Final

import torch
from measuring import print_json

import paceline

PACKAGE: Final = f"{Path(paceline.__file__).parent}/"
NUM_WARM_UP: Final = 10
# Frames that only some versions of Python make.
INLINED: Final = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})

Function = tuple[str, str]  # a file below the package, and the qualified name of a function in it
Hook = Callable[[FrameType, str, object], None]


@dataclass(frozen=True, slots=True)
class StepPath:
    """What a step passes.

    Args:
        functions: how many times each function is called in a step, as a lower quartile; those that are called.
        num_calls: lower quartile of all calls of a step.
    """

    functions: dict[Function, int]
    num_calls: int

    @property
    def num_files(self) -> int:
        """In how many files these functions are."""
        return len({file for file, _ in self.functions})

    def folders(self) -> dict[str, tuple[int, int, int]]:
        """Return the number of files, functions and calls by top folder, the busiest first."""
        files = {file for file, _ in self.functions}
        found = {
            folder: (
                sum(_folder(file) == folder for file in files),
                sum(_folder(file) == folder for file, _ in self.functions),
                sum(calls for (file, _), calls in self.functions.items() if _folder(file) == folder),
            )
            for folder in {_folder(file) for file in files}
        }
        return dict(sorted(found.items(), key=lambda item: -item[1][2]))


def step_path(num_steps: int) -> StepPath:
    """Take steps with a small model, in this process alone, and count what they pass."""
    seen: list[CodeType] = []  # appending is atomic, whichever thread does it

    def hook(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            seen.append(frame.f_code)

    threading.setprofile(hook)  # for the threads that Paceline starts from here on
    session = paceline.init()
    try:
        return _sum_up(list(_steps(num_steps, hook, seen)))
    finally:
        threading.setprofile(None)
        session.close()


def _steps(num_steps: int, hook: Hook, seen: list[CodeType]) -> Iterator[Counter[Function]]:
    """Yield what each step has called, in any thread, until it returned."""
    model = torch.nn.Linear(4, 2)
    optimizer = paceline.distributed(torch.optim.SGD(model.parameters(), lr=0.01), consistency=paceline.bsp())
    for number in range(-NUM_WARM_UP, num_steps):
        model(torch.ones(1, 4)).sum().backward()
        seen.clear()
        sys.setprofile(hook)
        try:
            optimizer.step()
        finally:
            sys.setprofile(None)
        called = [code for code in seen if code.co_name not in INLINED]
        if number >= 0:
            yield Counter((code.co_filename.removeprefix(PACKAGE), code.co_qualname) for code in called)


def _sum_up(steps: list[Counter[Function]]) -> StepPath:
    often = {name for step in steps for name in step}
    counts = {name: _lower_quartile([step[name] for step in steps]) for name in sorted(often)}
    functions = {name: count for name, count in counts.items() if count}
    return StepPath(functions, _lower_quartile([step.total() for step in steps]))


def _lower_quartile(counts: list[int]) -> int:
    return int(statistics.quantiles(counts, n=4, method="inclusive")[0])


def _folder(file: str) -> str:
    return file.partition("/")[0]


def main() -> int:
    """Count, and print the numbers by folder."""
    parser = argparse.ArgumentParser(prog="step_path.py", description="Count what one training step passes.")
    parser.add_argument("--steps", type=int, default=30, help="number of steps that are counted (default 30)")
    parser.add_argument("--list", action="store_true", help="print every function, with its calls in a step")
    parser.add_argument("--json", action="store_true", help="print only one line of JSON on stdout")
    options = parser.parse_args()
    path = step_path(options.steps)
    folders = path.folders()
    if not options.json:
        print(f"{'folder':<16}{'files':>8}{'functions':>12}{'calls':>8}")
        for folder, numbers in folders.items():
            print(f"{folder:<16}{numbers[0]:>8}{numbers[1]:>12}{numbers[2]:>8}")
        print(f"{'one step':<16}{path.num_files:>8}{len(path.functions):>12}{path.num_calls:>8}")
    if options.list and not options.json:
        for (file, function), calls in path.functions.items():
            print(f"{calls:>4}  {file}  {function}")
    print_json(
        {
            "name": "step_path",
            "files": path.num_files,
            "functions": len(path.functions),
            "calls": path.num_calls,
            "calls_by_folder": {folder: numbers[2] for folder, numbers in folders.items()},
        }
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
