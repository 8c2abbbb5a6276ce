"""Trains four epochs with a framework, and saves after two; or goes on from there: `resumed.py NAME ENGINE [resume]`.

ENGINE is "paceline", or "ddp" for what the framework distributes by itself.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

NAME, ENGINE, RESUMES = sys.argv[1], sys.argv[2], "resume" in sys.argv[3:]
EPOCHS, SAVED_AFTER = 4, 2
SAVED = Path(f"{NAME}-{ENGINE}")
if ENGINE == "paceline":
    import_module(f"paceline.integrations.{NAME}")  # which makes the strategy known
x = torch.randn(96, 6, generator=torch.Generator().manual_seed(0))
data = TensorDataset(x, x.sum(1, keepdim=True))


def loss_of(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def with_accelerate() -> tuple[bool, nn.Module]:
    if ENGINE == "paceline":
        from paceline.integrations.accelerate import Accelerator
    else:
        from accelerate import Accelerator
    accelerator = Accelerator(cpu=True)
    net = network()
    adam = torch.optim.Adam(net.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(net, adam, DataLoader(data, batch_size=8, shuffle=True))
    if RESUMES:
        accelerator.load_state(str(SAVED))
    for epoch in range(SAVED_AFTER if RESUMES else 0, EPOCHS):
        loader.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            accelerator.backward(loss_of(model, batch))
            accelerator.clip_grad_norm_(model.parameters(), 0.2)
            optimizer.step()
        if epoch + 1 == SAVED_AFTER and not RESUMES:
            accelerator.save_state(str(SAVED))
    return accelerator.is_main_process, net


def with_fabric() -> tuple[bool, nn.Module]:
    from lightning.fabric import Fabric

    fabric = Fabric(strategy=ENGINE, accelerator="cpu", devices=2)
    fabric.launch()
    net = network()
    model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters(), lr=0.01))
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=8, shuffle=True))
    if RESUMES:
        fabric.load(SAVED, {"model": model, "optimizer": optimizer})
    for epoch in range(SAVED_AFTER if RESUMES else 0, EPOCHS):
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            fabric.backward(loss_of(model, batch))
            fabric.clip_gradients(model, optimizer, max_norm=0.2)
            optimizer.step()
        if epoch + 1 == SAVED_AFTER and not RESUMES:
            fabric.save(SAVED, {"model": model, "optimizer": optimizer})
    return fabric.is_global_zero, net


def with_lightning() -> tuple[bool, nn.Module]:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Regression(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            return loss_of(self.net, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    module = Regression()
    trainer = lightning.Trainer(
        strategy=ENGINE,
        accelerator="cpu",
        devices=2,
        max_epochs=EPOCHS,
        gradient_clip_val=0.2,
        callbacks=[ModelCheckpoint(SAVED, "{epoch}", save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    saved = SAVED / f"epoch={SAVED_AFTER - 1}.ckpt"
    trainer.fit(module, DataLoader(data, batch_size=8, shuffle=True), ckpt_path=saved if RESUMES else None)
    return trainer.is_global_zero, module.net


is_first, trained = {"accelerate": with_accelerate, "fabric": with_fabric, "lightning": with_lightning}[NAME]()
if is_first:
    loss = nn.functional.mse_loss(trained(x), data.tensors[1])
    print(f"{NAME}: 2 workers, loss {loss.item():.6f}")
