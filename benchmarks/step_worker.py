"""One worker of the step benchmark over Paceline; run by `paceline run`."""

import sys

import torch
from step_learner import Learner
from turns import play

import paceline


def main() -> None:
    """Train when asked."""
    stage, task = sys.argv[1], sys.argv[2]
    rank = paceline.init().rank
    learner = Learner(task, rank)
    optimizer = paceline.distributed(learner.make_optimizer(), model=learner.model, scale="mean")
    acts = {
        "step": lambda num_steps: learner.train(learner.model, optimizer, num_steps),
        "write": lambda folder: learner.write(f"{folder}/{rank}"),
        "threads": lambda _: torch.get_num_threads(),
    }
    play(stage, rank, acts)


if __name__ == "__main__":
    main()
