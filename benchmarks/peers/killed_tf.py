"""TensorFlow's ParameterServerStrategy, the parameter server of which is killed. `killed_tf.py FOLDER CLOCKS [tuned]`.

The coordinator raises UnavailableError then, as its documentation says, and nothing goes on by itself. So this process
starts the whole cluster again, as a scheduler would, and the coordinator begins with what it saved, every so many
clocks. Tuned, it saves in every clock, and only the coordinator and the parameter server start again.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Final

import numpy as np
from kill_log import DECAY, LR, MOMENTUM, NUM_WORKERS, SAVE_EVERY, TUNED, WIDTH, Log, add_target, noise
from tf_cluster import PS, Cluster, cluster_of, end, serve, start, start_one

SERVE: Final = "serve"
COORDINATE: Final = "coordinate"
LOST: Final = 3  # the exit code of a coordinator that has lost the server
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import tensorflow as tf  # noqa: E402 -- reads the variable above when it is imported


def coordinate(folder: str, num_clocks: int, save_every: int) -> None:
    """Train for so many clocks, from what was saved."""
    log = Log(folder, 0, is_target=False)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(json.loads(os.environ["TF_CONFIG"])["cluster"]),
        rpc_layer="grpc",
        task_type="chief",
        task_id=0,
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        values, momentum = tf.Variable(tf.zeros(WIDTH)), tf.Variable(tf.zeros(WIDTH))
        total, clocks = tf.Variable(tf.zeros(WIDTH)), tf.Variable(0, dtype=tf.int64)
    saved = tf.train.Checkpoint(values=values, momentum=momentum, clocks=clocks)
    keeper = tf.train.CheckpointManager(saved, f"{folder}/saved", max_to_keep=2)
    saved.restore(keeper.latest_checkpoint)

    @tf.function
    def push(offset: Any) -> None:  # noqa: ANN401
        total.assign_add((DECAY * values.read_value() + offset) / NUM_WORKERS)

    @tf.function
    def update() -> None:
        with tf.device(values.device):
            tf.raw_ops.ResourceApplyMomentum(
                var=values.handle, accum=momentum.handle, lr=LR, grad=total.read_value(), momentum=MOMENTUM
            )
            total.assign(tf.zeros(WIDTH))
            clocks.assign_add(1)

    for clock in range(int(clocks.numpy()), num_clocks):
        with ThreadPoolExecutor() as both:  # each worker computes, as elsewhere
            offsets = list(both.map(noise, range(NUM_WORKERS), [clock] * NUM_WORKERS))
        for offset in offsets:
            coordinator.schedule(push, args=(tf.constant(np.float32(offset)),))
        coordinator.join()
        update()
        log.step(clock)
        if clock % save_every == save_every - 1:
            keeper.save()
    log.end(values.numpy())


def is_trained(folder: str, cluster: Cluster, arguments: Sequence[str]) -> bool:
    """Run the coordinator; return whether it has come to its end."""
    environment = {**os.environ, "TF_CONFIG": json.dumps({"cluster": cluster})}
    command = [sys.executable, __file__, folder, COORDINATE, *arguments]
    return subprocess.run(command, env=environment, check=False).returncode == 0


def main() -> None:
    """Start what is to run, and again what a scheduler would, until the coordinator comes to its end."""
    folder, arguments = sys.argv[1], sys.argv[2:]
    serve_here = (__file__, folder, SERVE)
    with ExitStack() as running:
        cluster = cluster_of(NUM_WORKERS)
        processes = start(cluster, serve_here)
        running.callback(lambda: end(processes))
        while not is_trained(folder, cluster, arguments):
            print("the coordinator has lost the parameter server", flush=True)
            if TUNED in arguments:
                end(processes[:1])
                processes[:1] = [start_one(cluster, serve_here, PS, 0)]
            else:
                end(processes)
                cluster = cluster_of(NUM_WORKERS)
                processes[:] = start(cluster, serve_here)


if __name__ == "__main__":
    if SERVE in sys.argv:
        if sys.argv[3] == PS:
            add_target(sys.argv[1])
        serve(sys.argv[3], int(sys.argv[4]))
    elif COORDINATE in sys.argv:
        try:
            coordinate(sys.argv[1], int(sys.argv[3]), 1 if TUNED in sys.argv else SAVE_EVERY)
        except tf.errors.OpError as error:
            print(f"{type(error).__name__}: {str(error)[:100]}", flush=True)
            os._exit(LOST)
        os._exit(0)
    else:
        main()
