"""Table declarations: arguments of the user, validated and turned into specs that all processes compare."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
from torch import Tensor

from paceline.core.consistency import Consistency
from paceline.errors import UsageError
from paceline.update.filters.check import check_filters
from paceline.update.rows.spec import FilterSpec, First, Lifecycle, RowTableSpec
from paceline.update.rules import RuleSpec
from paceline.update.table import DType, NonFinite, Scale, Segment, TableSpec
from paceline.worker.rows.managed import Managed
from paceline.worker.validation import brief

_NAMED: Final = {"segments": "shape", "width": "rows", "rule": "update", "first": "init"}  # in `Session.table`
_AT: Final = re.compile(r" - at `.*`")


class Declaration(msgspec.Struct, frozen=True):
    """The arguments that dense tables and row tables share; see `TableSpec`."""

    name: str
    dtype: DType
    rule: RuleSpec
    consistency: str
    scale: Scale
    nonfinite: NonFinite

    def __post_init__(self) -> None:
        """Validate name and rule."""
        if not isinstance(self.name, str):  # pyright: ignore[reportUnnecessaryIsInstance] - scripts are not typed
            raise UsageError(f"a table is named {brief(self.name)}, expected a text that is unique in the job.")
        if not isinstance(self.rule, RuleSpec):  # pyright: ignore[reportUnnecessaryIsInstance] - scripts are not typed
            raise UsageError(
                f"table '{self.name}': update is {brief(self.rule)}, expected one of paceline.update, SGD(lr=0.1) for "
                "example."
            )

    def dense(self, shape: Sequence[int] | Mapping[str, Sequence[int]]) -> TableSpec:
        """Return the spec of a dense table with one segment of this shape, or with one for each part."""
        shapes = shape if isinstance(shape, Mapping) else {self.name: shape}
        for sizes in shapes.values():
            if isinstance(sizes, str) or not isinstance(sizes, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise UsageError(
                    f"table '{self.name}': shape is {brief(sizes)}, expected sizes such as (3, 2) or (5,)."
                )
        segments = tuple(Segment(name, tuple(sizes)) for name, sizes in shapes.items())
        spec = TableSpec(self.name, segments, self.dtype, self.rule, self.consistency, self.scale, self.nonfinite)
        _require_types(spec)
        spec.validate()
        return spec

    def rows(
        self,
        width: int,
        init: float | Tensor | Mapping[str, Tensor] | First,
        life: Lifecycle,
        filters: tuple[FilterSpec, ...],
        communication: Managed | None = None,
    ) -> RowTableSpec:
        """Return the spec of a row table with `width` numbers a row."""
        if isinstance(init, Tensor):
            raise UsageError(
                f"table '{self.name}': init is a tensor, but the ids of rows are not known in advance: give a number, "
                "or what makes the first values of any row, paceline.first.normal(0.01) for example."
            )
        first = init
        if isinstance(init, float) or (isinstance(init, int) and abs(init) <= sys.float_info.max):
            first = First("constant", float(init))
        if not isinstance(first, First):
            raise UsageError(
                f"table '{self.name}': init is {brief(init)}, expected a number or one of paceline.first, "
                "paceline.first.normal(0.01) for example."
            )
        spec = RowTableSpec(
            self.name,
            width,
            self.dtype,
            self.rule,
            self.consistency,
            self.scale,
            self.nonfinite,
            first,
            life,
            filters,
            0 if communication is None else communication.clocks_held(Consistency.parse(self.consistency)),
        )
        _require_types(spec)
        check_filters(filters)
        spec.validate()
        return spec


def _require_types(spec: TableSpec | RowTableSpec) -> None:
    """Raise UsageError for settings that cannot be encoded, which servers would take for a broken connection."""
    try:
        msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=type(spec))
    except (TypeError, OverflowError, UnicodeError) as error:  # cannot be encoded at all
        wrong = next((name for name in spec.__struct_fields__ if not _is_plain(getattr(spec, name))), "")
        told = f"{_NAMED.get(wrong, wrong)} is {brief(getattr(spec, wrong))}" if wrong else "its settings are too much"
        advice = ", such as 'float32'" if wrong == "dtype" else ""
        raise UsageError(f"table '{spec.name}': {told}, expected plain text and numbers{advice} ({error}).") from None
    except msgspec.ValidationError as error:
        if "enum" in str(error):  # `validate` knows what is expected
            return
        field = re.search(r"`\$\.(\w+)", str(error))
        where = f"{_NAMED.get(field[1], field[1])}: " if field else ""
        raise UsageError(f"table '{spec.name}': {where}{_AT.sub('', str(error))}.") from None


def _is_plain(value: object) -> bool:
    try:
        msgspec.msgpack.encode(value)
    except (TypeError, OverflowError, UnicodeError):
        return False
    return True
