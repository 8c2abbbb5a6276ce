"""Tables, gradients and the plain torch reference that the tests of this part share."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from paceline.core.partition import partition
from paceline.update.named_rules import Add, granularity, resolve
from paceline.update.rules import RuleSpec
from paceline.update.shard import Contribution, Shard
from paceline.update.table import Segment, TableSpec

SEGMENTS = (
    Segment("weight", (33, 17)),
    Segment("bias", (5,), 1),
    Segment("temperature", ()),
    Segment("frozen", (40,), 1),
    Segment("embedding", (300,), 1),
)
FROZEN = 3


def table(rule: RuleSpec | None = None, segments: Sequence[Segment] = (Segment("w", (4,)),)) -> TableSpec:
    """A small valid table; change more of it with `replace`."""
    return TableSpec("t", tuple(segments), "float32", rule or Add(), "bsp", "mean", "reject")


def shards_of(spec: TableSpec, num_servers: int) -> list[Shard]:
    cuts = "anywhere" if granularity(spec.rule) == "element" else "between_tensors"
    spans = partition([segment.numel for segment in spec.segments], num_servers, cut=cuts)
    return [Shard(spec, span, rule=resolve(spec.rule, frozenset())) for span in spans]


def store(shards: Sequence[Shard], flat: Tensor) -> None:
    for shard in shards:
        shard.store(flat[shard.span.start : shard.span.stop])


def flat_values(shards: Sequence[Shard]) -> Tensor:
    return torch.cat([shard.values for shard in shards])


@dataclass
class Push:
    """One worker's gradient of the whole table."""

    gradient: Tensor
    absent: frozenset[int] = frozenset()
    count: float = 1.0


def pushes(spec: TableSpec, step: int, num_workers: int = 3) -> list[Push]:
    """Gradients of one step; some segments are absent from all workers, some from one of them."""
    generator = torch.Generator().manual_seed(step)
    dtype = getattr(torch, spec.dtype)
    everywhere = {FROZEN} if step % 4 else {FROZEN, 1}
    made: list[Push] = []
    for worker in range(num_workers):
        absent = frozenset(everywhere | ({0} if worker == 1 and step % 3 == 0 else set()))
        gradient = torch.randn(spec.numel, generator=generator, dtype=torch.float64).to(dtype)
        for index, part in enumerate(split(spec, gradient)):
            if index in absent:
                part.fill_(torch.nan)  # it may not be read
        made.append(Push(gradient, absent))
    return made


def split(spec: TableSpec, flat: Tensor) -> list[Tensor]:
    """Views of a flat tensor, one a segment, in its shape."""
    pairs = zip(spec.segments, spec.offsets, strict=True)
    return [flat[offset : offset + segment.numel].view(segment.shape) for segment, offset in pairs]


def apply(shards: Sequence[Shard], made: Sequence[Push], hyper: tuple = ()) -> None:
    for shard in shards:
        span = slice(shard.span.start, shard.span.stop)
        shard.apply([Contribution(push.gradient[span], push.count, push.absent, hyper) for push in made])


class Plain:
    """The whole parameters under an ordinary torch optimizer: what the shards must equal bit for bit."""

    def __init__(self, spec: TableSpec, flat: Tensor) -> None:
        self.spec = spec
        self.parameters = [nn.Parameter(part.clone()) for part in split(spec, flat)]

    def groups(self, *, lr: float, with_decay: bool) -> list[dict]:
        """Two param groups, the second with numbers of its own."""
        groups: list[dict] = [{"params": []}, {"params": [], "lr": lr / 2}]
        if with_decay:
            groups[1]["weight_decay"] = 0.1
        for parameter, segment in zip(self.parameters, self.spec.segments, strict=True):
            groups[segment.group]["params"].append(parameter)
        return groups

    def step(self, optimizer: torch.optim.Optimizer, made: Sequence[Push]) -> None:
        """One step with the mean of the gradients, added in worker order; absent from some counts as zero."""
        for index, parameter in enumerate(self.parameters):
            parts = [split(self.spec, push.gradient)[index] for push in made]
            held = [part for part, push in zip(parts, made, strict=True) if index not in push.absent]
            parameter.grad = sum(held[1:], start=held[0]) / len(made) if held else None
        optimizer.step()

    def flat(self) -> Tensor:
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.parameters])


def start_values(spec: TableSpec) -> Tensor:
    generator = torch.Generator().manual_seed(1234)
    return torch.randn(spec.numel, generator=generator, dtype=torch.float64).to(getattr(torch, spec.dtype))


def with_rule(rule: RuleSpec, segments: Sequence[Segment] = SEGMENTS, dtype: str = "float32") -> TableSpec:
    return replace(table(rule, segments), dtype=dtype)
