"""What holds for all tests."""

import gc


def pytest_collection_finish() -> None:
    """Leave out what was there before the first test when tests look for garbage: most of their time else."""
    gc.collect()
    gc.freeze()
