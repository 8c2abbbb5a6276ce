"""Training strategy to plan for: a mesh of data, pipeline and tensor parallelism, and the link between replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Literal

import msgspec
from msgspec.structs import replace

from paceline.errors import UsageError

Joint = Literal["none", "all-reduce", "parameter-server", "colocated-server", "zero-1", "zero-2", "fsdp"]
Schedule = Literal["gpipe", "1f1b"]

SEPARATOR: Final = "+"
_SINGLE: Final = "single"
_RECOMPUTE: Final = "recompute"
SHARDING: Final[Mapping[Joint, int]] = {"zero-1": 1, "zero-2": 2, "fsdp": 3}
SERVED: Final[tuple[Joint, ...]] = ("parameter-server", "colocated-server")
_NAMES: Final = (
    "single, all-reduce, zero-1, zero-2, fsdp, parameter-server:SERVERS, colocated-server:SERVERS, pipeline:STAGES, "
    "tensor:RANKS, recompute, or several of these joined by +"
)


class PlannedStrategy(msgspec.Struct, frozen=True):
    """One way to distribute training over `num_devices` devices.

    Args:
        data: replicas, each with its share of the batch.
        pipeline: stages that the layers are cut into.
        tensor: ranks that split each layer.
        joint: how replicas are kept equal: all-reduce; servers on machines of their own (parameter-server), or also
            beside the workers, in the fastest shares (colocated-server); all-reduce with sharded optimizer state
            (zero-1), also gradients (zero-2) and weights (fsdp).
        num_servers: number of machines with only a server.
        recompute: whether layers keep only their input, and run again for the backward pass.
        schedule: of a pipeline: all forward passes first (gpipe), or each backward pass as early as possible (1f1b).
        num_micro_batches: number of micro-batches of a replica's batch.
    """

    data: int = 1
    pipeline: int = 1
    tensor: int = 1
    joint: Joint = "none"
    num_servers: int = 0
    recompute: bool = False
    schedule: Schedule = "1f1b"
    num_micro_batches: int = 1

    @property
    def num_devices(self) -> int:
        """Number of devices of the mesh, without servers."""
        return self.data * self.pipeline * self.tensor

    @property
    def sharding(self) -> int:
        """Stage of ZeRO: 0 for none, 1 for optimizer state, 2 also for gradients, 3 also for weights."""
        return SHARDING.get(self.joint, 0)

    @property
    def has_servers(self) -> bool:
        """Whether servers keep the values."""
        return self.joint in SERVED

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients keep their memory between steps, for buckets, servers or micro-batches."""
        return self.joint != "none" or self.pipeline > 1 or self.num_micro_batches > 1

    @property
    def num_axes(self) -> int:
        """Number of kinds of parallelism."""
        return sum(size > 1 for size in (self.data, self.pipeline, self.tensor))

    def __str__(self) -> str:
        """Return the text that `parse_strategy` reads.

        >>> str(PlannedStrategy(data=4, pipeline=2, joint="parameter-server", num_servers=2, recompute=True))
        'pipeline:2+parameter-server:2+recompute'
        """
        joint = f"{self.joint}:{self.num_servers}" if self.has_servers else self.joint
        parts = [f"pipeline:{self.pipeline}"] * (self.pipeline > 1) + [f"tensor:{self.tensor}"] * (self.tensor > 1)
        parts += [joint] * (self.joint != "none")
        return SEPARATOR.join((parts or [_SINGLE]) + [_RECOMPUTE] * self.recompute)


def parse_strategy(text: str, num_devices: int) -> PlannedStrategy:
    """Parse a strategy for a number of devices, such as `pipeline:4+tensor:2+all-reduce`.

    Replicas (all-reduce, servers, ZeRO) get the devices that pipeline and tensor leave.

    Raises:
        UsageError: a word is unknown or repeated, or the mesh does not match the devices.

    Example:
        >>> parse_strategy("tensor:2+all-reduce", 8).data
        4
    """
    strategy, seen = PlannedStrategy(), set[str]()
    for word in text.strip().lower().split(SEPARATOR):
        name, _, number = word.strip().partition(":")
        if name not in _WORDS:
            raise UsageError(f"strategy '{text}': '{word}' is not known. Expected {_NAMES}.")
        kind = "joint" if name in _JOINTS else name
        if kind in seen or (_SINGLE in {kind, *seen} and {kind, *seen} - {_SINGLE, _RECOMPUTE}):
            raise UsageError(f"strategy '{text}': '{word}' cannot be joined with what stands before it.")
        seen.add(kind)
        strategy = _WORDS[name](strategy, _number(text, name, number))
    return _on_mesh(text, strategy, num_devices)


def _on_mesh(text: str, strategy: PlannedStrategy, num_devices: int) -> PlannedStrategy:
    """Give the replicas the remaining devices; `single` takes one device."""
    used = strategy.pipeline * strategy.tensor
    if strategy.joint == "none":
        if used not in (1, num_devices):
            raise UsageError(
                f"strategy '{text}' is a mesh of {used} devices and there are {num_devices}. Add all-reduce, fsdp or "
                "servers for the replicas, or change --devices."
            )
        return strategy
    if num_devices % used:
        raise UsageError(
            f"strategy '{text}': {strategy.pipeline} stages of {strategy.tensor} ranks do not divide {num_devices} "
            "devices into whole replicas."
        )
    return replace(strategy, data=num_devices // used)


def _number(text: str, name: str, number: str) -> int:
    """Parse the number after the colon, which some words need."""
    if name not in _NUMBERED:
        if number:
            raise UsageError(f"strategy '{text}': {name} takes no number, got '{number}'.")
        return 0
    least = _NUMBERED[name]
    if not number.isascii() or not number.isdigit() or int(number) < least:
        raise UsageError(f"strategy '{text}': {name} needs a number of {least} or more, as in {name}:{least + 1}.")
    return int(number)


_NUMBERED: Final = {"pipeline": 1, "tensor": 1, "parameter-server": 1, "colocated-server": 0}
_JOINTS: Final = ("all-reduce", "parameter-server", "colocated-server", "zero-1", "zero-2", "zero-3", "fsdp")
_WORDS: Final[Mapping[str, Callable[[PlannedStrategy, int], PlannedStrategy]]] = {
    _SINGLE: lambda strategy, _: strategy,
    _RECOMPUTE: lambda strategy, _: replace(strategy, recompute=True),
    "pipeline": lambda strategy, number: replace(strategy, pipeline=number),
    "tensor": lambda strategy, number: replace(strategy, tensor=number),
    "all-reduce": lambda strategy, _: replace(strategy, joint="all-reduce"),
    "zero-1": lambda strategy, _: replace(strategy, joint="zero-1"),
    "zero-2": lambda strategy, _: replace(strategy, joint="zero-2"),
    "zero-3": lambda strategy, _: replace(strategy, joint="fsdp"),
    "fsdp": lambda strategy, _: replace(strategy, joint="fsdp"),
    "parameter-server": lambda strategy, number: replace(strategy, joint="parameter-server", num_servers=number),
    "colocated-server": lambda strategy, number: replace(strategy, joint="colocated-server", num_servers=number),
}
