"""A launcher on a Ray cluster of its own, of several nodes on this machine; it runs one job after the other.

Its arguments are the nodes, each with its resources as JSON; without any, there are two.
Each line of the standard input is a job, the arguments of `paceline.ray.run` as JSON; `END code` ends its output.
"""

import json
import os
import signal
import sys
from typing import Any
from unittest.mock import patch

from paceline.ray.engine import OBJECT_STORE_BYTES, OWN_CLUSTER

# Ray looks at these when it is imported. It kills no actors because others fill the memory of this machine.
os.environ.update(OWN_CLUSTER, RAY_AUTH_TOKEN="0" * 64, RAY_memory_monitor_refresh_ms="0")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell ignores it, and so would we


NODES: list[dict[str, Any]] = [{"num_cpus": 3}, {"num_cpus": 3, "resources": {"second": 3}}]


def main() -> None:
    import ray
    from ray.cluster_utils import Cluster

    common = {"object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
    head, *others = [json.loads(argument) for argument in sys.argv[1:]] or NODES
    cluster = Cluster(initialize_head=True, head_node_args={**common, **head})
    for node in others:
        cluster.add_node(**common, **node)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    try:
        print("END 0", flush=True)
        for line in sys.stdin:
            print(f"END {answer(json.loads(line))}", flush=True)
    finally:
        ray.shutdown()
        cluster.shutdown()


def answer(job: dict[str, Any]) -> int:
    from paceline.errors import PacelineError
    from paceline.ray import run

    variables = job.pop("variables", {})
    try:
        with patch.dict(os.environ, variables):
            return run(**job)
    except PacelineError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return -1


if __name__ == "__main__":
    main()
