"""What a fragment of a page finds around it: a small model, its samples, and the names that pages give them."""

# ruff: noqa: F401

import sys
from collections import OrderedDict

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import paceline

session = ps = paceline.init()
rank = paceline.rank()
torch.manual_seed(0)
data = dataset = TensorDataset(torch.randn(64, 8), torch.randint(0, 4, (64,)))
loader = DataLoader(dataset, batch_size=32, shuffle=True)
batches = list(loader)
num_epochs = 1
loss_fn = loss_of = functional.cross_entropy


def build() -> torch.nn.Module:
    embedding, trunk, head = torch.nn.Linear(8, 16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 4)
    return torch.nn.Sequential(OrderedDict(embedding=embedding, trunk=trunk, head=head))


def save(**what: object) -> None:
    assert what


model = build()
optimizer = paceline.distributed(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
loss = loss_fn(model(dataset.tensors[0]), dataset.tensors[1])
held_out_loss, accuracy = 0.5, 0.9
saved = {"loader": paceline.shard(loader, seed=7).state_dict()}
