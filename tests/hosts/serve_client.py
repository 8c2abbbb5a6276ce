"""A client of two servers of their own that pushes ones and prints the sum, once for each line that it is told."""

import sys
from pathlib import Path

import torch

import paceline


def main() -> None:
    """Connect to the address with the keys of the command line, and end with standard input."""
    address, keys = sys.argv[1:]
    with paceline.connect(address, keys=Path(keys)) as ps:
        table = ps.table("sum", shape=(2,), update=paceline.update.Add(), scale="sum")
        for _ in sys.stdin:
            table.push(torch.ones(2))
            ps.clock()
            sys.stdout.write(f"{float(table.pull()[0])}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
