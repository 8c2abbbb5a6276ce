import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.update.tables import table

from paceline.core.partition import Range, partition
from paceline.update.table import Segment, cut

SHAPES = st.lists(st.lists(st.integers(1, 40), max_size=3).map(tuple), min_size=1, max_size=6)


@settings(max_examples=100, deadline=None)
@given(SHAPES, st.integers(1, 6))
def test_pieces_of_all_ranges_are_the_table_exactly_once(shapes: list[tuple[int, ...]], num_servers: int) -> None:
    spec = table(segments=[Segment(str(i), shape) for i, shape in enumerate(shapes)])
    seen = torch.zeros(spec.numel, dtype=torch.int64)
    spans = partition([s.numel for s in spec.segments], min(num_servers, spec.numel))
    for span in spans:
        local = seen[span.start : span.stop]
        for piece in cut(spec, span):
            assert piece.numel > 0
            view = piece.view(local)
            view += 1
            assert piece.whole == (view.numel() == spec.segments[piece.segment].numel)
            assert tuple(view.shape) == (spec.segments[piece.segment].shape if piece.whole else (piece.numel,))
            assert span.start + piece.offset == spec.offsets[piece.segment] + piece.start
        assert sum(piece.numel for piece in cut(spec, span)) == span.length
    assert bool((seen == 1).all())


def test_an_empty_range_has_no_pieces() -> None:
    assert cut(table(), Range(1, 4, 4)) == ()
