"""Two stages of one model: the loss of a batch is what one process finds, whatever kind of loss it is."""

import copy
from functools import partial

import pytest
import torch
from models import EXACT, batch, mlp, same_part, seeded
from torch import Tensor, nn
from torch.nn import functional

import paceline
from paceline.errors import PeerError, UsageError

paceline.init()
torch.set_num_threads(1)
rank = paceline.rank()
inputs, classes = batch(12, 4)
holes = classes.clone()
holes[[0, 1, 2, 5, 11]] = -100  # with 4 micro-batches of 3 the first has no target left
weight = torch.tensor([0.5, 1.0, 2.0, 0.0, 3.0], dtype=torch.float64)
numbers = torch.randn(12, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Named(nn.Module):
    """A last layer whose outputs are known by names, which only the loss sees."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 5), nn.Linear(8, 5)
        self.extra: dict[str, object] = {"none": None, "two": 2}

    def forward(self, x: Tensor) -> dict[str, object]:
        return {"scores": self.one(x), "both": (self.two(x), x.detach()), **self.extra}


class Turned(nn.Module):
    """A last layer whose outputs have the batch in their second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x).unflatten(1, (3, 2)).transpose(0, 1)


def contrast(outputs: Tensor, _: object) -> Tensor:
    """A loss in which each sample is compared with all others."""
    return functional.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


def of_names(outputs: dict[str, Tensor], targets: dict[str, Tensor]) -> Tensor:
    found = functional.cross_entropy(outputs["scores"], targets["classes"], ignore_index=-100)
    return found + targets["weight"] * functional.mse_loss(outputs["both"][0], targets["numbers"], reduction="sum")


def counted(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, ignore_index=-100)


named = seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), Named()))
turned = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Turned()))
pictures = seeded(lambda: nn.Sequential(nn.Conv1d(1, 3, 2), nn.Tanh(), nn.Conv1d(3, 5, 1)))
both = {"classes": holes, "numbers": numbers, "weight": torch.tensor(0.3, dtype=torch.float64)}
entropy = functional.cross_entropy
CASES = {
    "mean": (mlp(), classes, entropy, {}),
    "sum": (mlp(), classes, partial(entropy, reduction="sum"), {}),
    "sum of a module": (mlp(), classes, nn.CrossEntropyLoss(reduction="sum"), {}),
    "holes": (mlp(), holes, entropy, {}),
    "other holes": (mlp(), classes, partial(entropy, ignore_index=int(classes[0])), {}),
    "weights": (mlp(), holes, nn.CrossEntropyLoss(weight=weight), {}),
    "smoothed": (mlp(), holes, nn.CrossEntropyLoss(label_smoothing=0.1, weight=weight), {}),
    "probabilities": (mlp(), numbers.softmax(-1), nn.CrossEntropyLoss(weight=weight), {}),
    "squares": (mlp(), numbers, nn.MSELoss(), {}),
    "sum of squares": (mlp(), numbers, partial(functional.mse_loss, reduction="sum"), {}),
    "weighed bits": (mlp(), numbers.sigmoid(), nn.BCEWithLogitsLoss(weight=numbers[:, :1].square()), {}),
    "function": (mlp(), holes, counted, {}),
    "all with all": (mlp(), classes, contrast, {}),
    "names": (named, both, of_names, {}),
    "turned": (turned, numbers, lambda outputs, targets: (outputs.mean(0) * targets[:, :2]).square().sum(), {}),
    "said mean": (mlp(), classes, lambda outputs, targets: entropy(outputs, targets), {"reduction": "mean"}),
    "said sum": (mlp(), classes, lambda *both: 2 * entropy(*both, reduction="sum"), {"reduction": "sum"}),
    "said weight": (mlp(), holes, counted, {"reduction": lambda targets: (targets != -100).sum()}),
    "places": (pictures, holes[:, None].repeat(1, 3), entropy, {}),
}  # fmt: skip


def same_loss(model: nn.Module, given: object, targets: object, loss, **asked: object) -> None:  # noqa: ANN001
    whole, part = copy.deepcopy(model), paceline.parallelize(copy.deepcopy(model), loss=loss, **asked)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.02, momentum=0.9) for one in (whole, part)]
    for _ in range(5):
        for one in optimizers:
            one.zero_grad()
        expected = loss(whole(given), targets)
        expected.backward()
        found = part.forward_backward(given, targets)
        assert abs(found - float(expected.detach())) < 1e-9, (found, float(expected.detach()))
        same_part(part, whole)
        for one in optimizers:
            one.step()
    same_part(part, whole, gradients=False)


for name, (model, targets, loss, asked) in CASES.items():
    given = inputs[:, None] if name == "places" else inputs
    for micro_batches, schedule in ((4, "1f1b"), (2, "gpipe")):
        try:
            same_loss(model, given, targets, loss, micro_batches=micro_batches, schedule=schedule, **asked)
        except AssertionError as error:
            raise AssertionError(f"{name}, {micro_batches}, {schedule}: {error}") from error
    print(f"equal {name}")

# A part that is frozen, then thawed, then frozen again; and the other one.
whole, part = mlp(), paceline.parallelize(mlp(), loss=entropy, micro_batches=4)
for frozen in ("0.", "", "0.", "7", ""):
    for model in (whole, part):
        model.zero_grad()
        for name, parameter in model.named_parameters():
            is_last = not name.startswith(("0.", "2."))
            parameter.requires_grad_(not frozen or is_last != (frozen == "7"))
    expected = entropy(whole(inputs), classes)
    expected.backward()
    assert abs(part.forward_backward(inputs, classes) - float(expected.detach())) < 1e-10
    for name, parameter in part.named_parameters():
        other = dict(whole.named_parameters())[name].grad
        assert (parameter.grad is None) == (other is None), (frozen, name)
        if other is not None:
            torch.testing.assert_close(parameter.grad, other, **EXACT)
print("equal frozen parts")


# Statistics move once for each micro-batch, also where layers run twice.
def with_statistics() -> nn.Module:
    torch.manual_seed(2)
    turned = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
    layers = [nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), turned, nn.BatchNorm1d(6, momentum=None), nn.Linear(6, 5)]
    return nn.Sequential(*layers).double()


for recompute in (False, True):
    whole = with_statistics()
    part = paceline.parallelize(with_statistics(), loss=entropy, micro_batches=4, recompute=recompute, schedule="gpipe")
    for _ in range(3):
        for model in (whole, part):
            model.zero_grad()
        for piece in range(4):
            cut = slice(3 * piece, 3 * piece + 3)
            (entropy(whole(inputs[cut]), classes[cut]) / 4).backward()
        part.forward_backward(inputs, classes)
        same_part(part, whole)
        buffers = dict(whole.named_buffers())
        assert dict(part.named_buffers()), "both have statistics"
        for name, buffer in part.named_buffers():
            torch.testing.assert_close(buffer, buffers[name], **EXACT, msg=lambda text, name=name: f"{name}: {text}")
part = paceline.parallelize(with_statistics(), loss=entropy)
assert part.forward_backward(inputs[:4], classes[:4]) > 0, "not in micro-batches of one"
print("equal statistics")

# What is kept of a model stays as it was.
state = part.whole_state_dict()
kept = None if state is None else {name: one.clone() for name, one in state.items()}
with torch.no_grad():
    for tensor in (*part.parameters(), *part.buffers()):
        tensor.add_(1)
if state is not None:
    torch.testing.assert_close(state, kept, rtol=0, atol=0)
print("equal what is kept")

# Outputs in a structure are handed to all.
named[2].extra = {}
found = paceline.parallelize(copy.deepcopy(named), loss=of_names)(inputs)
torch.testing.assert_close(found, named(inputs), **EXACT)
assert paceline.parallelize(copy.deepcopy(turned), loss=of_names)(inputs).shape == (3, 12, 2)
print("equal structures")

# A stage that cannot learn from micro-batches of one says so; last, as the other stage loses it.
normed = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.BatchNorm1d(5)).double()
part = paceline.parallelize(normed, loss=entropy, micro_batches=4, placement=[2])
told = "stage 1 has a BatchNorm, which cannot learn from a micro-batch of 1 sample" if rank else ""
with pytest.raises(UsageError if rank else PeerError, match=told):
    part.forward_backward(inputs[:4], classes[:4])
print("equal micro-batches of one")
