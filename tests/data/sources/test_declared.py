"""Sources as they are described: checked when they are made, and again when they come from elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import sources
from paceline.data.sources.declared import (
    Arrays,
    BatchRecipe,
    Lines,
    OwnDataset,
    Parquet,
    Tensors,
    WebDataset,
    check_source,
    decode_recipe,
    encode_recipe,
)
from paceline.errors import PeerError, UsageError

MADE = (
    sources.arrays("digits.npz", "images", "labels"),
    sources.arrays(Path("x.npy")),
    sources.arrays(images="x.npy", labels=Path("y.npy")),
    sources.tensors("x.safetensors", "a"),
    sources.lines(["a.txt", Path("b.txt")]),
    sources.lines("*.txt", binary=True),
    sources.parquet("*.parquet"),
    sources.parquet("*.parquet", columns=["a", "b"]),
    sources.webdataset("*.tar"),
    sources.dataset("my_data:Images", size=3, folders=["a", {"b": None}], ratio=0.5, flip=True),
)


@pytest.mark.parametrize("source", MADE, ids=lambda source: type(source).__name__)
def test_it_travels_as_plain_data(source: sources.Source) -> None:
    recipe = BatchRecipe(source, transform="my_data:augment", on_error="skip", seed=7)
    assert decode_recipe(encode_recipe(recipe)) == recipe
    check_source(source)


def test_equal_recipes_are_equal_bytes() -> None:
    one, other = sources.dataset("a:b", x=1, y={"p": 1, "q": 2}), sources.dataset("a:b", y={"q": 2, "p": 1}, x=1)
    assert encode_recipe(BatchRecipe(one)) == encode_recipe(BatchRecipe(other))
    assert encode_recipe(BatchRecipe(one)) != encode_recipe(BatchRecipe(one, seed=1))


DEEP: Any = []
for _ in range(40):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: sources.arrays(), "takes one file"),
        (lambda: sources.arrays("a.npz", images="x.npy"), "takes one file"),
        (lambda: sources.arrays("a.npz"), "does not say which"),
        (lambda: sources.arrays("a.npy", "b.npy"), r"name them, arrays\(images='a.npy', labels='b.npy'\)"),
        (lambda: sources.arrays("a.npz", "x", "x"), "x is named twice"),
        (lambda: sources.arrays(images=3), "3 is a int, expected a path"),
        (lambda: sources.arrays(""), "is not a path"),
        (lambda: sources.tensors("a.safetensors"), "does not say which"),
        (lambda: sources.tensors("a.safetensors", 1), "expected the name of a tensor"),
        (lambda: sources.lines([]), "there are no files"),
        (lambda: sources.lines([b"a"]), "expected a path"),
        (lambda: sources.lines("a\0b"), "is not a path"),
        (lambda: sources.lines("a", encoding="klingon"), "that Python knows"),
        (lambda: sources.lines("a", encoding="hex"), "that Python knows"),
        (lambda: sources.lines("a", encoding="utf-16"), "a line feed is one byte"),
        (lambda: sources.parquet("a", columns="name"), "expected a list of names"),
        (lambda: sources.parquet("a", columns=[]), "expected a list of names"),
        (lambda: sources.parquet("a", columns=["x", "x"]), "x is named twice"),
        (lambda: sources.webdataset(()), "there are no files"),
        (lambda: sources.dataset("Images"), "names no dataset"),
        (lambda: sources.dataset("a:b", x={1, 2}), "argument x of a:b has a set"),
        (lambda: sources.dataset("a:b", x=[{"y": b"z"}]), "argument x of a:b has a bytes"),
        (lambda: sources.dataset("a:b", x={1: 2}), "the key 1"),
        (lambda: sources.dataset("a:b", x=DEEP), "in each other"),
    ],
)
def test_what_makes_no_sense_is_said_at_once(make: Callable[[], object], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        make()


@pytest.mark.parametrize(
    "source",
    [
        Arrays(()),
        Arrays((), ()),
        Arrays(MADE[0].arrays, ("one",)),  # pyright: ignore[reportAttributeAccessIssue]
        Tensors("a", ()),
        Tensors("\0", ("a",)),
        Lines((), None),
        Lines(("a",), "utf-16"),
        Lines(("a",), "\0"),
        Parquet(("a",), ()),
        WebDataset(("",)),
        OwnDataset("os", {}),
        OwnDataset("a:b", {"x": b"bytes"}),
        OwnDataset("a:b", {"x": DEEP}),
        "a.txt",
    ],
)
def test_what_another_process_could_send_is_checked_again(source: Any) -> None:
    with pytest.raises(UsageError):
        check_source(source)


VALID = [encode_recipe(BatchRecipe(source)) for source in MADE]
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), 1 << 63) | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(("type", "path", "x")), inner),
    max_leaves=5,
)
CUT = st.tuples(st.sampled_from(VALID), st.integers(0, 60), st.binary(max_size=3))


@given(
    st.binary(max_size=60) | PLAIN.map(msgspec.msgpack.encode) | CUT.map(lambda c: c[0][: c[1]] + c[2] + c[0][c[1] :])
)
@settings(deadline=None, max_examples=150)
def test_whatever_bytes_come_they_are_a_recipe_or_refused(data: bytes) -> None:
    try:
        recipe = decode_recipe(data)
        check_source(recipe.source)
    except (PeerError, UsageError):
        return
    assert decode_recipe(encode_recipe(recipe)) == recipe
