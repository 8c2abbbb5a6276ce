"""Ratings of items by users: read from a file, or made up where there is none.

Known are the files of MovieLens (`u.data`, `ratings.dat`, `ratings.csv`: user, item, rating and more in each line) and
MATLAB files with arrays `train_vec` and `probe_vec` of such lines (`moviedata.mat`), which need scipy.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from paceline.errors import UsageError

# Made-up ratings: products of hidden rows, and noise. Some items are rated far more often than others (Zipf). The mean
# of the hidden numbers is not 0, so some items please most users, and some users are pleased by most items.
NUM_USERS, NUM_ITEMS, NUM_RATINGS, ZIPF = 1000, 500, 100_000, 0.5
HIDDEN, MEAN, NOISE = 8, 0.5, 1.2


@dataclass(frozen=True, slots=True)
class Ratings:
    """Who rated what, and how: `users` and `items` are ids, (n,) int64, and `values` (n,) float32."""

    users: Tensor
    items: Tensor
    values: Tensor

    def __len__(self) -> int:
        """Count the ratings."""
        return len(self.values)

    def __getitem__(self, places: Tensor | slice) -> Ratings:
        """Return some of the ratings."""
        return Ratings(self.users[places], self.items[places], self.values[places])

    def cut(self, num_parts: int) -> list[Ratings]:
        """Return the ratings in so many parts, or fewer."""
        return [self[places] for places in torch.arange(len(self)).chunk(num_parts)]


def load(path: Path | None, seed: int) -> tuple[Ratings, Ratings]:
    """Return ratings to train on, and a tenth to test with: shuffled, and relative to the mean of the former."""
    ratings = _made_up() if path is None else _read(path)
    ratings = ratings[torch.from_numpy(np.random.default_rng(seed).permutation(len(ratings)))]
    num_training = len(ratings) * 9 // 10
    ratings.values.sub_(ratings.values[:num_training].mean())
    return ratings[:num_training], ratings[num_training:]


def _made_up() -> Ratings:
    rng = np.random.default_rng(0)
    popularity = np.arange(1, NUM_ITEMS + 1) ** -ZIPF
    users = rng.integers(NUM_USERS, size=NUM_RATINGS)
    items = rng.choice(NUM_ITEMS, size=NUM_RATINGS, p=popularity / popularity.sum())
    left, right = rng.normal(MEAN, size=(NUM_USERS, HIDDEN)), rng.normal(MEAN, size=(NUM_ITEMS, HIDDEN))
    values = (left[users] * right[items]).sum(axis=1) / HIDDEN**0.5 + NOISE * rng.normal(size=NUM_RATINGS)
    return _ratings(users, items, values)


def _read(path: Path) -> Ratings:
    if not path.is_file():
        raise UsageError(f"there is no ratings file {path}; without one, made-up ratings are used")
    try:
        lines = _read_matlab(path) if path.suffix == ".mat" else _read_lines(path)
    except ValueError as error:
        raise UsageError(f"{path} holds no ratings: {error}; expected lines of user, item and rating") from error
    if not len(lines) or not np.isfinite(lines).all():
        raise UsageError(f"{path} holds no ratings, or some that are not finite numbers")
    return _ratings(*lines.T)


def _read_lines(path: Path) -> np.ndarray:
    lines = path.read_text().replace("::", "\t").replace(",", "\t").splitlines()
    has_heading = bool(lines) and not lines[0][:1].isdigit()
    return np.loadtxt(lines[has_heading:], usecols=(0, 1, 2), ndmin=2) if lines[has_heading:] else np.empty((0, 3))


def _read_matlab(path: Path) -> np.ndarray:
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise UsageError(f"reading {path} needs scipy, which comes with pip install 'paceline[demo]'") from error
    arrays = loadmat(path)
    found = [arrays[name] for name in ("train_vec", "probe_vec") if name in arrays]
    if not found:
        raise UsageError(f"{path} has neither of the arrays train_vec and probe_vec")
    return np.concatenate(found).astype(np.float64)[:, :3]


def _ratings(users: np.ndarray, items: np.ndarray, values: np.ndarray) -> Ratings:
    return Ratings(
        torch.from_numpy(users.astype(np.int64)),
        torch.from_numpy(items.astype(np.int64)),
        torch.from_numpy(values.astype(np.float32)),
    )
