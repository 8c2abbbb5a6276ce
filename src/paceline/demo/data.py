"""The handwritten digits that scikit-learn brings along, as a file that every worker can load in no time."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Final

from paceline.errors import UsageError

_EXTRAS: Final = {"scikit-learn": "sklearn", "matplotlib": "matplotlib"}
NUM_DIGITS: Final = 1797
NUM_TRAINING: Final = 1440  # divides evenly by many numbers of workers


def check_extras() -> None:
    """Raise UsageError when what the demo needs beyond Paceline itself is not installed."""
    missing = [package for package, module in _EXTRAS.items() if find_spec(module) is None]
    if missing:
        raise UsageError(f"The demo needs {' and '.join(missing)}, not installed here: pip install 'paceline[demo]'.")


def write_digits(path: Path, seed: int) -> None:
    """Write the digits in a shuffled order: images (1797, 64) float32 in 0..1 and labels (1797,) int64."""
    import numpy as np
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(labels))
    np.savez(
        path,
        images=(images[order] / 16).astype(np.float32),
        labels=labels[order].astype(np.int64),
        num_training=np.array(NUM_TRAINING),
    )
