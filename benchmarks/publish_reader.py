"""A reader of `publish.py`: does what its standard input says, one word a line, and answers each with a line of JSON.

`follow` takes versions until there is none for a while, `pull` the newest one; `swap` gives versions to a module.

`publish_reader.py SOURCE [TOKEN]`
"""

import json
import sys
import time

import torch

import paceline
from paceline.errors import DeadlineExceeded
from paceline.versions.swap import ForwardGate, pairs_of

NUM_SWAPS, QUIET_S = 20, 3.0


def _size(tensor: torch.Tensor) -> int:
    return tensor.nbytes


def main() -> None:
    """Obey until the input ends."""
    with paceline.subscribe(sys.argv[1], token=sys.argv[2] if sys.argv[2:] else None) as reader:
        for line in sys.stdin:
            match line.strip():
                case "follow":
                    came: dict[int, float] = {}
                    try:
                        while True:
                            number = reader.wait(timeout_s=QUIET_S).number
                            came[number] = time.monotonic()
                    except DeadlineExceeded:
                        answer: object = came
                case "pull":
                    version = reader.latest()
                    answer = [version.digest, version.received_bytes, sum(map(_size, version.values()))]
                case "swap":
                    version, gate, pauses = reader.latest(), ForwardGate(), list[float]()
                    (weight,) = version.values()
                    module = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
                    for _ in range(NUM_SWAPS):
                        gate.enter()
                        gate.offer(version.number, pairs_of(module, {"weight": weight}))
                        gate.leave()
                        began_s = time.perf_counter()
                        gate.enter()
                        pauses.append(time.perf_counter() - began_s)
                        gate.leave()
                    answer = pauses
                case _:
                    answer = []
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
