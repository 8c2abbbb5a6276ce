from paceline.update.filters.traffic import RowTraffic, WireBytes


def test_a_known_list_with_values_of_8_bytes_saves_half_but_for_its_digest() -> None:
    n = 1 << 20
    once = WireBytes(frames=1, digest_bytes=16, value_bytes=8 * n, plain_key_bytes=8 * n, plain_value_bytes=8 * n)
    assert once.saved == 0.5 - 16 / (16 * n)
    assert once.saved_on_keys == 1 - 16 / (8 * n)
    assert once.saved_on_values == 0.0


def test_sums_are_exact_beyond_what_floats_hold() -> None:
    big = WireBytes(1, 2**60 + 1, 3, 2**60 + 7, 2**61 + 1, 2**61)
    assert big + big == WireBytes(2, 2**61 + 2, 6, 2**61 + 14, 2**62 + 2, 2**62)
    assert (big + WireBytes()).total_bytes == 2**61 + 11
    assert big.plain_total_bytes == 2**62 + 1


def test_nothing_saves_nothing() -> None:
    assert RowTraffic().total.saved == WireBytes().saved_on_keys == 0.0


def test_traffic_adds_up_by_direction() -> None:
    pushed, pulled, delivered = WireBytes(frames=1, key_bytes=8), WireBytes(frames=2), WireBytes(value_bytes=5)
    both = RowTraffic(pushed=pushed) + RowTraffic(pulled=pulled, delivered=delivered)
    assert both == RowTraffic(pushed, pulled, delivered)
    assert both.total == WireBytes(frames=3, key_bytes=8, value_bytes=5)
