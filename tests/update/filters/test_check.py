from typing import Any

import pytest

import paceline
from paceline.errors import UsageError
from paceline.update.filters import (
    KKT,
    Cast,
    FilterSpec,
    Int8,
    KeyCache,
    RandomSkip,
    Significant,
    TopK,
    check_filters,
)

ALL = (KeyCache(), KKT(0.1), Significant(0.5), TopK(0.1), RandomSkip(0.5), Int8(on="push"), Cast("float16", on="pull"))


def test_all_filters_go_together() -> None:
    check_filters(ALL)
    check_filters(())
    assert len({spec.name for spec in ALL}) == len(ALL)


def test_filters_are_public() -> None:
    assert paceline.filters.TopK(0.1) == TopK(0.1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TopK(0), r"top_k: share is 0, expected a number in \(0, 1\]"),
        (lambda: TopK(1.5), "share is 1.5"),
        (lambda: TopK(float("nan")), "share is nan"),
        (lambda: TopK(True), "share is True"),
        (lambda: TopK(0.5, max_age=-1), "max_age is -1, expected a whole number from 0"),
        (lambda: TopK(0.5, max_age=1.5), "max_age is 1.5"),  # pyright: ignore[reportArgumentType]
        (lambda: TopK("all"), "share is all"),  # pyright: ignore[reportArgumentType]
        (lambda: Significant(0.0), "threshold is 0.0, expected a finite number greater than 0"),
        (lambda: Significant(float("inf")), "threshold is inf"),
        (lambda: RandomSkip(0.0), "keep is 0.0"),
        (lambda: RandomSkip(0.5, seed=-1), "seed is -1"),
        (lambda: KKT(0.0), "l1 is 0.0, expected a finite number greater than 0"),
        (lambda: KKT(-1.0), "l1 is -1.0"),
        (lambda: KKT(0.1, margin=0.1), "margin is 0.1, expected less than l1, which is 0.1"),
        (lambda: KKT(0.1, reset_every=1), "reset_every is 1, expected a whole number from 2"),
        (lambda: KeyCache(max_lists=0), "max_lists is 0"),
        (lambda: KeyCache(max_ids=0), "max_ids is 0"),
        (lambda: Cast("float32"), "dtype is 'float32', expected one of bfloat16, float16"),  # pyright: ignore[reportArgumentType]
        (lambda: Cast("int8"), "dtype is 'int8'"),  # pyright: ignore[reportArgumentType]
        (lambda: Int8(on="never"), "on is 'never', expected one of push, pull, both"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_nonsense_is_refused_when_it_is_said(make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        (
            (FilterSpec("snappy", {}),),
            "no filter 'snappy'. There are key_cache, kkt, significant, top_k, ",
        ),
        ((FilterSpec("top_k", {}),), "top_k has the numbers none, expected share, max_age"),
        ((FilterSpec("int8", {"push": True, "pull": 1}),), "int8: pull is 1, expected true or false"),
        ((FilterSpec("int8", {"push": False, "pull": False}),), "int8 is for neither pushes nor pulls"),
        ((Int8(), Cast("float16", on="pull")), "int8 and float16 both say how the numbers of a pull travel"),
        ((Cast("bfloat16"), Cast("float16")), "bfloat16 and float16 both say how the numbers of a push travel"),
        ((TopK(0.1), KeyCache(), TopK(0.2)), "top_k is given 2 times, expected once"),
    ],
)
def test_contradictions_are_refused(filters: tuple[FilterSpec, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_filters(filters)
