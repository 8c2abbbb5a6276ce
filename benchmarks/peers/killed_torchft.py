"""torchft: two replicas that train together, one of which is killed. `killed_torchft.py FOLDER CLOCKS [tuned]`.

This process runs the lighthouse and starts a replica again as soon as it has died, as a scheduler would. Tuned, the
lighthouse gives up a replica after half a second of silence in the place of five, and looks more often.
"""

import os
import subprocess
import sys
import time
from datetime import timedelta
from typing import Final

import torch
from kill_log import LR, MOMENTUM, NUM_WORKERS, TUNED, Log, noise
from kill_model import Model
from torch.distributed import TCPStore
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer

REPLICA: Final = "replica"
POLL_S: Final = 0.01
STORE_TIMEOUT: Final = timedelta(seconds=60)
LOOKS_OFTEN: Final = {"heartbeat_timeout_ms": 500, "quorum_tick_ms": 10}


def train(folder: str, num_clocks: int, rank: int) -> None:
    """Be one replica, from the state of the other where that is ahead."""
    torch.set_num_threads(1)
    log = Log(folder, rank, is_target=True)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=STORE_TIMEOUT)
    model = Model()
    inner = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)

    def load(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        replica_id=f"replica_{rank}",
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=os.environ["TORCHFT_LIGHTHOUSE"],
        timeout=timedelta(seconds=30),
    )
    wrapped, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    while (clock := manager.current_step()) < num_clocks:
        optimizer.zero_grad()
        wrapped(noise(rank, clock)).backward()
        optimizer.step()
        if manager.current_step() > clock and manager.is_participating():
            log.step(clock)
    log.end(model.values.detach().numpy())
    manager.shutdown(wait=False)
    os._exit(0)  # threads of the manager go on


def main() -> None:
    """Start the lighthouse and the replicas, and start again what dies."""
    folder, num_clocks = sys.argv[1], sys.argv[2]
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1, **(LOOKS_OFTEN if TUNED in sys.argv[3:] else {}))
    environment = {**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse.address()}

    def start(rank: int) -> "subprocess.Popen[bytes]":
        return subprocess.Popen([sys.executable, __file__, folder, num_clocks, REPLICA, str(rank)], env=environment)

    running = {rank: start(rank) for rank in range(NUM_WORKERS)}
    while running:
        for rank, process in list(running.items()):
            code = process.poll()
            if code == 0:
                del running[rank]
            elif code is not None:
                running[rank] = start(rank)
        time.sleep(POLL_S)
    lighthouse.shutdown()


if __name__ == "__main__":
    if REPLICA in sys.argv:
        train(sys.argv[1], int(sys.argv[2]), int(sys.argv[4]))
    else:
        main()
