"""Small models to split: what a transformer is made of, with numbers of heads and features that divide."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

NUM_WORDS, WIDTH, LENGTH = 16, 8, 6


class Attention(nn.Module):
    """Causal self-attention, its three inputs in one layer or in three."""

    def __init__(self, stacked: bool, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.p = 4, dropout
        if stacked:
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        else:
            self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.stacked = stacked

    def forward(self, x: Tensor) -> Tensor:
        three = self.qkv(x).chunk(3, -1) if self.stacked else (self.query(x), self.key(x), self.value(x))
        q, k, v = (one.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for one in three)
        mixed = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.p if self.training else 0.0
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, stacked: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(stacked, dropout)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(4 * WIDTH, WIDTH),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        return x + self.mlp(self.between(x))


class Gpt(nn.Module):
    """A small GPT, the scores of its words with weights of their own or with those of its embedding."""

    def __init__(self, *, tied: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(NUM_WORDS, WIDTH, padding_idx=3), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(stacked, dropout) for stacked in (True, False))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, NUM_WORDS, bias=not tied)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_word_loss(scores: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())
