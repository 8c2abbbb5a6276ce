"""TensorFlow's ParameterServerStrategy, the parameter server of which is killed. `killed_tf.py FOLDER CLOCKS`.

The coordinator raises UnavailableError then, as its documentation says, and nothing goes on by itself. So this process
starts the whole cluster again, as a scheduler would, and the coordinator begins with what it saved, every so many
clocks.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
from kill_log import DECAY, LR, MOMENTUM, NUM_WORKERS, SAVE_EVERY, WIDTH, Log, add_target, noise
from tf_cluster import cluster_of, serve, start

SERVE: Final = "serve"
COORDINATE: Final = "coordinate"
LOST: Final = 3  # the exit code of a coordinator that has lost the server
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import tensorflow as tf  # noqa: E402 -- reads the variable above when it is imported


def coordinate(folder: str, num_clocks: int) -> None:
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
        if clock % SAVE_EVERY == SAVE_EVERY - 1:
            keeper.save()
    log.end(values.numpy())


def run_once(folder: str, num_clocks: str) -> bool:
    """Start a cluster and train; return whether that came to its end."""
    cluster = cluster_of(NUM_WORKERS)
    processes = start(cluster, [__file__, folder, SERVE])
    try:
        ended = subprocess.run(
            [sys.executable, __file__, folder, COORDINATE, num_clocks],
            env={**os.environ, "TF_CONFIG": json.dumps({"cluster": cluster})},
            check=False,
        )
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return ended.returncode == 0


def main() -> None:
    """Run cluster after cluster until one comes to the end."""
    folder, num_clocks = sys.argv[1], sys.argv[2]
    while not run_once(folder, num_clocks):
        print("the coordinator has lost the parameter server; all start again", flush=True)


if __name__ == "__main__":
    if SERVE in sys.argv:
        if sys.argv[3] == "ps":
            add_target(sys.argv[1])
        serve(sys.argv[3], int(sys.argv[4]))
    elif COORDINATE in sys.argv:
        try:
            coordinate(sys.argv[1], int(sys.argv[3]))
        except tf.errors.OpError as error:
            print(f"{type(error).__name__}: {str(error)[:100]}", flush=True)
            os._exit(LOST)
        os._exit(0)
    else:
        main()
