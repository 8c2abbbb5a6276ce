"""A worker that adds up tensors with another one on another host, over TLS, until that is out of reach.

python collective_worker.py FOLDER RANK ADDRESS
"""

import sys
from datetime import timedelta
from pathlib import Path

import torch
from tests.collective.groups import CREDENTIALS
from torch._C._distributed_c10d import AllreduceOptions
from torch.distributed import FileStore

from paceline.collective.meeting import FarAccess
from paceline.collective.torch_backend import connect
from paceline.errors import PeerError
from paceline.job.credentials.holders import Holder, tls_settings
from paceline.transport.tcp import TcpTransport
from paceline.wire.messages import Hello

NUMEL, PATIENCE = 250_000, timedelta(seconds=100)


def main() -> None:
    folder, rank, address = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    transport = TcpTransport(CREDENTIALS, tls=tls_settings(folder / "keys", Holder("worker", rank)))
    access = FarAccess(transport, f"tcp://{address}:0", Hello("worker", rank, 0, 1))
    group = connect(FileStore(str(folder / "store"), -1), rank, 2, PATIENCE, lambda: access)
    num_calls = 0
    try:
        while True:
            total = torch.full((NUMEL,), float(rank + num_calls))
            group.allreduce([total], AllreduceOptions()).wait()
            assert bool((total == 1 + 2 * num_calls).all())
            num_calls += 1
            (folder / f"calls-{rank}.new").write_text(str(num_calls))
            (folder / f"calls-{rank}.new").rename(folder / f"calls-{rank}")
    except PeerError as error:
        print(error, flush=True)
    group.shutdown()


if __name__ == "__main__":
    main()
