"""The models of the step benchmark and one worker's loop over them, without communication; also run as `alone`.

Run as `python step_learner.py STAGE MODEL WORKERS THREADS`: workers that learn each for itself.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import torch
from peers.spawning import run_all
from torch import Tensor, nn
from torch.nn import functional
from turns import play

LR: Final = 0.01
MOMENTUM: Final = 0.9
NUM_BATCHES: Final = 4  # of each worker, used in turn

MLP_SIZES: Final = (784, 2048, 2048, 10)
MLP_BATCH: Final = 1024
VOCABULARY: Final = 256
WIDTH: Final = 256
NUM_LAYERS: Final = 4
NUM_HEADS: Final = 4
LENGTH: Final = 128
TRANSFORMER_BATCH: Final = 16

Batch = tuple[Tensor, Tensor]


class Transformer(nn.Module):
    """A small causal language model over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        layer = nn.TransformerEncoderLayer(WIDTH, NUM_HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, NUM_LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        """Return scores of the next byte: (batch, LENGTH) int64 to (batch * LENGTH, VOCABULARY)."""
        hidden = self.layers(self.tokens(text) + self.positions, mask=self.mask, is_causal=True)
        return self.head(hidden).flatten(0, 1)


def make_mlp() -> nn.Module:
    """Return a perceptron with two wide hidden layers."""
    layers = [nn.Linear(a, b) for a, b in pairwise(MLP_SIZES)]
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])


def mlp_batch(random: torch.Generator) -> Batch:
    """Return random inputs and classes."""
    inputs = torch.randn(MLP_BATCH, MLP_SIZES[0], generator=random)
    return inputs, torch.randint(MLP_SIZES[-1], (MLP_BATCH,), generator=random)


def transformer_batch(random: torch.Generator) -> Batch:
    """Return random text and its next bytes."""
    text = torch.randint(VOCABULARY, (TRANSFORMER_BATCH, LENGTH + 1), generator=random)
    return text[:, :-1].contiguous(), text[:, 1:].flatten()


@dataclass(frozen=True, slots=True)
class Task:
    """A model and how to make its batches."""

    make_model: Callable[[], nn.Module]
    make_batch: Callable[[torch.Generator], Batch]


TASKS: Final = {"mlp": Task(make_mlp, mlp_batch), "transformer": Task(Transformer, transformer_batch)}


class Learner:
    """One worker's model and batches; equal first values everywhere, other batches on each rank."""

    def __init__(self, task: str, rank: int) -> None:
        torch.manual_seed(0)
        self.model = TASKS[task].make_model()
        random = torch.Generator().manual_seed(1 + rank)
        self._batches = [TASKS[task].make_batch(random) for _ in range(NUM_BATCHES)]
        self._num_steps = 0

    def make_optimizer(self) -> torch.optim.SGD:
        """Return the plain optimizer."""
        return torch.optim.SGD(self.model.parameters(), lr=LR, momentum=MOMENTUM, fused=True)

    def compute(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Make the gradients of the next batch."""
        inputs, targets = self._batches[self._num_steps % NUM_BATCHES]
        self._num_steps += 1
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), targets).backward()

    def train(self, model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> float:
        """Take some steps; return the seconds spent inside `optimizer.step()`."""
        inside_s = 0.0
        for _ in range(num_steps):
            self.compute(model, optimizer)
            start = time.perf_counter()
            optimizer.step()
            inside_s += time.perf_counter() - start
        return inside_s

    def write(self, path: str) -> None:
        """Write the parameters as raw bytes."""
        torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()]).numpy().tofile(path)


def alone(stage: str, task: str, rank: int, num_threads: int) -> None:
    """Run one worker without any other process."""
    torch.set_num_threads(num_threads)
    learner = Learner(task, rank)
    optimizer = learner.make_optimizer()

    def compute(num_steps: int) -> None:
        for _ in range(num_steps):
            learner.compute(learner.model, optimizer)

    play(stage, rank, {"step": compute, "local": lambda num: learner.train(learner.model, optimizer, num)})


def main() -> None:
    """Run all workers."""
    stage, task, num_workers, num_threads = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    run_all(alone, [(stage, task, rank, num_threads) for rank in range(num_workers)])


if __name__ == "__main__":
    main()
