"""TensorFlow's ParameterServerStrategy with a custom loop: one parameter server, and a coordinator that schedules.

Workers add their share of the mean to a sum on the server; when all have, one call updates there with momentum, and
every worker reads the values. Run as `python tf_strategy.py STAGE WORKERS PARAMETERS`.
"""

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import work
from tf_cluster import Cluster, cluster_of, serve, start
from turns import END_TIMEOUT_S, play

SERVE: Final = "serve"  # instead of a stage: be one of the cluster's servers, until standard input ends
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"

import tensorflow as tf  # noqa: E402 -- reads the variable above when it is imported


def write_gradients(folder: Path, num_workers: int, num_parameters: int) -> list[list[str]]:
    """Write the gradients of all workers to files; return their paths by worker and index."""
    paths = [[str(folder / f"{rank}.{index}") for index in range(work.NUM_GRADIENTS)] for rank in range(num_workers)]
    for rank, each in enumerate(paths):
        for gradient, path in zip(work.gradients(rank, num_parameters), each, strict=True):
            work.write(gradient, path)
    return paths


def held_gradients(paths: list[list[str]]) -> Callable[[], Any]:
    """Return a function that makes a dataset of all gradients, read once and held in a worker's memory.

    Any worker may be given any share of the work, so each holds them all.
    """

    def dataset() -> Any:  # noqa: ANN401
        read = [[tf.io.decode_raw(tf.io.read_file(path), tf.float32) for path in each] for each in paths]
        return tf.data.Dataset.from_tensors(read).repeat()

    return dataset


def take_turns(stage: str, cluster: Cluster, num_parameters: int, folder: Path) -> None:
    """Be the coordinator."""
    num_workers = len(cluster["worker"])
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster), rpc_layer="grpc", task_type="chief", task_id=0
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        values = tf.Variable(work.first_values(num_parameters))
        momentum = tf.Variable(tf.zeros(num_parameters))
        total = tf.Variable(tf.zeros(num_parameters))
    paths = write_gradients(folder, num_workers, num_parameters)
    held = iter(coordinator.create_per_worker_dataset(held_gradients(paths)))

    def pusher(rank: int, index: int) -> Callable[[Any], None]:
        @tf.function
        def push(iterator: Any) -> None:  # noqa: ANN401
            total.assign_add(next(iterator)[rank][index] / num_workers)

        return push

    pushes = [[pusher(rank, index) for rank in range(num_workers)] for index in range(work.NUM_GRADIENTS)]

    @tf.function
    def update() -> None:
        with tf.device(values.device):
            tf.raw_ops.ResourceApplyMomentum(
                var=values.handle, accum=momentum.handle, lr=work.LR, grad=total.read_value(), momentum=work.MOMENTUM
            )
            total.assign(tf.zeros(num_parameters))

    @tf.function
    def pull() -> Any:  # noqa: ANN401
        return tf.identity(values.read_value())[0]  # only what is returned goes on to the coordinator

    chosen: list[int] = [0]

    def prepare(index: int) -> None:
        chosen[0] = index

    def step(_: object) -> None:
        for push in pushes[chosen[0]]:
            coordinator.schedule(push, args=(held,))
        coordinator.join()
        coordinator.schedule(update)
        coordinator.join()
        for _rank in range(num_workers):
            coordinator.schedule(pull)
        coordinator.join()

    acts = {
        "prepare": prepare,
        "step": step,
        "write": lambda written: work.write(values.numpy(), f"{written}/0"),
        "threads": lambda _: tf.config.threading.get_intra_op_parallelism_threads() or os.cpu_count(),
    }
    play(stage, 0, acts)


def main() -> None:
    """Run the cluster and coordinate it."""
    if sys.argv[1] == SERVE:
        serve(sys.argv[2], int(sys.argv[3]))
        return
    stage, num_workers, num_parameters = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    cluster = cluster_of(num_workers)
    processes = start(cluster, [__file__, SERVE])
    try:
        with tempfile.TemporaryDirectory() as folder:
            take_turns(stage, cluster, num_parameters, Path(folder))
    finally:
        for process in processes:
            process.kill()
            process.wait(END_TIMEOUT_S)
    os._exit(0)  # the coordinator's threads wait for the cluster that is gone


if __name__ == "__main__":
    main()
