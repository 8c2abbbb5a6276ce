"""A cluster of TensorFlow on this machine: a parameter server and workers, for a coordinator that schedules."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

PS: Final = "ps"  # the role of the parameter server
Cluster = dict[str, list[str]]  # addresses by role


def cluster_of(num_workers: int) -> Cluster:
    """Return addresses for the coordinator ("chief"), one parameter server ("ps") and workers, on ports free now."""
    sockets = [socket.socket() for _ in range(num_workers + 2)]
    for each in sockets:
        each.bind(("localhost", 0))
    addresses = [f"localhost:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    return {"chief": addresses[:1], PS: addresses[1:2], "worker": addresses[2:]}


def start(cluster: Cluster, command: Sequence[str]) -> list["subprocess.Popen[bytes]"]:
    """Start the parameter server and the workers: `command ROLE INDEX`, a script that calls `serve` with these."""
    roles = [(PS, 0), *(("worker", index) for index in range(len(cluster["worker"])))]
    return [start_one(cluster, command, role, index) for role, index in roles]


def start_one(cluster: Cluster, command: Sequence[str], role: str, index: int) -> "subprocess.Popen[bytes]":
    """Start one of them."""
    return subprocess.Popen(
        [sys.executable, *command, role, str(index)],
        stdin=subprocess.PIPE,
        env={**os.environ, "TF_CONFIG": json.dumps({"cluster": cluster})},
        start_new_session=True,
    )


def end(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    """End them at once."""
    for process in processes:
        process.kill()
        process.wait()


def serve(role: str, index: int) -> None:
    """Be one process of the cluster, until standard input ends."""
    import tensorflow as tf

    cluster = tf.train.ClusterSpec(json.loads(os.environ["TF_CONFIG"])["cluster"])
    tf.distribute.Server(cluster, job_name=role, task_index=index, protocol="grpc")
    sys.stdin.read()
    os._exit(0)  # a TensorFlow server cannot be stopped
