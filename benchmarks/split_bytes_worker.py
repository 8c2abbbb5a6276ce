"""A worker of a stack of transformer blocks, shared as the launcher says; prints what it sent in a step."""

from __future__ import annotations

import json

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, mse_loss, scaled_dot_product_attention

import paceline
from paceline.observe.resources import ResourceUsage

WIDTH, NUM_HEADS, NUM_BLOCKS = 256, 4, 4
BATCH, LENGTH = 8, 64  # of a replica
NUM_STEPS = 4


class Block(nn.Module):
    """Attention and a perceptron, each added to what comes in."""

    num_heads = NUM_HEADS

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, length, width)."""
        three = self.qkv(self.before(x)).chunk(3, -1)
        q, k, v = (one.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for one in three)
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.narrow(gelu(self.widen(self.between(x))))


def main() -> None:
    """Take a step to warm up, then some that are counted."""
    ps = paceline.init()
    torch.manual_seed(0)
    whole = nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))
    num_parameters = sum(map(Tensor.numel, whole.parameters()))
    model = paceline.parallelize(whole, loss=mse_loss)
    optimizer = paceline.distributed(torch.optim.SGD(model.parameters(), lr=0.01), model=model)
    inputs, targets = torch.randn(BATCH, LENGTH, WIDTH), torch.randn(BATCH, LENGTH, WIDTH)
    resources, sent = ResourceUsage(), []
    for step in range(1 + NUM_STEPS):
        if step in (0, 1):
            ps.barrier()
        optimizer.zero_grad()
        model.forward_backward(inputs, targets)
        optimizer.step()
        usage = resources.usage()
        assert usage is not None, "the kernel counts bytes on Linux only"
        sent.append(usage.sent_bytes)
    ps.barrier()
    per_step = torch.tensor((sent[-1] - sent[0]) / NUM_STEPS, dtype=torch.float64)
    mean = paceline.all_reduce(per_step, op="mean").item()
    if ps.rank == 0:
        told = {"sent_bytes": mean, "weights_bytes": 4 * num_parameters, "activation_bytes": 4 * inputs.numel()}
        print("found", json.dumps({**told, "num_blocks": NUM_BLOCKS}))


if __name__ == "__main__":
    main()
