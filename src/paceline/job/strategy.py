"""The ways to distribute training that can be chosen by a line of text, `ssp:3+pipeline:2` for example."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec.structs import replace

from paceline.core.consistency import FORMS, Consistency, is_named
from paceline.errors import UsageError

ALL_REDUCE: Final = "all-reduce"
PARAMETER_SERVER: Final = "parameter-server"
FSDP: Final = "fsdp"
LOCAL_SGD: Final = "local-sgd"
DILOCO: Final = "diloco"
DOWNPOUR: Final = "downpour"

SEPARATOR: Final = "+"
# What may stand behind a name is the number of steps between two exchanges, here the one that is taken else.
_STEPS: Final[Mapping[str, int]] = {LOCAL_SGD: 10, DILOCO: 50, DOWNPOUR: 1}
_PLAIN: Final = (PARAMETER_SERVER, ALL_REDUCE, FSDP)
_AXES: Final = {"pipeline": "pipeline", "tensor": "tensor", FSDP: "shards"}  # the field with the number behind a name
_NAMES: Final = (
    f"parameter-server, {', '.join(FORMS)}, all-reduce, fsdp, local-sgd:STEPS, diloco:STEPS or "
    "downpour:STEPS; pipeline:STAGES; tensor:RANKS; fsdp:WORKERS; or these joined by +"
)


class Distribution(msgspec.Struct, frozen=True):
    """How the workers of a job share the work.

    Args:
        data: how replicas of the model become one; None where the text does not say it.
        steps: between two exchanges of replicas that step by themselves, 0 for others.
        consistency: of the parameter server, where the text says it.
        pipeline: stages that the layers are cut into.
        tensor: ranks that each layer is split over.
        shards: neighbouring replicas that keep one model between them, each a slice of every parameter.
    """

    data: str | None = None
    steps: int = 0
    consistency: str | None = None
    pipeline: int = 1
    tensor: int = 1
    shards: int = 1

    @property
    def ranks_per_replica(self) -> int:
        """Number of workers that hold one model between them."""
        return self.pipeline * self.tensor

    @property
    def needs_servers(self) -> bool:
        """Whether servers hold tables, and not only barriers."""
        return self.data not in (ALL_REDUCE, FSDP)

    def needs_all(self, num_workers: int) -> bool:
        """Whether none of so many workers can take a step without each of the others."""
        holds_one_model = self.ranks_per_replica * self.shards == num_workers
        return num_workers > 1 and (holds_one_model or not self.needs_servers)

    def num_replicas(self, num_workers: int) -> int:
        """Return how many models so many workers hold.

        Raises:
            UsageError: the workers do not divide into whole replicas, or these into groups that keep slices.
        """
        whole = self.ranks_per_replica * self.shards
        if self.shards > 1 and num_workers % whole:
            raise UsageError(
                f"strategy '{self}': {whole} workers keep a model in slices, and {num_workers} workers do not divide "
                f"by that: take -n {whole * max(1, num_workers // whole)}."
            )
        if num_workers % self.ranks_per_replica:
            raise UsageError(
                f"strategy '{self}': {self.pipeline} stages of {self.tensor} ranks need {self.ranks_per_replica} "
                f"workers a replica, and {num_workers} workers do not divide by that: take -n "
                f"{self.ranks_per_replica * max(1, num_workers // self.ranks_per_replica)}."
            )
        return num_workers // self.ranks_per_replica

    def __str__(self) -> str:
        """Write it as it is read.

        >>> str(Distribution.parse("pipeline:2+SSP:3"))
        'ssp:3+pipeline:2'
        """
        data = self.consistency or (f"{self.data}:{self.steps}" if self.steps else self.data)
        axes = {"pipeline": self.pipeline, "tensor": self.tensor, FSDP: self.shards}
        parts = [data or "", *(f"{name}:{size}" for name, size in axes.items() if size > 1)]
        return SEPARATOR.join(part for part in parts if part) or PARAMETER_SERVER

    @staticmethod
    def parse(text: str) -> Distribution:
        """Read a line of text.

        Raises:
            UsageError: a word is not known, lacks its number, or says again what another has said.

        Example:
            >>> Distribution.parse("all-reduce+tensor:2").tensor
            2
        """
        read, seen = Distribution(), set[str]()
        for word in text.strip().lower().split(SEPARATOR):
            name, _, number = word.strip().partition(":")
            axis = name if name in _AXES and word.strip() != FSDP else "data"
            if axis in seen:
                raise UsageError(f"strategy '{text}': '{word}' says again what stands before it.")
            seen.add(axis)
            read = replace(read, **_meaning(text, word.strip(), name, number))
        if read.data == FSDP and read.shards > 1:
            raise UsageError(
                f"strategy '{text}': fsdp keeps one model in slices on all workers, so {FSDP}:{read.shards} says again "
                "what stands beside it: leave one of the two out, or say how groups become one model, as in "
                f"all-reduce+{FSDP}:{read.shards}."
            )
        return read


def _meaning(text: str, word: str, name: str, number: str) -> dict[str, int | str]:
    """Return the fields that a word of the text sets."""
    if is_named(name):
        return {"data": PARAMETER_SERVER, "consistency": str(Consistency.parse(word))}
    if name in _PLAIN and not number:
        return {"data": name}
    if name in _STEPS:
        return {"data": name, "steps": _number(text, name, number) if number else _STEPS[name]}
    if name in _AXES:
        return {_AXES[name]: _number(text, name, number)}
    raise UsageError(f"strategy '{text}': '{word}' is not known. Expected {_NAMES}.")


def _number(text: str, name: str, number: str) -> int:
    if not number.isascii() or not number.isdigit() or int(number) < 1:
        raise UsageError(f"strategy '{text}': {name} needs a number of 1 or more behind it, as in {name}:2.")
    return int(number)
