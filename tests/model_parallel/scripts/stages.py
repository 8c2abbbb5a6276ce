"""Workers that are the stages of one model: each checks its part against the whole; then the last but one dies."""

import contextlib
import copy
import os
import signal
import sys
import time

import torch
from models import EXACT, Block, Masked, Pool, Talker, alone, batch, convolutional, mlp, same_part, seeded, tokens_loss
from torch import nn
from torch.nn import functional

import paceline
from paceline.errors import PacelineError, PeerError, UsageError

paceline.init()
rank, size = paceline.rank(), paceline.size()
torch.set_num_threads(1)
loss = functional.cross_entropy


def check(name: str, model: nn.Module, inputs: object, targets: torch.Tensor, loss=loss, **asked: object) -> None:  # noqa: ANN001
    whole = alone(model, inputs, targets, loss)
    part = paceline.parallelize(copy.deepcopy(model), loss=loss, **asked)
    assert len(list(part.parameters())) < len(list(whole.parameters())), "it keeps a part only"
    for _ in range(2):  # the second time adds, as backward does
        found = part.forward_backward(inputs, targets)
        assert abs(found - whole.loss) < 1e-10, (name, found, whole.loss)
    for parameter in part.parameters():
        parameter.grad /= 2
    same_part(part, whole)
    with torch.no_grad():
        torch.testing.assert_close(part(inputs), whole.outputs, **EXACT)
    told = part.whole_state_dict()
    assert (told is None) == (rank != 0)
    if told is not None:
        assert told.keys() == model.state_dict().keys()
        torch.testing.assert_close(told, dict(model.state_dict()), **EXACT)
    print(f"equal {name}")


inputs, targets = batch(12, 4)
for schedule in ("1f1b", "gpipe"):
    check(schedule, mlp(), inputs, targets, schedule=schedule, micro_batches=6)
check("no number", mlp(), inputs, targets)
check("one micro-batch", mlp(), inputs, targets, micro_batches=1, schedule="gpipe")
check("recomputed", mlp(), inputs, targets, recompute=True, micro_batches=4)
check("measured", mlp(), inputs, targets, balance=inputs)
tokens = torch.arange(8 * 5).reshape(8, 5) % 7
check("layers", seeded(Talker), tokens, tokens.roll(1, 1), tokens_loss)
images, classes = batch(6, 1, 8, 8)
if size == 2:
    check("placed", convolutional(), images, classes, placement={"features": 0, "classifier": 1})
    masked = seeded(lambda: nn.Sequential(Masked(4), Masked(4), Pool(4)))
    values = torch.randn(8, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    mask = torch.ones(8, 3, dtype=torch.float64).tril(1)
    check("tuples", masked, (values, mask), targets[:8])

# A smaller last batch, then the first shape again.
part = paceline.parallelize(mlp(), loss=loss)
for num in (12, 5, 7, 12):
    part.zero_grad()
    cut = (inputs[:num], targets[:num])
    assert abs(part.forward_backward(*cut) - alone(mlp(), *cut).loss) < 1e-10
    same_part(part, alone(mlp(), *cut))
print("equal batches of several sizes")

# Dropout: what recomputation draws is what was drawn, and it leaves the generator where it was.
drawn = []
for recompute in (False, True):
    torch.manual_seed(11 + rank)
    part = paceline.parallelize(mlp(dropout=0.5), loss=loss, micro_batches=4, recompute=recompute)
    found = part.forward_backward(inputs, targets)
    drawn.append([found, *(one.grad for one in part.parameters()), torch.rand(3)])
torch.testing.assert_close(drawn[0], drawn[1], **EXACT)
print("equal dropout")

# An optimizer on parts of one replica is that of one process, without servers.
whole, part = mlp(), paceline.parallelize(mlp(), loss=loss)
optimizers = [torch.optim.AdamW(one.parameters(), lr=0.05) for one in (whole, part)]
optimizers[1] = paceline.distributed(optimizers[1], model=part)
for _ in range(3):
    for one in optimizers:
        one.zero_grad()
    loss(whole(inputs), targets).backward()
    part.forward_backward(inputs, targets)
    for one in optimizers:
        one.step()
same_part(part, whole, gradients=False)
assert type(optimizers[1]).__name__ == "CombinedOptimizer"
print("equal steps")

# A model that is built without memory gets it where it is needed.
with torch.device("meta"):
    light = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), Block(8), nn.Linear(8, 8), nn.Linear(8, 5))
part = paceline.parallelize(light, loss=loss)
assert not any(one.is_meta for one in part.parameters())
assert part.forward_backward(inputs.float(), targets) > 0
print("equal shapes")


@contextlib.contextmanager
def refused(words: str):  # noqa: ANN201
    told = "nothing"
    try:
        yield
    except UsageError as error:
        told = str(error)
    assert words in told, f"expected {words}, was told {told}"


tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
tied[3].weight = tied[0].weight
for words, model, asked in (
    ("cannot be split", Block(4), {}),
    ("leaves out parameters", type("Short", (Talker,), {"layers": lambda self: [self.embedding]})(), {}),
    ("each stage needs at least one layer", nn.Sequential(nn.Linear(2, 2)), {}),
    ("are one parameter", tied, {"placement": list(range(1, size))}),
    ("only 1 have parameters", nn.Sequential(nn.Linear(2, 2), *(nn.Tanh() for _ in range(size))), {}),
    ("no parameters to learn", nn.Sequential(*(nn.Tanh() for _ in range(size))), {"placement": list(range(1, size))}),
    ("parallelize: pipeline is 0", mlp(), {"pipeline": 0}),
    ("schedule is 'zigzag'", mlp(), {"schedule": "zigzag"}),
    ("cannot keep", mlp(), {"micro_batches": 1}),
    ("data is 'tensor:2'", mlp(), {"data": "tensor:2"}),
    ("a model is held already", mlp(), {"pipeline": 1, "tensor": size}),
    ("workers do not divide", mlp(), {"pipeline": size + 1}),
    ("placement names nonsense", mlp(), {"placement": {"nonsense": 0}}),
    ("each of them, in the order", mlp(), {"placement": {"0": 1}}),
    ("rising numbers", mlp(), {"placement": [9] * (size - 1)}),
):
    with refused(words):
        paceline.parallelize(model, loss=loss, **asked)
whole = mlp()
with refused("without a model that was cut"):
    paceline.distributed(torch.optim.SGD(whole.parameters(), lr=0.1), model=whole)
part = paceline.parallelize(mlp(), loss=loss, micro_batches=size)
with refused("overlap=True"):
    paceline.distributed(torch.optim.SGD(part.parameters(), lr=0.1), model=part, overlap=True)
with refused(f"13 samples does not divide into {size}"):
    part.forward_backward(*batch(13, 4))
with refused("as many"):
    part.forward_backward(inputs, targets[:3])
with refused("expected a tensor or a tuple"):
    part.forward_backward([1.0], targets)
with refused("All must be given the same batch"):
    part.forward_backward(*batch(2 * size if rank == 1 else 3 * size, 4))
assert part.forward_backward(*batch(2 * size, 4)) > 0, "nothing was sent, so all goes on"
print("told all that was refused")

if "die" in sys.argv:
    if rank == size - 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        time.sleep(1.5)  # it computes, and does not notice in the time that the others wait for it
    try:
        part.forward_backward(inputs, targets)
    except PeerError as error:
        print(f"death: {error}")
    try:
        part(inputs)
    except PacelineError:
        print("and after")
