"""Poles on carts, and what actors do with them."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

NUM_POLES, NUM_STEPS = 16, 100  # that an actor balances at once, and for how long at most
DISCOUNT, STEP_S, FORCE, LENGTH, GRAVITY, POLE, CART = 0.98, 0.02, 10.0, 0.5, 9.8, 0.1, 1.0


class Poles:
    """Carts with poles on them: (carts, position, speed, angle and its speed). A pole that has fallen stays down."""

    def __init__(self, num: int) -> None:
        self.state = 0.1 * torch.rand(num, 4) - 0.05
        self.up = torch.ones(num, dtype=torch.bool)

    def push(self, right: Tensor) -> Tensor:
        """Push each cart to one side for a moment; return 1 for each pole that still stands."""
        _, speed, angle, turning = self.state.unbind(1)
        total, moment = CART + POLE, POLE * LENGTH
        force = torch.where(right, FORCE, -FORCE)
        pushed = (force + moment * turning.square() * angle.sin()) / total
        falling = GRAVITY * angle.sin() - angle.cos() * pushed
        falling = falling / (LENGTH * (4 / 3 - POLE * angle.cos().square() / total))
        rates = torch.stack([speed, pushed - moment * falling * angle.cos() / total, turning, falling], 1)
        self.state = torch.where(self.up[:, None], self.state + STEP_S * rates, self.state)
        self.up = self.up & (self.state[:, 0].abs() < 2.4) & (self.state[:, 2].abs() < 0.21)
        return self.up.float()


@dataclass(frozen=True, slots=True)
class Sample:
    """What an actor did: (steps, poles) each, states with their 4 numbers; `odds` are log-probabilities as it acted."""

    ticket: object
    states: Tensor
    right: Tensor
    odds: Tensor
    rewards: Tensor


def make_policy() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))


@torch.no_grad()
def act(policy: nn.Module, ticket: object, wait_s: float) -> Sample:
    poles, done = Poles(NUM_POLES), list[tuple[Tensor, ...]]()
    for _ in range(NUM_STEPS):
        state = poles.state
        wanted = torch.distributions.Bernoulli(logits=policy(state).squeeze(1))
        right = wanted.sample()
        done.append((state, right, wanted.log_prob(right), poles.push(right.bool())))
    time.sleep(wait_s)  # as where an environment is another program, on another machine
    states, rights, odds, rewards = (torch.stack(column) for column in zip(*done, strict=True))
    return Sample(ticket, states, rights, odds, rewards)
