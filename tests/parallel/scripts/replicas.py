"""Two replicas of two stages: what they learn together is what one process learns from the whole batch."""

import copy
import sys

import torch
from models import batch, mlp, same_part
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import paceline

paceline.init()
torch.set_num_threads(1)
rank, strategy = paceline.rank(), sys.argv[1]
loss = functional.cross_entropy
inputs, targets = batch(40, 4)
NUM_EPOCHS = 2


def losses_of(model: torch.nn.Module, batches: list[list[int]], optimizer: torch.optim.Optimizer) -> list[float]:
    found = []
    for indices in batches * NUM_EPOCHS:
        optimizer.zero_grad()
        one = loss(model(inputs[indices]), targets[indices])
        one.backward()
        optimizer.step()
        found.append(float(one.detach()))
    return found


# Five batches of 8 for two replicas: the third step of an epoch has a batch for the first one only.
whole = mlp()
sgd = torch.optim.SGD(whole.parameters(), lr=0.2, momentum=0.9)
indices = [list(range(start, min(start + 16, 40))) for start in range(0, 40, 16)]
expected = losses_of(whole, indices, sgd)

start = mlp()
if rank in (1, 3):  # what replica 0 has is what counts
    with torch.no_grad():
        for parameter in start.parameters():
            parameter.zero_()
model = paceline.parallelize(copy.deepcopy(start), loss=loss, pipeline=2, data=strategy)
optimizer = paceline.distributed(torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9), model=model)
found = []
for _ in range(NUM_EPOCHS):
    for batch_inputs, batch_targets in paceline.shard(DataLoader(TensorDataset(inputs, targets), batch_size=8)):
        optimizer.zero_grad()
        found.append(model.forward_backward(batch_inputs, batch_targets))
        optimizer.step()
assert len(found) == (6 if rank in (0, 2) else 4)
told = paceline.all_gather(torch.tensor([*found, *(0.0 for _ in range(6 - len(found)))], dtype=torch.float64))
assert told[0].tolist() == told[2].tolist(), "the same loss at all stages"
assert told[1].tolist() == told[3].tolist(), "the same loss at all stages"
steps = zip(told[0].tolist(), (*told[1][:2], told[0][2], *told[1][2:4], told[0][5]), expected, strict=True)
for step, (first, second, wanted) in enumerate(steps):
    assert abs((first + float(second)) / 2 - wanted) < 1e-10, (step, first, second, wanted)
with optimizer.snapshot():
    same_part(model, whole, gradients=False)
    assert model(inputs).shape == (40, 5)
state = model.whole_state_dict()
assert (state is None) == (rank > 1)
print(f"learned the same by {type(optimizer).__name__}")
