"""The number of tables that are counted by name is bounded, and so are their names."""

from paceline.observe.traffic import MAX_NAME, MAX_TABLES, Traffic


def test_bytes_are_counted_by_worker_and_by_table() -> None:
    traffic = Traffic()
    traffic.note_received(1, 100)
    traffic.note_pushed("model", 90)
    traffic.sent_to[1] += 50
    traffic.sent_of["model"] += 50
    traffic.sent_to[0] += 5
    traffic.sent_of[""] += 5
    assert traffic.carried(7.0, 3).links == ((1, 100, 50), (0, 0, 5))
    assert traffic.carried(7.0, 3).tables == (("model", 90, 50),)


def test_tables_beyond_the_first_ones_are_counted_together() -> None:
    traffic = Traffic()
    traffic.note_pushed("x" * (MAX_NAME + 1), 1000)
    for number in range(1000):
        traffic.note_pushed(f"table {number}", 1)
        traffic.sent_of[f"table {number}"] += 2
    tables = traffic.carried(0.0, 0).tables
    assert len(tables) == MAX_TABLES
    counts = {name: (received, sent) for name, received, sent in tables}
    assert counts[""] == (1000 + 1000 - (MAX_TABLES - 1), 2 * (1000 - (MAX_TABLES - 1)))
