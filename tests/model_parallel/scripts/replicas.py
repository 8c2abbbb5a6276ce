"""Two replicas of two stages: what they learn together is what one process learns from the whole batch."""

import copy
from itertools import chain

import pytest
import torch
from models import batch, mlp, same_part
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.errors import PeerError

NUM_EPOCHS = 2

paceline.init()
torch.set_num_threads(1)
rank = paceline.rank()
loss = functional.cross_entropy
inputs, targets = batch(40, 4)


def learn(model: nn.Module, batches: list[list[int]]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)
    found = []
    for indices in batches * NUM_EPOCHS:
        optimizer.zero_grad()
        one = loss(model(inputs[indices]), targets[indices])
        one.backward()
        optimizer.step()
        schedule.step()
        found.append(float(one.detach()))
    return found


def distributed_over(strategy: str, model: nn.Module, momentum: float = 0.0) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = paceline.parallelize(copy.deepcopy(model), loss=loss, pipeline=2, data=strategy)
    name = strategy.replace(":", "-")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=momentum)
    return model, paceline.distributed(optimizer, model=model, name=name)


# Five batches of 8 for two replicas: the third step of an epoch has a batch for the first one only, whose schedule, of
# which each step is a batch, counts for both.
whole = mlp()
expected = learn(whole, [list(range(start, min(start + 16, 40))) for start in range(0, 40, 16)])
start = mlp()
if rank in (1, 3):  # what replica 0 has is what counts
    with torch.no_grad():
        for parameter in start.parameters():
            parameter.zero_()
for strategy in ("bsp", "all-reduce"):
    model, optimizer = distributed_over(strategy, start, momentum=0.9)
    found = []
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)
    loader = paceline.shard(DataLoader(TensorDataset(inputs, targets), batch_size=8))
    for batch_inputs, batch_targets in chain.from_iterable(loader for _ in range(NUM_EPOCHS)):
        optimizer.zero_grad()
        found.append(model.forward_backward(batch_inputs, batch_targets))
        optimizer.step()
        schedule.step()
    assert len(found) == (6 if rank in (0, 2) else 4)
    padded = torch.tensor([*found, *(0.0 for _ in range(6 - len(found)))], dtype=torch.float64)
    first, second, third, fourth = (one.tolist() for one in paceline.all_gather(padded))
    assert first == third, "the same loss at all stages"
    assert second == fourth, "the same loss at all stages"
    others = (*second[:2], first[2], *second[2:4], first[5])
    for step, (one, other, wanted) in enumerate(zip(first, others, expected, strict=True)):
        assert abs((one + other) / 2 - wanted) < 1e-10, (strategy, step, one, other, wanted)
    with optimizer.snapshot():
        same_part(model, whole, gradients=False)
        assert model(inputs).shape == (40, 5)
    assert (model.whole_state_dict() is None) == (rank > 1)
    print(f"learned the same under {strategy} by {type(optimizer).__name__}")

for strategy in ("ssp:3", "local-sgd:2"):
    model, optimizer = distributed_over(strategy, mlp())
    own = slice(0, 20) if rank in (0, 2) else slice(20, 40)
    for _ in range(10):
        optimizer.zero_grad()
        model.forward_backward(inputs[own], targets[own])
        optimizer.step()
    paceline.barrier()
    with optimizer.snapshot():
        end = float(loss(model(inputs), targets))
    assert end < expected[0] - 0.05, (strategy, expected[0], end)
    assert len({float(one) for one in paceline.all_gather(torch.tensor(end, dtype=torch.float64))}) == 1
    print(f"learned by {type(optimizer).__name__} under {strategy}")

paceline.barrier()
paceline.init().close()
with pytest.raises(PeerError, match="this worker has left the job, as its session is closed"):
    model.forward_backward(inputs[own], targets[own])
print("closed")
