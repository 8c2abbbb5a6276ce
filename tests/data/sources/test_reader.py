"""What holds for every reader: made in this process or by a data server, a batch is the same, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.data.service.feeders import feeders
from tests.data.sources.made import same
from tests.nodes.cluster import CARRIERS

from paceline import sources
from paceline.data.sources.batch import BatchRequest
from paceline.data.sources.declared import BatchRecipe
from paceline.data.sources.reader import Reader
from paceline.data.sources.records import LocalReader, open_recipe
from paceline.errors import DataError, RecordError, UsageError

Readers: TypeAlias = "Callable[[BatchRecipe], Reader]"

NUM = 12
IMAGES = torch.arange(NUM * 600, dtype=torch.float32).view(NUM, 20, 30)
OWN = "tests.data.sources.own"
POEM = "so much depends\nupon\na red wheel\nbarrow\nglazed with rain\nwater\n"
RECIPES: dict[str, BatchRecipe] = {
    "arrays": BatchRecipe(sources.arrays("digits.npz", "images", "labels")),
    "named": BatchRecipe(sources.arrays(images="x.npy", labels="y.npy")),
    "tensors": BatchRecipe(sources.tensors("both.safetensors", "images")),
    "lines": BatchRecipe(sources.lines("poem.txt")),
    "bytes": BatchRecipe(sources.lines("poem.txt", binary=True)),
    "transform": BatchRecipe(sources.tensors("both.safetensors", "images", "labels"), f"{OWN}:noisy", seed=3),
    "dataset": BatchRecipe(sources.dataset(f"{OWN}:pairs")),
    "mixed": BatchRecipe(sources.lines("poem.txt"), f"{OWN}:letters"),
}
ASKS = (
    BatchRequest(0, (3, 0, 5)),
    BatchRequest(0, (1,)),
    BatchRequest(1, (3, 0, 5)),
    BatchRequest(0, (2, 2, 4)),
    BatchRequest(7, ()),
)
SKIPPING = BatchRecipe(sources.dataset(f"{OWN}:squares", num=10, bad=4), on_error="skip")
RAISING = BatchRecipe(sources.dataset(f"{OWN}:squares", num=10, bad=4))


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    labels = torch.arange(NUM)
    np.savez("digits.npz", images=IMAGES.numpy(), labels=labels.numpy())
    np.save("x.npy", IMAGES.numpy())
    np.save("y.npy", labels.numpy())
    save_file({"images": IMAGES, "labels": labels}, "both.safetensors")
    Path("poem.txt").write_text(POEM)


@contextmanager
def opening(kind: str, directory: Path) -> Iterator[Readers]:
    """Yield what opens readers of one kind; all are closed afterwards."""
    if kind == "here":
        yield LocalReader
        return
    with feeders(kind, directory / "sockets", num=2, open_records=open_recipe) as running:
        opened: list[Reader] = []

        def open_remote(recipe: BatchRecipe) -> Reader:
            opened.append(running.new_reader(recipe))
            return opened[-1]

        yield open_remote
        for reader in opened:
            reader.close()


@pytest.fixture(params=["here", *CARRIERS])
def readers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Readers]:
    (tmp_path / "sockets").mkdir()
    with opening(request.param, tmp_path) as open_one:
        yield open_one


def test_a_batch_is_a_function_of_recipe_and_question(readers: Readers) -> None:
    for name, recipe in RECIPES.items():
        with closing(LocalReader(recipe)) as here, closing(readers(recipe)) as reader:
            assert reader.num_samples == here.num_samples, name
            reader.expect(ASKS)
            for asked in (*ASKS, *reversed(ASKS)):
                found, expected = reader.read(asked), here.read(asked)
                assert same(found.content, expected.content), (name, asked)
                assert (found.num_samples, found.num_skipped) == (expected.num_samples, expected.num_skipped)


def test_a_batch_outlives_its_reader_and_can_be_written_to(readers: Readers) -> None:
    with closing(readers(RECIPES["arrays"])) as reader:
        images, labels = reader.read(BatchRequest(0, (3, 1))).content
    assert torch.equal(images, IMAGES[[3, 1]])
    labels += 1
    assert labels.tolist() == [4, 2]
    with closing(readers(RECIPES["arrays"])) as reader:
        assert reader.read(BatchRequest(0, (3, 1))).content[1].tolist() == [3, 1]


def test_nothing_is_read_from_a_reader_that_is_closed(readers: Readers) -> None:
    reader = readers(RECIPES["arrays"])
    reader.close()
    with pytest.raises(UsageError, match="a reader of training examples is closed"):
        reader.read(BatchRequest(0, (3, 1)))


def test_what_was_expected_and_is_not_read_does_no_harm(readers: Readers) -> None:
    with closing(readers(RAISING)) as reader:
        reader.expect([BatchRequest(0, (4,)), BatchRequest(0, (99,)), BatchRequest(0, (1, 2))])
        assert reader.read(BatchRequest(0, (3,))).content.tolist() == [9]
        reader.expect([])
        assert reader.read(BatchRequest(0, (1, 2))).content.tolist() == [1, 4]


def test_a_record_that_cannot_be_decoded_fails_its_batch_alone(readers: Readers) -> None:
    with closing(readers(RAISING)) as reader:
        with pytest.raises(RecordError, match="could not be made part of a batch"):
            reader.read(BatchRequest(0, (3, 4)))
        assert reader.read(BatchRequest(0, (3, 5))).content.tolist() == [9, 25]


def test_records_that_are_left_out_are_counted(readers: Readers) -> None:
    with closing(readers(SKIPPING)) as reader:
        some, none = reader.read(BatchRequest(0, (3, 4, 5))), reader.read(BatchRequest(0, (4,)))
        assert (some.content.tolist(), some.num_samples, some.num_skipped) == ([9, 25], 2, 1)
        assert (none.content, none.num_samples, none.num_skipped) == (None, 0, 1)
        assert reader.skipped().num_skipped == 2
        assert "on_error='skip'" in reader.skipped().reasons[0]


@pytest.mark.parametrize("index", [-1, NUM])
def test_an_index_that_is_no_sample_is_refused(index: int, readers: Readers) -> None:
    with closing(readers(RECIPES["arrays"])) as reader, pytest.raises(UsageError, match="12"):
        reader.read(BatchRequest(0, (0, index)))


@pytest.mark.parametrize(
    ("recipe", "error", "words"),
    [
        (BatchRecipe(sources.arrays("nowhere.npy")), DataError, "nowhere.npy"),
        (BatchRecipe(sources.lines("*.csv")), DataError, "no file matches"),
        (BatchRecipe(sources.lines("poem.txt"), f"{OWN}:nothing"), UsageError, "nothing"),
        (BatchRecipe(sources.dataset(f"{OWN}:broken")), DataError | UsageError, "no folder train"),
    ],
)
def test_what_cannot_be_opened_is_said_by_name(
    recipe: BatchRecipe, error: type[Exception], words: str, readers: Readers
) -> None:
    kinds = (DataError, UsageError)
    with pytest.raises(kinds, match=words) as caught, closing(readers(recipe)) as reader:
        reader.read(BatchRequest(0, (0,)))
    assert isinstance(caught.value, error)
