import numpy as np

from paceline.observe.row_counts import RowCounts


def body(*ids: int) -> memoryview:
    return memoryview(np.array(ids, dtype=np.int64).tobytes() + b"values")


def test_the_row_in_all_pushes_is_the_hottest() -> None:
    rows = RowCounts()
    for number in range(7):
        rows.note("words", body(7, 7, 100 + number), 3, float(number))
    assert rows.hottest()[0] == ("words", 7, 1.0)
    assert {share for _, _, share in rows.hottest()[1:]} == {1 / 6}


def test_few_pushes_and_pushes_at_short_intervals_say_nothing() -> None:
    rows = RowCounts()
    for number in range(100):
        rows.note("words", body(7), 1, number / 10_000)
    assert rows.hottest() == ()


def test_a_body_without_the_ids_it_should_have_and_too_many_tables_are_left_out() -> None:
    rows = RowCounts()
    for number in range(100):
        rows.note("words", body(7), 1 << 62, float(number))
        rows.note("words", body(7), -1, float(number))
        rows.note(f"table {number}", body(7), 1, 0.0)
    assert rows.hottest() == ()
    assert len(rows._tables) < 20
