"""Two replicas of a model held by two workers each, under all-reduce: what is clipped is what the step takes."""

import contextlib

import pytest
import torch
from models import EXACT, batch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.errors import UsageError

MAX_NORM = 0.05

paceline.init()
torch.set_num_threads(1)
rank = paceline.rank()
loss = functional.cross_entropy
inputs, targets = batch(20, 4)
inputs *= torch.linspace(0.1, 5, 20, dtype=torch.float64)[:, None]  # the replicas' gradients differ in length


def built() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 5)
    ).double()


def distributed(**asked: object):  # noqa: ANN201
    model = paceline.parallelize(built(), loss=loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    return model, paceline.distributed(optimizer, model=model, **asked)


def same(model: nn.Module, whole: nn.Module) -> None:
    """Check the values of this part, and in the first replica those of the whole."""
    told = model.whole_state_dict()
    if told is not None:
        torch.testing.assert_close(told, dict(whole.state_dict()), **EXACT)


# Batches of 4 for two replicas: the third step of an epoch has one for the first replica only.
whole, (model, optimizer) = built(), distributed()
alone = torch.optim.SGD(whole.parameters(), lr=0.5, momentum=0.9)
norms = []
for _ in range(2):
    for start in range(0, 20, 8):
        alone.zero_grad()
        loss(whole(inputs[start : start + 8]), targets[start : start + 8]).backward()
        norms.append(float(nn.utils.clip_grad_norm_(whole.parameters(), MAX_NORM)))
        alone.step()
assert min(norms) > 2 * MAX_NORM, "all are clipped"
found = []
loader = paceline.shard(DataLoader(TensorDataset(inputs, targets), batch_size=4))
for _ in range(2):
    for own_inputs, own_targets in loader:
        optimizer.zero_grad()
        model.forward_backward(own_inputs, own_targets)
        found.append(model.clip_gradients(MAX_NORM))
        optimizer.step()
torch.testing.assert_close(found, norms if len(found) == 6 else [norms[0], norms[1], norms[3], norms[4]], **EXACT)
same(model, whole)
print("equal clipped")

# The norm of a part is not that of the model, whatever combines the gradients of replicas.
for strategy in (None, "bsp"):
    _, optimizer = distributed(strategy=strategy, name=f"parts-{strategy}")
    with pytest.raises(UsageError, match=r"norm of this worker's part of the model: call model\.clip_gradients"):
        optimizer.clip_gradients(MAX_NORM)

# Two batches a step, combined with the last or with each.
own = int(paceline.shard([0, 1])[0])  # number of the replica
halves = [slice(4 * number, 4 * number + 4) for number in (own, own + 2)]
for held in (True, False):
    whole, (model, optimizer) = built(), distributed(nonfinite="zero" if held else "reject")
    alone = torch.optim.SGD(whole.parameters(), lr=0.5, momentum=0.9)
    for _ in range(3):
        alone.zero_grad()
        for cut in (slice(0, 8), slice(8, 16)):
            loss(whole(inputs[cut]), targets[cut]).backward()
        norm = float(nn.utils.clip_grad_norm_(whole.parameters(), MAX_NORM))
        alone.step()
        optimizer.zero_grad()
        with optimizer.accumulate() if held else contextlib.nullcontext():
            model.forward_backward(inputs[halves[0]], targets[halves[0]])
        model.forward_backward(inputs[halves[1]], targets[halves[1]])
        assert abs(model.clip_gradients(MAX_NORM) - norm) < 1e-10
        optimizer.step()
    same(model, whole)
print("equal accumulated")

# Weights that the script says, before backward.
whole, (model, optimizer) = built(), distributed(scale="samples")
(0.75 * loss(whole(inputs[:4]), targets[:4]) + 0.25 * loss(whole(inputs[4:8]), targets[4:8])).backward()
torch.optim.SGD(whole.parameters(), lr=0.5).step()
optimizer.weigh(1.0 if own else 3.0)
model.forward_backward(inputs[halves[0]], targets[halves[0]])
told = ""
try:
    optimizer.step(samples=5)
except UsageError as error:
    told = str(error)
assert "call optimizer.weigh(5) before backward" in told, told
optimizer.weigh(1.0 if own else 3.0)
optimizer.zero_grad()
model.forward_backward(inputs[halves[0]], targets[halves[0]])
optimizer.step(samples=1 if own else 3)
same(model, whole)
print("equal weighed")

# Replicas that have come to other values are told, all of them.
apart, stepping = distributed(scale="samples", nonfinite="reject")
with torch.no_grad():
    next(apart.parameters()).add_(0.1 if own else 0.0)
apart.forward_backward(inputs[halves[0]], targets[halves[0]])
with pytest.raises(UsageError, match="parameters are not those of worker"):
    stepping.step()
print("told of other values")

# A replica that has run more of them is told, and so are the others.
for _ in range(2 - own):
    optimizer.zero_grad() if own else None
    try:
        model.forward_backward(inputs[halves[0]], targets[halves[0]])
        optimizer.step() if own else None
    except UsageError as error:
        print(f"told: {error}")
