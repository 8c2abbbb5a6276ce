"""Small learning problems with known structure, made up from a seed: nothing is downloaded."""

from __future__ import annotations

import msgspec
import numpy as np

from paceline.tools.reproduce.virtual import Floats


class Factorization(msgspec.Struct, frozen=True):
    """Matrix factorization of made-up ratings, whose items are as popular as Zipf's law says.

    Each worker has a share of the ratings, and goes through `1/parts` of it in a clock. Gradients are sums, as if
    each rating were pushed by itself.
    """

    users: np.ndarray
    items: np.ndarray
    ratings: Floats
    shape: tuple[int, int]
    rank: int
    num_workers: int
    parts: int
    seed: int

    @staticmethod
    def make(seed: int, num_workers: int = 8, rank: int = 8, parts: int = 10) -> Factorization:
        """Make 300 users and 200 items, of which 7200 pairs have a rating."""
        random = np.random.default_rng(seed)
        shape, num = (300, 200), 7200
        popularity = 1 / np.arange(1, shape[1] + 1) ** 0.5
        users = random.integers(shape[0], size=num)
        items = random.choice(shape[1], size=num, p=popularity / popularity.sum())
        left, right = random.normal(size=(shape[0], rank)), random.normal(size=(shape[1], rank))
        ratings = (left[users] * right[items]).sum(1) / rank**0.5 + 0.1 * random.normal(size=num)
        return Factorization(users, items, ratings, shape, rank, num_workers, parts, seed)

    def start(self) -> Floats:
        """Return small random factors."""
        return 0.3 * np.random.default_rng(self.seed + 1).normal(size=sum(self.shape) * self.rank)

    def _split(self, values: Floats) -> tuple[Floats, Floats]:
        edge = self.shape[0] * self.rank
        return values[:edge].reshape(-1, self.rank), values[edge:].reshape(-1, self.rank)

    def gradient(self, values: Floats, worker: int, clock: int, part: int = 0, of: int = 1) -> Floats:
        """Return the sum over the ratings that this worker has in a part of this clock."""
        chosen = np.arange(worker, len(self.ratings), self.num_workers)[clock % self.parts :: self.parts][part::of]
        left, right = self._split(values)
        users, items = self.users[chosen], self.items[chosen]
        errors = (left[users] * right[items]).sum(1) - self.ratings[chosen]
        gradient = np.zeros_like(values)
        to_left, to_right = self._split(gradient)
        np.add.at(to_left, users, errors[:, None] * right[items])
        np.add.at(to_right, items, errors[:, None] * left[users])
        return gradient

    def loss(self, values: Floats) -> float:
        """Return the square loss, as a sum."""
        left, right = self._split(values)
        return float((((left[self.users] * right[self.items]).sum(1) - self.ratings) ** 2).sum())


class Perceptron(msgspec.Struct, frozen=True):
    """A perceptron with one hidden layer, trained on clouds of points in several classes: mean cross-entropy."""

    points: Floats
    labels: np.ndarray
    hidden: int
    batch: int
    seed: int

    @staticmethod
    def make(seed: int, batch: int = 16, hidden: int = 24) -> Perceptron:
        """Make 800 points in 20 dimensions: 20 clouds in 5 classes, which overlap a little."""
        random = np.random.default_rng(seed)
        centres = 1.1 * random.normal(size=(20, 20))
        clouds = random.integers(20, size=800)
        points = centres[clouds] + random.normal(size=(800, 20))
        return Perceptron(points, clouds % 5, hidden, batch, seed)

    def start(self) -> Floats:
        """Return random weights, scaled by the width of what they see, and biases of 0."""
        random = np.random.default_rng(self.seed + 1)
        first = random.normal(size=(20, self.hidden)) / 20**0.5
        second = random.normal(size=(self.hidden, 5)) / self.hidden**0.5
        return np.concatenate([first.ravel(), np.zeros(self.hidden), second.ravel(), np.zeros(5)])

    def _split(self, values: Floats) -> tuple[Floats, Floats, Floats, Floats]:
        hidden = self.hidden
        first, rest = values[: 20 * hidden], values[20 * hidden :]
        return (
            first.reshape(20, hidden),
            rest[:hidden],
            rest[hidden : 6 * hidden].reshape(hidden, 5),
            rest[6 * hidden :],
        )

    def gradient(self, values: Floats, worker: int, clock: int, part: int = 0, of: int = 1) -> Floats:
        """Return the mean over a batch, drawn for this worker and clock; of a part, that part of the mean."""
        whole = np.random.default_rng((self.seed, worker, clock)).integers(len(self.labels), size=self.batch)
        chosen = whole[part::of]
        first, bias, second, _ = self._split(values)
        points = self.points[chosen]
        inner = np.maximum(points @ first + bias, 0)
        errors = self._shares(values, points)
        errors[np.arange(len(chosen)), self.labels[chosen]] -= 1
        errors /= len(whole)
        back = (errors @ second.T) * (inner > 0)
        return np.concatenate([(points.T @ back).ravel(), back.sum(0), (inner.T @ errors).ravel(), errors.sum(0)])

    def _shares(self, values: Floats, points: Floats) -> Floats:
        first, bias, second, last = self._split(values)
        scores = np.maximum(points @ first + bias, 0) @ second + last
        shares = np.exp(scores - scores.max(1, keepdims=True))
        return shares / shares.sum(1, keepdims=True)

    def loss(self, values: Floats) -> float:
        """Return the mean cross-entropy over all points."""
        shares = self._shares(values, self.points)
        return float(-np.log(np.maximum(shares[np.arange(len(self.labels)), self.labels], 1e-12)).mean())

    def accuracy(self, values: Floats) -> float:
        """Return the share of points whose class is found."""
        return float((self._shares(values, self.points).argmax(1) == self.labels).mean())
