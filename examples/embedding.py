"""Who likes what: rows of users and items on the servers, a dense part beside them, each under a policy of its own.

Ids are not listed: a row comes with its first gradient. The dense part keeps all workers in step (bsp), the rows may
be four clocks old (ssp), and those of the next batch are on their way while this one is computed. Run it alone, or as
two workers:

    python examples/embedding.py
    paceline run --workers 2 --servers 2 examples/embedding.py
"""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import paceline

NUM_USERS, NUM_ITEMS, NUM_CLICKS, WIDTH = 200, 100, 8000, 8
SPREAD = 0x1E3779B97F4A7C15  # turns small numbers into ids such as a hash of a name would give

paceline.init()

generator = torch.Generator().manual_seed(0)
tastes = torch.randn(NUM_USERS, 2, generator=generator), torch.randn(NUM_ITEMS, 2, generator=generator)
users = torch.randint(NUM_USERS, (NUM_CLICKS,), generator=generator)
items = torch.randint(NUM_ITEMS, (NUM_CLICKS,), generator=generator)
likes = ((tastes[0][users] * tastes[1][items]).sum(1) > 0).float()  # (clicks,)
clicks = TensorDataset(users * SPREAD, items * SPREAD, likes)
seen, unseen = torch.utils.data.random_split(clicks, [0.9, 0.1], generator)
batches = paceline.shard(DataLoader(seen, batch_size=100, shuffle=True))


def rows(name: str) -> paceline.Embedding:
    """Return rows for any ids, which learn by Adagrad on the servers."""
    update, first = paceline.update.Adagrad(lr=0.2), paceline.first.normal(0.5, seed=len(name))
    return paceline.Embedding(None, WIDTH, update=update, consistency="ssp:4", name=name, init=first)


class Model(nn.Module):
    """Says how much a user likes an item."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = rows("users"), rows("items")
        self.top = nn.Linear(WIDTH, 1)

    def forward(self, user_ids: torch.Tensor, item_ids: torch.Tensor) -> torch.Tensor:
        """Return (clicks,), above 0 for a like."""
        return self.top(self.users(user_ids) * self.items(item_ids)).squeeze(1)


model = Model()  # its parameters are those of the dense part alone
optimizer = paceline.distributed(torch.optim.Adam(model.parameters(), lr=0.01), consistency="bsp")

for _ in range(5):
    for user_ids, item_ids, liked in paceline.prefetch(
        batches, {model.users: lambda batch: batch[0], model.items: lambda batch: batch[1]}
    ):
        optimizer.zero_grad()
        loss = functional.binary_cross_entropy_with_logits(model(user_ids, item_ids), liked)
        loss.backward()
        optimizer.step()  # pushes the gradients of the rows as well
        paceline.report(loss=loss.item())

paceline.barrier()  # now all pushes of all workers are applied
if paceline.rank() == 0:
    with optimizer.snapshot():
        user_ids, item_ids, liked = next(iter(DataLoader(unseen, batch_size=len(unseen))))
        accuracy = ((model(user_ids, item_ids) > 0) == liked.bool()).float().mean().item()
    print(f"{paceline.size()} worker(s): accuracy {accuracy:.3f} on clicks that no worker has seen")
