"""Two stages whose layers do what layers of one process may: each checks its part against the whole; then one fails."""

import copy
import pickle
import random
from collections import namedtuple
from collections.abc import Callable

import pytest
import torch
from models import EXACT, NUM_CLASSES, batch, same_part, seeded
from torch import Tensor, nn
from torch.nn import functional

import paceline
from paceline.errors import PeerError, UsageError

paceline.init()
torch.set_num_threads(1)
rank = paceline.rank()
inputs, classes = batch(8, 4)
entropy = functional.cross_entropy


class Wrapping(nn.Module):
    """A layer that gives a tuple of one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.inner(x),)


class Opening(nn.Module):
    """A layer that takes a tuple of one."""

    def __init__(self, width: int = NUM_CLASSES) -> None:
        super().__init__()
        self.inner = nn.Linear(4, width)

    def forward(self, values: tuple[Tensor]) -> Tensor:
        return self.inner(values[0])


class Doubling(nn.Module):
    """A layer that changes its input in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.mul_(2))


class Counting(nn.Module):
    """A layer that puts other tensors in the place of its buffers."""

    count: Tensor
    first: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("first", None)

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        if self.first is None:
            self.first = x.detach().mean(0)
        return self.inner(x - self.first)


class Named(nn.Module):
    """A last layer with a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, NUM_CLASSES)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"scores": self.inner(x)}


def same(make: Callable[[], nn.Module], given: object = inputs, loss=entropy, **asked: object) -> None:  # noqa: ANN001
    whole, part = make(), paceline.parallelize(make(), loss=loss, **asked)
    assert part.training == whole.training
    for _ in range(2):
        expected = loss(whole(copy.deepcopy(given)), classes)
        expected.backward()
        found = part.forward_backward(copy.deepcopy(given), classes)
        assert abs(found - float(expected.detach())) < 1e-10
        same_part(part, whole)
    buffers = dict(whole.named_buffers())
    for name, buffer in part.named_buffers():
        torch.testing.assert_close(buffer, buffers[name], **EXACT)
    state = part.whole_state_dict()
    assert state is None or state.keys() == whole.state_dict().keys()


def twice() -> nn.Module:
    shared = nn.Linear(4, 4)
    return nn.Sequential(nn.Linear(4, 4), shared, nn.Tanh(), shared, nn.Linear(4, 4), nn.Linear(4, NUM_CLASSES))


def resting() -> nn.Module:
    layers = [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, NUM_CLASSES)]
    model = seeded(lambda: nn.Sequential(*layers))
    for layer in model[1], model[3]:
        layer.eval()
    return model


wrapped = nn.Sequential(Wrapping(), Opening())
same(lambda: seeded(lambda: copy.deepcopy(wrapped)))
same(lambda: seeded(lambda: nn.Sequential(Opening(4), nn.Linear(4, NUM_CLASSES))), (inputs,))
print("equal tuples of one")
doubling = [Doubling(4), nn.ReLU(inplace=True), nn.Linear(4, 4), Doubling(4), nn.Linear(4, NUM_CLASSES)]
for recompute in (False, True):
    for asked in ({"placement": [3]}, {"balance": inputs.clone()}):
        same(lambda: seeded(lambda: nn.Sequential(*copy.deepcopy(doubling))), recompute=recompute, **asked)
print("equal changes in place")
whole_batches = {"micro_batches": 1, "schedule": "gpipe"}
for asked in ({"placement": [1]}, {"balance": inputs}):
    same(lambda: seeded(lambda: nn.Sequential(Counting(), Counting(), nn.Linear(4, 5))), **whole_batches, **asked)
print("equal buffers")
same(resting, micro_batches=4)
same(lambda: resting().eval())
print("equal modes")
same(lambda: seeded(twice), placement=[4])
print("equal names")
named = lambda: seeded(lambda: nn.Sequential(nn.Linear(4, 4), Named()))  # noqa: E731
same(named, loss=lambda outputs, targets: entropy(outputs["scores"], targets), balance=inputs)
print("equal dicts")

# The same batch, in another precision.
words = torch.arange(8 * 3).reshape(8, 3) % 7
model = seeded(lambda: nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(12, NUM_CLASSES)))
whole, part = copy.deepcopy(model), paceline.parallelize(copy.deepcopy(model), loss=entropy)
for kind, cast, close in ((torch.float64, False, 1e-10), (torch.float32, True, 1e-2), (torch.float32, False, 1e-5)):
    for one in (whole, part):
        one.to(kind)
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        assert abs(part.forward_backward(words, classes) - float(entropy(whole(words), classes).detach())) < close
print("equal precisions")

# What is refused on all, before anything is sent.
part = paceline.parallelize(copy.deepcopy(wrapped).double(), loss=entropy)
for given, told in (
    ((inputs, inputs[:4]), "the tensors of the batch have 8, 4 samples"),
    (inputs[:0], "the batch has no samples"),
    ({"x": inputs}, "the batch is dict, expected a tensor or a tuple of tensors"),
):
    with pytest.raises(UsageError, match=told):
        part.forward_backward(given, classes[: len(given)])
for off in (torch.no_grad, torch.inference_mode):
    with off(), pytest.raises(UsageError, match="where there are no gradients"):
        part.forward_backward(inputs, classes)
with pytest.raises(UsageError, match="hold one model between them, and were given inputs and targets with other"):
    part.forward_backward(inputs + rank, (classes + rank) % NUM_CLASSES)
for copying in (copy.deepcopy, pickle.dumps):
    with pytest.raises(UsageError, match="cannot be copied or pickled: keep whole_state_dict"):
        copying(part)
assert part.forward_backward(inputs + rank, classes) > 0  # as where each worker augments the same samples
print("refused on all")


# A mistake on one ends the connections of all, also where the script goes on.
class Odd(nn.Module):
    """A last layer whose outputs no other stage knows how to read."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)
        self.kind = namedtuple(f"Kind{random.random():.9f}".replace(".", ""), "scores")

    def forward(self, x: Tensor) -> object:
        return self.kind(self.inner(x))


part = paceline.parallelize(nn.Sequential(nn.Linear(4, 4), Odd()).double(), loss=entropy)
told = "that cannot be handed to all stages: expected tensors in dicts, tuples and lists"
with pytest.raises(UsageError if rank else PeerError, match=told):
    part(inputs)
for call in (lambda: part(inputs), lambda: part.forward_backward(inputs, classes)):
    with pytest.raises(PeerError, match=f"an earlier call has failed: .*{told}"):
        call()
print("ended on all")
