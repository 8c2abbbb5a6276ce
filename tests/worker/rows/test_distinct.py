"""Distinct ids are found once for the calls of a step, and never taken from a call with other ids."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.update.rows.torch_ops import TorchOps
from paceline.worker.rows.client import DistinctIds


class CountedSearch:
    """A search for distinct ids, and how often it was made."""

    num_searches = 0

    def __call__(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        self.num_searches += 1
        return TorchOps().unique(keys)


def test_a_step_that_pushes_what_it_pulled_searches_once() -> None:
    search = CountedSearch()
    finder = DistinctIds(search)
    ids = torch.tensor([7, -3, 7, 5])
    for given in (ids, ids.clone(), torch.tensor([7, -3, 5]), ids):  # as an embedding: it pulls the distinct ones
        distinct, places = finder.among(given)
        assert distinct.tolist() == [7, -3, 5]
        assert (distinct if places is None else distinct[places]).tolist() == given.tolist()
    assert search.num_searches == 1


def test_ids_that_a_script_has_changed_are_searched_again() -> None:
    search = CountedSearch()
    finder = DistinctIds(search)
    for ids in (torch.tensor([4, 4, 9]), torch.tensor([1, 2, 3])):  # with repeats and without
        finder.among(ids)
        ids[1] = 8
        distinct, places = finder.among(ids)
        assert (distinct if places is None else distinct[places]).tolist() == ids.tolist()
        assert distinct.untyped_storage().data_ptr() != ids.untyped_storage().data_ptr()
    assert search.num_searches == 4


def test_any_order_of_calls_finds_what_a_search_finds() -> None:
    dice = torch.Generator().manual_seed(5)
    search = CountedSearch()
    finder, plain = DistinctIds(search), TorchOps()
    batches = [torch.randint(4, (num,), generator=dice) for num in (0, 1, 2, 2, 3, 6, 6)]
    picks = torch.randint(len(batches), (200,), generator=dice).tolist()
    for ids in [part for pick in picks for part in (batches[pick], plain.unique(batches[pick])[0])]:
        distinct, places = finder.among(ids)
        assert distinct.tolist() == plain.unique(ids)[0].tolist()
        assert (distinct if places is None else distinct[places]).tolist() == ids.tolist()
    assert 0 < search.num_searches < 300


def test_what_was_found_in_inference_mode_may_be_saved_for_backward() -> None:
    finder = DistinctIds(TorchOps().unique)
    ids = torch.tensor([1, 1, 2])
    with torch.inference_mode():
        finder.among(ids)
    distinct, places = finder.among(ids)
    assert places is not None
    assert not places.is_inference()
    assert not distinct.is_inference()
