"""Base of the collective strategies: all workers step at once, with the same gradients and hyperparameters."""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, Final, Literal, TypeAlias, get_args

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.collective.failures import names
from paceline.errors import UsageError
from paceline.model_parallel.mesh import Mesh
from paceline.training.strategy import Distributed, Settings, TrainingJob
from paceline.update.summing import num_nonfinite
from paceline.worker.pushes import NONFINITE_ADVICE, some_parameters
from paceline.worker.validation import as_count

# The numbers of each group, by name; _PRESENT: which parameters it steps.
GroupNumbers: TypeAlias = list[dict[str, Any]]

# What all do at the same time.
_EVALUATION: Final = "forward without gradients"
Together: TypeAlias = Literal[
    "forward", "forward without gradients", "backward", "clip_gradients", "step", "snapshot", "state_dict"
]
_CALLS: Final = {"clip_gradients", "snapshot", "state_dict"}  # of them, those that a script makes beside the loop

_MOST_NUMBERS: Final = 4
_PRESENT: Final = "has gradient"
_COMPARED_EVERY: Final = 100  # steps: the values of all replicas, to the bit; in the first one too
_COMPARED_EARLY: Final = (8, 16, 32, 64)  # behind so many steps, for runs that are short


class AgreedHyperparameters(msgspec.Struct, frozen=True):
    """The hyperparameters of an optimizer as they are now: what schedulers change, and what all workers step with.

    With them travels which parameters have a gradient: one of zeros is a step too, of momentum and decay.

    Those count that the class of the optimizer knows and that can be written down: numbers, words, and tuples of them.
    A learning rate in a tensor is its value.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> AgreedHyperparameters(torch.optim.SGD([weight], lr=0.5)).now()[0]["lr"]
        0.5
    """

    optimizer: torch.optim.Optimizer

    def now(self) -> GroupNumbers:
        """Return the numbers of each group."""
        return [dict(self._of(group)) for group in self.optimizer.param_groups]

    def encoded(self) -> bytes:
        """Return the numbers of each group as they travel, with the parameters that have gradients."""
        told = self.now()
        for group, numbers in zip(self.optimizer.param_groups, told, strict=True):
            numbers[_PRESENT] = "".join("01"[parameter.grad is not None] for parameter in group["params"])
        return json.dumps(told).encode()

    def align_gradients(self, told: bytes | None) -> None:
        """Have gradients where another worker has them: zeros that are missing here, and no others; None: as they are.

        They differ where a script keeps zeros, as `zero_grad(set_to_none=False)` does, and this worker had no batch.
        """
        groups = json.loads(told) if told is not None else []
        for group, numbers in zip(self.optimizer.param_groups, groups, strict=False):
            for parameter, is_present in zip(group["params"], numbers[_PRESENT], strict=True):
                if is_present == "0":
                    parameter.grad = None
                elif parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)

    @contextmanager
    def held(self, told: bytes | None) -> Generator[None]:
        """Have the groups hold the numbers of another worker for the length of a `with` block; None: their own.

        What the schedulers of this worker have set is back after it.
        """
        before = self.now() if told is not None else []
        if told is not None:
            self._set(json.loads(told))
        try:
            yield
        finally:
            self._set(before)

    def _of(self, group: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        for key in self.optimizer.defaults:
            value = _plain(group.get(key))
            if all(isinstance(one, int | float | str | None) for one in _items(value)):
                yield key, value

    def _set(self, told: GroupNumbers) -> None:
        for group, numbers in zip(self.optimizer.param_groups, told, strict=False):
            for key, value in numbers.items():
                own = group.get(key)
                if key == _PRESENT:
                    continue
                if isinstance(own, Tensor):
                    own.fill_(value)
                else:
                    group[key] = tuple(value) if isinstance(value, list) else value


def numbers_of_first(
    mesh: Mesh, own: bytes, *, has_batch: bool, values: int = 0, group: dist.ProcessGroup | None = None
) -> bytes | None:
    """Return the hyperparameters of the first replica that has a batch where they differ from `own`, else None.

    Blocks until all workers that hold the same part call it.

    Args:
        mesh: of workers, where those along "data" hold the same part.
        own: the hyperparameters of this replica.
        has_batch: whether it has a batch in this step.
        values: a digest of what has to be the same on all replicas.
        group: of the workers that step together. Default: those along "data".

    Raises:
        UsageError: the digests differ.
    """
    group, rank = group or mesh.group("data"), mesh.worker_set.rank
    told = agree_on(mesh, "step", digest_of(own), values, len(own), int(has_batch), group=group)
    with mesh.explained("hyperparameters of a step", group):
        require_equal_values(rank, [dist.get_global_rank(group, i) for i, one in enumerate(told) if one[1] != values])
        if len({one[0] for one in told}) == 1:
            return None
        first = next((index for index, one in enumerate(told) if one[3]), 0)
        content = broadcast_content(group, first, own, told[first][2])
    return None if first == group.rank() else content


def broadcast_content(group: dist.ProcessGroup, source: int, own: bytes, size_bytes: int) -> bytes:
    """Return what the worker of rank `source` in a group has, of a size that all know; blocks until all call it."""
    content = torch.zeros(size_bytes, dtype=torch.uint8)
    if source == group.rank():
        content = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    dist.broadcast(content, src=dist.get_global_rank(group, source), group=group)
    return content.numpy().tobytes()


def agree_on(mesh: Mesh, what: Together, *numbers: int, group: dist.ProcessGroup | None = None) -> list[list[int]]:
    """Exchange what comes next, and up to four numbers, with a group: by default those that hold the same part.

    Blocks until all of them call it; returns their numbers, by rank in the group.

    Raises:
        UsageError: another worker comes to something else; no data has been sent then.
    """
    group, kinds = group or mesh.group("data"), get_args(Together)
    words = torch.tensor([kinds.index(what), *numbers, *[0] * (_MOST_NUMBERS - len(numbers))])
    found = [torch.empty_like(words) for _ in range(group.size())]
    with mesh.explained(what, group):
        dist.all_gather(found, words, group=group)
    told = [one.tolist() for one in found]
    for index, (kind, *_) in enumerate(told):
        if kinds[kind] != what:
            raise UsageError(
                f"worker {mesh.worker_set.rank}: expected a {what} of every worker, got a {kinds[kind]} from worker "
                f"{dist.get_global_rank(group, index)}. {_advice(what, kinds[kind])}"
            )
    return [numbers for _, *numbers in told]


def _advice(*kinds: str) -> str:
    """Return what to do where workers come to several kinds of calls at once."""
    calls = [f"optimizer.{kind}()" for kind in kinds if kind in _CALLS]
    if not calls and _EVALUATION in kinds:
        return (
            "Every forward takes all workers, but those inside of `with optimizer.snapshot():`, which all enter and "
            "where one may evaluate alone."
        )
    if not calls:
        return (
            "All run the model equally often in each step: where batches do not divide by the workers, one without a "
            "batch runs it once."
        )
    return (
        f"Every worker has to call {' and '.join(calls)}: leave no such call to `if paceline.rank() == 0:`, which is "
        "for what one worker does with the result."
    )


def require_equal_values(rank: int, others: Sequence[int]) -> None:
    """Raise UsageError if there are workers whose replica has other values than that of this one."""
    if others:
        raise UsageError(
            f"worker {rank}: its parameters are not those of {names(others)}. A script has changed them, or gradients "
            "behind backward, on some workers only, or machines round differently. Load values before "
            "paceline.distributed, or call optimizer.load_state_dict(...) on all workers, which sets them to those of "
            "worker 0."
        )


def digest_of(content: bytes) -> int:
    """Return 63 bits that differ wherever contents do: what workers compare in place of these.

    >>> digest_of(b"lr=0.1") == digest_of(b"lr=0.1"), digest_of(b"lr=0.1") == digest_of(b"lr=0.2")
    (True, False)
    """
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "big") >> 1


def are_compared(num_steps: int) -> bool:
    """Return whether the values of all replicas are compared in the step behind so many.

    >>> [step for step in range(300) if are_compared(step)]
    [0, 8, 16, 32, 64, 100, 200]
    """
    return num_steps % _COMPARED_EVERY == 0 or num_steps in _COMPARED_EARLY


def digest_of_values(tensors: Sequence[Tensor]) -> int:
    """Return a digest of the bits of some tensors; it reads all of them once."""
    return digest_of(repr([_sum_of_bits(tensor) for tensor in tensors]).encode())


def _sum_of_bits(tensor: Tensor) -> int:
    """Return the sum of a tensor's memory as whole numbers of eight bytes, which is as fast as memory."""
    flat = tensor.detach().reshape(-1)
    flat = flat.clone() if flat.storage_offset() * flat.element_size() % 8 else flat
    content = flat.view(torch.uint8)
    edge = len(content) - len(content) % 8
    return int(content[:edge].view(torch.int64).sum()) + int(content[edge:].sum(dtype=torch.int64))


def _plain(value: object) -> object:
    """Return what a tensor of one number, or a number of numpy, holds."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else value
    return value.item() if isinstance(value, np.generic) else value


def _items(value: object) -> Sequence[object]:
    return value if isinstance(value, list | tuple) else (value,)


NOT_FINITE = "the combined gradients have NaN or infinity: a worker's loss was not finite, or the rate is too high"


class CollectiveOptimizer(Distributed):
    """Optimizer used like the one it wraps; all workers with the same part of a model step it identically.

    Attributes:
        num_refused: steps that were not taken, by any worker, because the combined gradients were not finite.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, way: str, settings: Settings, job: TrainingJob) -> None:
        super().__init__(optimizer, way, settings, job)
        self.turn_s = time.monotonic()
        self.state = optimizer.state
        self._optimizer = optimizer
        self._numbers = AgreedHyperparameters(optimizer)

    def receive(self) -> None:
        """Do nothing: every worker has computed its new values itself."""

    def wait_for_values(self) -> None:
        """Do nothing: parameters are complete after every step."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped optimizer."""
        return self._optimizer.state_dict()

    def _set_state(self, numbered: dict[str, Any]) -> None:
        """Load a state into the wrapped optimizer, and share its resulting objects."""
        self._optimizer.load_state_dict(numbered)
        self.param_groups, self.state = self._optimizer.param_groups, self._optimizer.state

    def _step_unless(self, problem: str) -> None:
        """Step, unless there is a problem, which is the same on all workers, so that all do the same.

        So is the result of a GradScaler, which checks combined gradients.
        """
        self.turn_s = time.monotonic()
        rank = self._job.rank
        if self.overflowed:
            self.num_refused += 1
        elif not problem:
            self._optimizer.step()
        elif self._settings.nonfinite == "halt":
            raise UsageError(f"worker {rank}, step of '{self._settings.name}': {problem}{self._where()}")
        else:  # the problem is the same on all workers, so one of them reports it
            self._note_refused(f"{problem}{self._where()}; no worker took it. {NONFINITE_ADVICE}", is_told=rank == 0)

    def _where(self) -> str:
        """Return a phrase with the parameters known here whose combined gradients are not finite."""
        found = [(name, tensor.grad) for name, tensor in self._named().items() if tensor.grad is not None]
        bad = [name for name, gradient in found if num_nonfinite(gradient)]
        return f", in {some_parameters(bad, len(found))}" if bad else ""

    def _named(self) -> Mapping[str, Tensor]:
        """Return the parameters that this worker has as a whole, by name."""
        return {}


def checked_weight(samples: float) -> float:
    """Return a weight that the script has set; raises UsageError unless it is a number of more than 0."""
    weight = as_count(samples, "weigh")
    if not weight:
        raise UsageError("weigh got 0 samples, expected more than 0.")
    return weight


def require_weighed(where: str, scale: str, samples: float | None, done: float) -> float:
    """Return the weight of gradients, which backward has weighted by `done`.

    Raises:
        UsageError: the step names another number of samples, which is too late.
    """
    if samples is not None and scale == "samples" and samples != done:
        raise UsageError(
            f"{where}: samples={samples:g}, but backward has weighed the gradients by {done:g}: call "
            f"optimizer.weigh({samples:g}) before backward."
        )
    return done if samples is None else samples
