"""What a user says of a table, as the plain data that all members of a job compare."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paceline.errors import UsageError
from paceline.tensors.filters.check import check_filters
from paceline.tensors.rows.spec import FilterSpec, First, Lifecycle, RowTableSpec
from paceline.tensors.rules import RuleSpec
from paceline.tensors.table import DType, NonFinite, Scale, Segment, TableSpec


@dataclass(frozen=True, slots=True)
class Declaration:
    """What is said of dense tables and of tables of rows alike; see `TableSpec`."""

    name: str
    dtype: DType
    rule: RuleSpec
    consistency: str
    scale: Scale
    nonfinite: NonFinite

    def __post_init__(self) -> None:
        """Refuse what is no rule."""
        if not isinstance(self.rule, RuleSpec):  # pyright: ignore[reportUnnecessaryIsInstance] - scripts are not typed
            raise UsageError(
                f"table '{self.name}': update is {self.rule!r}, expected one of paceline.update, SGD(lr=0.1) for "
                "example."
            )

    def dense(self, shape: tuple[int, ...]) -> TableSpec:
        """Return the table of one parameter of a shape."""
        segments = (Segment(self.name, shape),)
        spec = TableSpec(self.name, segments, self.dtype, self.rule, self.consistency, self.scale, self.nonfinite)
        spec.validate()
        return spec

    def rows(
        self, width: int, init: float | Tensor | First, life: Lifecycle, filters: tuple[FilterSpec, ...]
    ) -> RowTableSpec:
        """Return the table of rows of `width` numbers."""
        if isinstance(init, Tensor):
            raise UsageError(
                f"table '{self.name}': init is a tensor, but nobody knows the ids of rows in advance: give a number, "
                "or what makes the first values of any row, paceline.first.normal(0.01) for example."
            )
        first = init if isinstance(init, First) else First("constant", float(init))
        check_filters(filters)
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
        )
        spec.validate()
        return spec
