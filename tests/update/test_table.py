import msgspec
import pytest
from msgspec.structs import replace
from tests.update.tables import SEGMENTS, table

from paceline.errors import PeerError, UsageError
from paceline.update.named_rules import SGD, Adam, torch_optim
from paceline.update.rules import RuleSpec
from paceline.update.table import Segment, TableSpec, decode_table, differences, encode_table


@pytest.mark.parametrize("rule", [SGD(0.1), Adam(), torch_optim("Adafactor")], ids=lambda rule: rule.name)
def test_travels_unchanged(rule: RuleSpec) -> None:
    spec = replace(table(rule, (Segment("a", (2, 3)), Segment("b", ()))), consistency="ssp:3")
    assert decode_table(encode_table(spec)) == spec


def test_knows_its_layout() -> None:
    spec = table(segments=SEGMENTS)
    assert spec.numel == 561 + 5 + 1 + 40 + 300
    assert spec.offsets == (0, 561, 566, 567, 607)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": ""}, "it has no name"),
        ({"segments": ()}, "it has no parameters"),
        ({"segments": (Segment("w", (2, -1)),)}, r"shape \(2, -1\), expected sizes"),
        ({"segments": (Segment("w", (0, 2**63)),)}, "whose product without zeros is below"),
        ({"segments": (Segment("w", (0, 2**32, 2**32)),)}, "whose product without zeros is below"),
        ({"segments": (Segment("w", (2,)), Segment("w", (3,)))}, r"parameter 1 \('w'\) has the name of an earlier"),
        ({"segments": (Segment("w", (2,), 1),)}, r"is in group 1, but its rule has 1 group\(s\)"),
        ({"dtype": "int8"}, "dtype is 'int8', expected one of float32, float64"),
        ({"scale": "median"}, "scale is 'median', expected one of sum, mean, samples"),
        ({"nonfinite": "skip"}, "nonfinite is 'skip', expected one of reject, zero, halt, ignore"),
        ({"rule": RuleSpec("", ({},))}, "its update rule has no name"),
        ({"rule": RuleSpec("add", ()), "segments": ()}, "it has no parameters"),
        ({"consistency": "sometimes"}, "unknown consistency 'sometimes'"),
    ],
)
def test_refuses_nonsense(change: dict, message: str) -> None:
    spec = replace(table(), **change)
    with pytest.raises(UsageError, match=message):
        spec.validate()
    with pytest.raises(PeerError, match="A peer sent a table that cannot be used"):
        decode_table(encode_table(spec))


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", msgspec.msgpack.encode({"name": "t"}), msgspec.msgpack.encode([1, 2])], ids=repr
)
def test_refuses_what_is_no_table(data: bytes) -> None:
    with pytest.raises(PeerError, match="cannot be used"):
        decode_table(data)


def test_refuses_hyperparameters_that_are_no_numbers() -> None:
    spec = table(RuleSpec("add", ({"lr": "fast"},)))  # pyright: ignore[reportArgumentType]
    with pytest.raises(PeerError, match=r"Expected `.*`, got `str` - at `\$\.rule\.groups"):
        decode_table(encode_table(spec))


def test_equal_tables_do_not_differ() -> None:
    assert differences(table(SGD(0.1)), table(SGD(0.1))) == []


@pytest.mark.parametrize(
    ("theirs", "sentence"),
    [
        (replace(table(SGD(0.1)), name="u"), "the name is t here and u there."),
        (table(SGD(0.1), [Segment("w", (5,))]), "parameter 0 is 'w' (4,) here and 'w' (5,) there."),
        (table(SGD(0.1), [Segment("v", (4,))]), "parameter 0 is 'w' (4,) here and 'v' (4,) there."),
        (table(SGD(0.1), [Segment("w", (4,), 1)]), "the group of parameter 0 ('w') is 0 here and 1 there."),
        (replace(table(SGD(0.1)), dtype="float64"), "the dtype is float32 here and float64 there."),
        (table(SGD(0.2)), "lr of group 0 is 0.1 here and 0.2 there."),
        (replace(table(SGD(0.1)), consistency="ssp:1"), "the consistency is bsp here and ssp:1 there."),
        (replace(table(SGD(0.1)), scale="sum"), "the scale is mean here and sum there."),
        (
            replace(table(SGD(0.1)), nonfinite="halt"),
            "the treatment of non-finite gradients is reject here and halt there.",
        ),
    ],
)
def test_says_what_differs(theirs: TableSpec, sentence: str) -> None:
    assert differences(table(SGD(0.1)), theirs) == [sentence]


def test_says_which_parameters_exist_on_one_side_only() -> None:
    more = table(segments=[Segment("w", (4,)), Segment("b", (2,))])
    assert differences(table(), more) == [
        "the number of parameters is 1 here and 2 there.",
        "parameter 1 ('b' (2,)) exists only there.",
    ]
    assert differences(more, table())[1] == "parameter 1 ('b' (2,)) exists only here."


def test_says_which_hyperparameters_exist_on_one_side_only_and_stops_at_the_limit() -> None:
    ours, theirs = table(SGD(0.1)), table(Adam(0.1))
    assert differences(ours, theirs)[:2] == [
        "the update rule is torch.optim.SGD here and torch.optim.Adam there.",
        "amsgrad of group 0 is not given here and False there.",
    ]
    assert len(differences(ours, theirs)) == 3
    assert len(differences(ours, theirs, limit=1)) == 1
