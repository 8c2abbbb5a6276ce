"""Made-up clicks of users on items, a factor model of them, and how well it ranks."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from paceline.tools.reproduce.virtual import Floats

_RANK = 4
_BATCH = 500
_EPOCHS = 12
_RATE = 40.0  # of the mean gradient of a batch: an id is in few of its samples


class Clicks(msgspec.Struct, frozen=True):
    """Samples: the user, the item, and whether it was clicked; `held_out` are those never trained on."""

    users: np.ndarray
    items: np.ndarray
    clicked: np.ndarray
    num_users: int
    num_items: int
    trained: slice
    held_out: slice

    @staticmethod
    def make(seed: int, num: int = 60_000, num_users: int = 2000, num_items: int = 500) -> Clicks:
        """Draw users and items as Zipf's law says, and clicks by the product of four factors of each."""
        random = np.random.default_rng(seed)

        def draw(size: int) -> np.ndarray:
            shares = 1 / np.arange(1, size + 1) ** 0.6
            return random.permutation(size)[random.choice(size, size=num, p=shares / shares.sum())]

        users, items = draw(num_users), draw(num_items)
        left, right = random.normal(size=(num_users, _RANK)), random.normal(size=(num_items, _RANK))
        chance = 1 / (1 + np.exp(-1.2 * (left[users] * right[items]).sum(1)))
        edge = num * 5 // 6
        clicked = random.random(num) < chance
        return Clicks(users, items, clicked, num_users, num_items, slice(0, edge), slice(edge, num))


@dataclass(slots=True)
class FactorModel:
    """A bias and factors for each row of users and items, and the weights of the factors: the dense part."""

    users: Floats
    items: Floats
    weights: Floats

    @staticmethod
    def make(num_users: int, num_items: int, seed: int = 0) -> FactorModel:
        """Return small random factors."""
        random = np.random.default_rng(seed)
        users, items = (0.3 * random.normal(size=(num, _RANK)) for num in (num_users, num_items))
        return FactorModel(users, items, np.ones(_RANK))


class FactorGradient(msgspec.Struct, frozen=True):
    """The gradient of a batch: rows of its samples, and the whole dense part."""

    users: tuple[np.ndarray, Floats]
    items: tuple[np.ndarray, Floats]
    weights: Floats


def score(model: FactorModel, users: np.ndarray, items: np.ndarray) -> Floats:
    """Return the log odds of a click, (n,)."""
    return (model.users[users] * model.items[items]) @ model.weights


def gradient(model: FactorModel, users: np.ndarray, items: np.ndarray, clicked: np.ndarray) -> FactorGradient:
    """Return the gradient of the mean log loss of a batch."""
    left, right = model.users[users], model.items[items]
    errors = (1 / (1 + np.exp(-(left * right) @ model.weights)) - clicked) / len(users)
    weighted = errors[:, None] * model.weights
    return FactorGradient((users, weighted * right), (items, weighted * left), errors @ (left * right))


def apply_rows(model: FactorModel, change: FactorGradient, rate: float) -> None:
    """Step the rows of users and items."""
    np.add.at(model.users, change.users[0], -rate * change.users[1])
    np.add.at(model.items, change.items[0], -rate * change.items[1])


def apply_dense(model: FactorModel, change: FactorGradient, rate: float) -> None:
    """Step the dense part, whose rate is smaller: every sample has a part in it."""
    model.weights -= 0.02 * rate * change.weights


def train(
    clicks: Clicks,
    users: np.ndarray,
    items: np.ndarray,
    num_users: int,
    num_items: int,
) -> FactorModel:
    """Train a model on the samples not held out, batch by batch; `users` and `items` are rows of its tables."""
    model = FactorModel.make(num_users, num_items)
    for _ in range(_EPOCHS):
        for start in range(clicks.trained.start, clicks.trained.stop, _BATCH):
            chosen = slice(start, start + _BATCH)
            change = gradient(model, users[chosen], items[chosen], clicks.clicked[chosen])
            apply_rows(model, change, _RATE)
            apply_dense(model, change, _RATE)
    return model


def area_under_curve(scores: Floats, clicked: np.ndarray) -> float:
    """Return the share of pairs of a click and none that the scores order rightly."""
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores)] = np.arange(1, len(scores) + 1)
    num_clicked = int(clicked.sum())
    above = ranks[clicked].sum() - num_clicked * (num_clicked + 1) / 2
    return float(above / (num_clicked * (len(clicked) - num_clicked)))
