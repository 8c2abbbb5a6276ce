"""The page of the manual that says how far each strategy is from plain torch: `python -m tests.equivalence.page`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.equivalence.cells import AXES, one_by_one
from tests.equivalence.running import STRATEGIES, run_cells
from tests.tidy.tree import ROOT

PAGE = ROOT / "docs" / "equivalence.md"
Entries = dict[tuple[str, str], str]  # what stands under a strategy in the row of a loop

_ABOUT = """# Equal to plain torch

What a training loop learns under each strategy, beside what plain torch learns with the batches of all workers. Each
row changes the plainest loop in one way; an entry says how far the parameters of any worker are from those of plain
torch at the end, at most:

- `=` equal, to 1e-10 in double precision: all that is left is the order of additions;
- a number: different, by so much, for a reason that [stands below](#what-differs-and-why);
- `refused`: by an error that says why, on every worker, before anything wrong is learned
  ([why](#what-is-refused-and-why)).

The plainest loop is three epochs of two or more steps of SGD with Nesterov momentum and weight decay, on a
convolution and a linear layer. Two workers have the batches by `paceline.shard`, or one where it says *alone*: what
asynchronous strategies learn together differs from run to run.
"""

_EXACT = tuple(name for name in STRATEGIES if not name.startswith(("local", "diloco")))
_LOCAL = tuple(name for name in STRATEGIES if name not in _EXACT)

_REASONS = """
## What differs, and why

Workers of [local SGD and DiLoCo](local_sgd.md) step by themselves, and exchange how far they have come. That is
another algorithm, whose sizes these are; none of them is an error of arithmetic.

- `local-sgd:1` with SGD is equal, with momentum too: both are linear in the gradient. The mean of two steps of Adam
  is not the step of Adam for the mean gradient, and so for every optimizer that divides or takes signs.
- Where batches differ in size, the momentum of a worker stands for its own samples, not for its share of all.
- A checkpoint of worker 0 has the state of worker 0 alone.
- `local-sgd:2` and `diloco:2` exchange every second step; DiLoCo has an outer momentum beside.

Together, workers under ssp, essp, asynchronous and [Downpour](downpour.md) learn from values that lack some pushes of
others, or apply each push in full: see [consistency](consistency.md). Layers that look at the whole batch (BatchNorm)
see their worker's part of it.

## What is refused, and why

| What | Where | Why |
|---|---|---|
| LBFGS | everywhere | it evaluates the model several times a step |
| `SyncBatchNorm` | CPUs, or no group of torch's | torch would silently combine no batches: take BatchNorm |
| `add_param_group` | everywhere | parameters are laid out at the start: freeze those that are to join later |
| a class that torch does not have | on servers | they run no code from outside: name it as [a rule](api.md) |
| Adafactor, Muon | fsdp | they look at whole tensors, of which a worker has a slice |
| Rprop | fsdp | torch cannot run it on slices |
| several backwards without `accumulate()` | overlap | the first one has sent its gradients |
| `factors=True` | all but pushes of whole models to servers | nothing else adds up gradients where they arrive |
| a parameter that is unused | all-reduce, groups of it | take `paceline.strategies.all_reduce(unused=True)` |

Some changes are refused where they meet. A worker without a batch takes part in one backward a step, and in one
forward. So batches that do not divide do not go with several backwards without `accumulate()` under all-reduce and
groups of it, and not with accumulation under fsdp. And a group under all-reduce cannot have all of its parameters
frozen.

## Dtypes

Tables have float64, float32, bfloat16 or float16.

| | Works | Else |
|---|---|---|
| Parameters | these four; several in one model have a table each | complex: `torch.view_as_real` |
| | | integers, float8: leave them out of the optimizer |
| under fsdp, or cut by `parallelize` | one of the four for all | convert the model |
| Buffers | of these four, also mixed, follow the mean | others, and sparse ones, stay with each worker |
| Tables, rows | what is pushed in another dtype is converted | float64 counts exactly up to 2^53 |
| `all_reduce`, `reduce` | the four, complex, int8 to int64, uint8 | convert the others |
| `broadcast`, `all_gather`, `send` | these, bool, float8, uint16 to uint64 | |

Values and the state of the optimizer have the dtype of their parameters on servers, as they have in torch; numbers of a
state that follow torch's default dtype (ASGD, NAdam) have float32 there, which after `set_default_dtype(float64)`
differs by some 1e-9. Where parameters of several dtypes have a table each, `clip_gradients` clips each by its own norm.
`tests/training/test_dtypes.py` and `test_buffers.py`, and `tests/collective/test_operations.py`, hold this.

## Compiled models

`torch.compile(model)` goes with every strategy: `paceline.distributed` is given the model itself, the loop calls the
compiled one. What Paceline hooks to a model runs outside of the compiled code. Tried on two workers on CPUs with torch
2.13: its default compiler, inductor, under bsp, with `overlap=True`, ssp, all-reduce and fsdp. A network of two layers
under AdamW ends with the loss of the same loop without it, to 1e-6 where nothing depends on timing
(`python -m pytest -m campaign tests/training/test_compiled.py`); with BatchNorm it differs by as much as in plain
torch. Not tried: CUDA, and models cut by `parallelize`.

## How this page is made

`python -m tests.equivalence.page` runs every loop and writes the page; `tests/equivalence` checks that its entries
are what comes out, for some strategies with each `make test`, and for all with `make campaign`. The campaign also
runs loops in which each of these changes meets every other one: where all are equal alone they are equal together,
but for those that are refused where they meet.
"""


def rows() -> list[tuple[str, str]]:
    """Return the name of each row, and the axis that it is of."""
    axes = {value: axis for axis, values in AXES.items() for value in values[1:]}
    return [(cell.name, axes.get(cell.name, "")) for cell in one_by_one()]


def render(entries: Entries) -> str:
    """Return the page."""
    tables = [_table(names, entries) for names in (_EXACT, _LOCAL)]
    heads = ("\n## Strategies that learn the same\n\n", "\n## Strategies that are other algorithms\n\n")
    return "".join([_ABOUT, heads[0], tables[0], heads[1], tables[1], _REASONS])


def _table(names: tuple[str, ...], entries: Entries) -> str:
    lines = [f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    before = ""
    for row, axis in rows():
        title = f"**{axis}**: {row}" if axis != before else row
        before = axis
        lines.append(f"| {title} | {' | '.join(entries[name, row] for name in names)} |")
    return "\n".join(lines) + "\n"


def read(page: str) -> Entries:
    """Return the entries of a page."""
    entries: Entries = {}
    names: list[str] = []
    for line in page.splitlines():
        title, *found = [one.strip() for one in line[1:-1].split("|")] if line.startswith("|") else ["nothing"]
        if found and not title:
            names = found
        elif found and set(names) <= STRATEGIES.keys() and len(found) == len(names) and title != "---":
            entries |= {
                (name, title.partition("**: ")[2] or title): one for name, one in zip(names, found, strict=True)
            }
    return entries


def entries_of(name: str, directory: Path) -> dict[str, str]:
    """Return the entries under a strategy, from running its loops."""
    return {cell.name: str(one) for cell, one in run_cells(STRATEGIES[name], list(one_by_one()), directory).items()}


def main(names: Mapping[str, object]) -> None:
    """Run the loops under these strategies, or all, and write the page; the others keep their entries."""
    entries = read(PAGE.read_text()) if PAGE.exists() else {}
    for name in names or STRATEGIES:
        with TemporaryDirectory() as directory:
            entries |= {(name, row): one for row, one in entries_of(name, Path(directory)).items()}
        print(f"{name}: done")
    PAGE.write_text(render(entries))


if __name__ == "__main__":
    main(dict.fromkeys(sys.argv[1:]))
