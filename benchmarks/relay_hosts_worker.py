"""The worker of `relay_hosts.py`: publishes when it is told to, and says when it did.

`relay_hosts_worker.py FOLDER MEGABYTES`: publishes once, then when there are the files `publish-1`, `publish-2` and so
on in the folder.
"""

import itertools
import sys
import time
from pathlib import Path

import torch

import paceline


def main() -> None:
    """Publish until the process is ended."""
    folder, numel = Path(sys.argv[1]), int(sys.argv[2]) << 18
    with paceline.connect() as ps:
        paceline.init(ps)
        table = ps.table("policy", shape=(numel,), update=paceline.update.Adam(lr=1e-3), init=0.05 * torch.randn(numel))
        for number in itertools.count():
            while number and not (folder / f"publish-{number}").exists():
                time.sleep(0.005)
            table.push(torch.randn(numel))  # so that no number is that of the version before
            ps.clock()
            table.pull()
            print(time.monotonic(), flush=True)
            made = paceline.publish(table)
            assert made is not None
            made.wait()


if __name__ == "__main__":
    main()
