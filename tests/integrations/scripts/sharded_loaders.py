"""Trains two epochs with a loader from `paceline.shard` under each framework; prints the samples each worker saw.

And steps two modules of Fabric that are set up before their optimizers, and prints their statistics; accumulates with
Accelerate, and prints how many passes stayed local.
"""

import json
from contextlib import nullcontext
from typing import Any

import lightning
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import paceline
import paceline.integrations.lightning
from paceline.integrations.accelerate import Accelerator
from paceline.integrations.transformers import Trainer, TrainingArguments

NUM_SAMPLES, BATCH_SIZE, EPOCHS = 24, 3, 2

paceline.init()
features = torch.randn(NUM_SAMPLES, 4, generator=torch.Generator().manual_seed(0))
dataset = TensorDataset(features, torch.arange(NUM_SAMPLES))


def sharded() -> Any:
    return paceline.shard(DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True), seed=3)


def tell(name: str, seen: list[int], loader: Any) -> None:
    state = loader.state_dict()
    batches = state["epoch"] * (NUM_SAMPLES // BATCH_SIZE) + state["num_done"]  # of all workers
    print(json.dumps({"name": name, "rank": paceline.rank(), "seen": seen, "batches": batches}), flush=True)


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.seen = torch.nn.Linear(4, 1), list[int]()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.seen += batch[1].tolist()
        return functional.mse_loss(self.net(batch[0])[:, 0], batch[0].sum(1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def by_lightning() -> None:
    module, loader = Regression(), sharded()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    lightning.Trainer(
        strategy="paceline", accelerator="cpu", devices=2, max_epochs=EPOCHS, enable_checkpointing=False, **quiet
    ).fit(module, loader)
    tell("lightning", module.seen, loader)


def train(name: str, model: Any, optimizer: Any, prepared: Any, backward: Any, loader: Any) -> None:
    seen: list[int] = []
    for _ in range(EPOCHS):
        for inputs, ids in prepared:
            seen += ids.tolist()
            optimizer.zero_grad()
            backward(functional.mse_loss(model(inputs)[:, 0], inputs.sum(1)))
            optimizer.step()
    tell(name, seen, loader)


def by_fabric() -> None:
    fabric, net, loader = (
        lightning.Fabric(strategy="paceline", accelerator="cpu", devices=2),
        torch.nn.Linear(4, 1),
        sharded(),
    )
    fabric.launch()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    train("fabric", model, optimizer, fabric.setup_dataloaders(loader), fabric.backward, loader)


def by_fabric_with_two_modules() -> None:
    fabric = lightning.Fabric(strategy="paceline", accelerator="cpu", devices=2)
    fabric.launch()
    nets = [torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.BatchNorm1d(1)) for _ in range(2)]
    models = [fabric.setup_module(net) for net in nets]
    optimizers: Any = fabric.setup_optimizers(*(torch.optim.SGD(net.parameters(), lr=0.1) for net in nets))
    for model, optimizer in zip(models, optimizers, strict=True):
        fabric.backward(model(features[paceline.rank() :: 2]).square().sum())
        optimizer.step()
    print(json.dumps({"means": [dict(net.named_buffers())["1.running_mean"].item() for net in nets]}), flush=True)


def by_accelerate() -> None:
    accelerator, net, loader = Accelerator(cpu=True, gradient_accumulation_steps=2), torch.nn.Linear(4, 1), sharded()
    model, optimizer, prepared = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader)
    assert prepared is loader
    train("accelerate", model, optimizer, prepared, accelerator.backward, loader)


def by_accelerate_with_accumulation() -> None:
    accelerator, net = Accelerator(cpu=True, gradient_accumulation_steps=3), torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    (distributed,), local = accelerator.distributed_optimizers(), list[None]()
    distributed.accumulate = lambda: nullcontext(local.append(None))
    for _ in range(6):
        with accelerator.accumulate(model):
            accelerator.backward(model(features).sum())
            optimizer.step()
            optimizer.zero_grad()
    print(json.dumps({"local": len(local)}), flush=True)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.seen = torch.nn.Linear(4, 1), list[int]()

    def forward(self, inputs: Tensor, ids: Tensor) -> dict[str, Tensor]:
        self.seen += ids.tolist()
        return {"loss": functional.mse_loss(self.net(inputs)[:, 0], inputs.sum(1))}


def named(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    return {"inputs": torch.stack([x for x, _ in samples]), "ids": torch.stack([i for _, i in samples])}


def by_trainer() -> None:
    made = DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True, collate_fn=named)
    loader, net = paceline.shard(made, seed=3), Net()

    class Sharded(Trainer):
        def get_train_dataloader(self) -> Any:
            return loader

    arguments = TrainingArguments(
        output_dir="runs/sharded", num_train_epochs=EPOCHS, save_strategy="no", report_to=[], use_cpu=True
    )
    Sharded(model=net, args=arguments, train_dataset=dataset).train()
    tell("trainer", net.seen, loader)


for run in (
    by_lightning,
    by_fabric,
    by_fabric_with_two_modules,
    by_accelerate,
    by_accelerate_with_accumulation,
    by_trainer,
):
    run()
