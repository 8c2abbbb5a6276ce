"""Compare the libraries, built with sanitizers, with torch, on what callers may do and on what they may not.

Started with the sanitizers loaded first; they end the process at the first thing that C does not define.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from paceline.errors import ProtocolBug
from paceline.update import native_steps
from paceline.update.kernels import Operands, SGDKernel
from paceline.update.native_steps import Addends, NativeSteps, StepMemory
from paceline.update.rows import native_ops as native
from paceline.update.rows import ops
from paceline.update.rows.column import RowColumn
from paceline.update.rows.index import RowIndex
from paceline.update.rows.torch_ops import TorchOps

WILD = (-1, -2, 64, 1 << 40, 1 << 62, -(1 << 63), (1 << 63) - 1)


def keys(dice: random.Random, num: int) -> torch.Tensor:
    wide = dice.choice((20, 1 << 62))
    return torch.tensor([dice.randrange(-wide, wide) for _ in range(num)], dtype=torch.int64)


def check_index(dice: random.Random, library: ops.RowOps) -> None:
    """Have indexes by both do the same."""
    both = [RowIndex(each, RowColumn(1, torch.int64)) for each in (library, TorchOps())]
    for _ in range(6):
        ids = keys(dice, dice.choice((0, 1, 33, 900)))
        (slots, added), expected = both[0].add(ids), both[1].add(ids)
        assert torch.equal(slots, expected[0])
        assert torch.equal(added, expected[1])
        gone = both[0].live_slots()[:: dice.choice((1, 2, 7))].contiguous()
        for index in both:
            index.remove(gone)
        assert torch.equal(both[0].find(ids), both[1].find(ids))
    for index in both:
        index.close()


def check_moves(dice: random.Random, library: ops.RowOps) -> None:
    """Have rows moved and summed by both, of which rows are parts of wider ones."""
    width, num = dice.choice((1, 3, 200)), dice.choice((0, 1, 60))
    dtype = dice.choice((torch.float32, torch.float64, torch.bfloat16))
    column = torch.randn(64, width + 1).to(dtype)[:, :width]
    slots = torch.tensor([dice.randrange(-1, 64) for _ in range(num)], dtype=torch.int64)
    outs = [torch.zeros(num, width, dtype=dtype) for _ in range(2)]
    for each, out in zip((library, TorchOps()), outs, strict=True):
        each.gather(column, slots, out)
    assert torch.equal(*outs)
    positions = slots.clamp(min=0)
    assert torch.equal(library.sum_rows(outs[0], positions, 64), TorchOps().sum_rows(outs[0], positions, 64))
    library.scatter(column.clone(), positions.unique(), outs[0][: len(positions.unique())])
    for num_servers in (1, 3, 1024):
        order, counts = library.split(keys(dice, num), num_servers)
        assert len(order) == sum(counts) == num


def check_wrong(dice: random.Random, library: ops.RowOps) -> None:
    """What no caller may do is refused, wherever among what is right it stands, and before it is touched."""
    slots = torch.tensor([dice.randrange(64) for _ in range(dice.randint(1, 60))], dtype=torch.int64)
    slots[dice.randrange(len(slots))] = dice.choice(WILD)
    column, rows, num = torch.ones(64, 2), torch.ones(len(slots), 2), len(slots)
    entries, none = torch.zeros(128, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
    ids, new = torch.arange(64), torch.arange(num) + 1000
    wrong: list[Callable[[], object]] = [
        lambda: library.scatter(column, slots, rows),
        lambda: library.sum_rows(rows, slots, 64),
        lambda: library.erase(entries, ids, slots),
        lambda: library.insert(entries.clone(), ids, new, dice.choice(WILD), none),
        lambda: library.insert(entries.clone(), ids, new, 0, slots),
        lambda: library.rebuild(entries, ids, None, 65),
        lambda: library.rebuild(torch.zeros(64, dtype=torch.int64), ids, None, 64),
        lambda: library.find(none, ids, new),
        lambda: library.find(torch.zeros(3, dtype=torch.int64), ids, new),
        lambda: library.split(new, 0),
    ]
    if (slots < -1).any() or (slots >= 64).any():
        wrong.append(lambda: library.gather(column, slots, rows))
    for call in wrong:
        try:
            call()
        except ProtocolBug:
            continue
        raise AssertionError(f"{slots} was not refused")
    broken = torch.full((128,), -1)  # entries of an index whose slots are free
    broken[::2] = 0
    assert (library.find(broken, ids, new) == -1).all()


def check_steps(dice: random.Random, steps: NativeSteps) -> None:
    """Steps at any address and of any length change what they are given, and nothing beside it."""
    length, start, num = dice.randint(1, 70), dice.randint(1, 9), dice.randint(1, 4)
    memory = [torch.full((96,), torch.nan) for _ in range(2 + num)]
    parts = [each[start : start + length] for each in memory]
    for part in parts:
        part.copy_(torch.randn(length))
    numbers = {"lr": 0.1, "momentum": dice.choice((0.0, 0.9)), "dampening": 0.1, "weight_decay": 0.01}
    numbers |= {"nesterov": dice.random() < 0.5, "maximize": dice.random() < 0.5}
    values, buffer, *gradients = parts
    weights = tuple(dice.choice((0.5, 2.0)) for _ in gradients) if dice.random() < 0.5 else ()
    expected = [values.clone(), buffer.clone()]
    total = sum(each * (weights[i] if weights else 1.0) for i, each in enumerate(gradients)) / 3
    state = {"momentum_buffer": expected[1:]} if numbers["momentum"] else {}
    at = Operands(expected[:1], [total], state, 1.0, fresh=False, spare=torch.empty(2, length))
    SGDKernel("torch.optim.SGD").step(at, numbers)
    given = Addends.of(gradients, weights, 3.0)
    assert given is not None
    skipped = dice.randrange(length)  # the elements before it stay as they are
    state_there = [buffer[skipped:] if numbers["momentum"] else None]
    place = StepMemory.of(skipped, values[skipped:], state_there)
    before = values[:skipped].clone()
    assert steps.step(place, given, range(num), numbers, fresh=False)
    assert torch.equal(values[:skipped], before)
    assert torch.equal(values[skipped:], expected[0][skipped:])
    assert torch.equal(buffer[skipped:], expected[1][skipped:])
    for each in memory:
        assert int(each.isnan().sum()) == len(each) - length
    for wrong in (StepMemory(-1, 1, 0, ()), StepMemory(0, length + 1, 0, ()), StepMemory(length, 1, 0, ())):
        try:
            given.at(wrong, [0])
        except ProtocolBug:
            continue
        raise AssertionError(f"{wrong} was not refused")


def main(rows_path: str, steps_path: str, num_rounds: str) -> None:
    """Run the rounds."""
    library = native.load_library(Path(rows_path))
    assert not isinstance(library, str), library
    stepping = native.load_library(Path(steps_path), native_steps.FUNCTIONS)
    assert not isinstance(stepping, str), stepping
    for seed in range(int(num_rounds)):
        dice = random.Random(seed)
        torch.manual_seed(seed)
        for check in (check_index, check_moves, check_wrong):
            check(dice, native.NativeOps(library))
        if stepping.paceline_can_step():
            for _ in range(20):
                check_steps(dice, NativeSteps(stepping, SGDKernel("torch.optim.SGD")))
    print("sound")


if __name__ == "__main__":
    main(*sys.argv[1:])
