"""Draws the lower half of architecture.svg, the folders of the source in layers, from the imports of the code.

    python docs/pictures/draw_architecture.py [--check]

A folder stands below all that import it. An arrow means "imports"; an arrow that follows from two others is left out of
the picture, and all are listed in its `<metadata>`. What a box says is the first line of the folder's `__init__`.
`tests/tidy` runs the same with --check.
"""

from __future__ import annotations

import ast
import html
import json
import sys
import textwrap
from dataclasses import dataclass, field
from itertools import pairwise, permutations
from pathlib import Path
from typing import Final

PICTURE: Final = Path(__file__).with_name("architecture.svg")
SOURCE: Final = Path(__file__).parents[2] / "src" / "paceline"
MARK: Final = "  <!-- layers: drawn by draw_architecture.py, as is all that follows -->\n"

LEFT, RIGHT, TOP = 30, 970, 486  # of the layers
BOX_WIDTH, BOX_HEIGHT, GAP = 272, 58, 28
MAX_CHARACTERS = 42  # of a line in a box
COLOURS: Final = {"core": "core", "update": "update", "worker": "node", "server": "node", "training": "training"}

Arrows = dict[str, set[str]]


def folders() -> list[str]:
    """Return the top folders of the package."""
    return sorted(init.parent.name for init in SOURCE.glob("*/__init__.py"))


def imports(folder: str) -> set[str]:
    """Return the other top folders that the modules of a folder import."""
    names: set[str] = set()
    for path in (SOURCE / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module == "paceline":
                names.update(f"paceline.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                names.add(node.module or "")
    below = {name.split(".")[1] for name in names if name.startswith("paceline.")}
    return below & set(folders()) - {folder}


def described(folder: str) -> str:
    """Return the first line of a folder's docstring."""
    documentation = ast.get_docstring(ast.parse((SOURCE / folder / "__init__.py").read_text())) or ""
    return documentation.partition("\n")[0].rstrip(".")


def reachable(arrows: Arrows, start: str) -> set[str]:
    """Return what a folder imports, and what that imports, and so on."""
    found: set[str] = set()
    ahead = set(arrows[start])
    while ahead:
        found |= ahead
        ahead = {after for name in ahead for after in arrows[name]} - found
    return found


def without_implied(arrows: Arrows) -> Arrows:
    """Leave out the arrows that follow from two or more others; raises ValueError for a circle."""
    if circle := [name for name in arrows if name in reachable(arrows, name)]:
        raise ValueError(f"folders import each other in a circle: {', '.join(circle)}")
    return {
        name: {to for to in below if not any(to in reachable(arrows, other) for other in below)}
        for name, below in arrows.items()
    }


def layers(arrows: Arrows) -> dict[str, int]:
    """Return the layer of each folder, 0 at the bottom: just below the lowest that imports it, above all it imports."""
    heights: dict[str, int] = {}
    for name in sorted(arrows, key=lambda name: len(reachable(arrows, name))):
        heights[name] = max((heights[below] + 1 for below in arrows[name]), default=0)
    for name in sorted(arrows, key=lambda name: -heights[name]):
        heights[name] = min((heights[by] - 1 for by in arrows if name in arrows[by]), default=heights[name])
    return heights


@dataclass(slots=True)
class Layout:
    """Where everything stands: rows from the bottom up, in each the boxes, and the points that lines pass.

    Args:
        rows: names of boxes; of points too, as "folder@row" for the lines that lead to a folder further down.
        lines: from and to, each between neighbouring rows; sorted, so that every process sums up and draws alike.
    """

    rows: list[list[str]]
    lines: list[tuple[str, str]]
    middles: dict[str, float] = field(default_factory=dict[str, float])

    @staticmethod
    def of(arrows: Arrows) -> Layout:
        """Lay out some folders."""
        heights = layers(arrows)
        rows: list[list[str]] = [[] for _ in range(max(heights.values()) + 1)]
        for name, height in sorted(heights.items()):
            rows[height].append(name)
        lines: set[tuple[str, str]] = set()
        for name, below in arrows.items():
            for to in sorted(below):
                between = [f"{to}@{row}" for row in range(heights[name] - 1, heights[to], -1)]
                for point, row in zip(between, range(heights[name] - 1, heights[to], -1), strict=True):
                    rows[row] += [] if point in rows[row] else [point]
                lines |= set(pairwise([name, *between, to]))
        layout = Layout(rows, sorted(lines))
        layout._order()
        return layout

    def _order(self) -> None:
        """Order every row so that lines are short and cross little, looking at its neighbours, a few times over."""
        for _ in range(6):
            for row in [*range(len(self.rows)), *reversed(range(len(self.rows)))]:
                orders = permutations(sorted(self.rows[row]))
                self._place(row, min(orders, key=lambda order, row=row: self._cost(row, order)))

    def _place(self, row: int, order: tuple[str, ...]) -> None:
        self.rows[row] = list(order)
        widths = [0 if "@" in name else BOX_WIDTH for name in self.rows[row]]
        room = (RIGHT - LEFT - sum(widths)) / (len(widths) + 1)
        ends = [sum(widths[: index + 1]) + room * (index + 1) for index in range(len(widths))]
        for name, width, end in zip(self.rows[row], widths, ends, strict=True):
            self.middles[name] = LEFT + end - width / 2

    def _cost(self, row: int, order: tuple[str, ...]) -> tuple[int, float]:
        """Return how many lines at a row cross, and how far they go sideways."""
        self._place(row, order)
        placed = [(a, b) for a, b in self.lines if a in self.middles and b in self.middles]
        crossings, length = 0, 0.0
        for upper in self.rows[row : row + 2]:
            ends = [(self.middles[a], self.middles[b]) for a, b in placed if a in upper]
            crossings += sum((a - c) * (b - d) < 0 for a, b in ends for c, d in ends)
            length += sum(abs(a - b) for a, b in ends)
        return crossings, length


def drawn(arrows: Arrows) -> str:
    """Return the layers as SVG."""
    shown = without_implied(arrows)
    layout = Layout.of(shown)
    tops = {
        name: TOP + (len(layout.rows) - 1 - height) * (BOX_HEIGHT + GAP)
        for height, row in enumerate(layout.rows)
        for name in row
    }
    listed = json.dumps({name: sorted(below) for name, below in sorted(arrows.items())})
    parts = [f"  <metadata>{html.escape(listed, quote=False)}</metadata>"]
    parts += [_line(layout, tops, line) for line in layout.lines]
    parts += [_point(layout, tops, name) for name in sorted(layout.middles) if "@" in name]
    parts += [_box(layout, tops, name) for name in sorted(shown)]
    return "\n".join([*parts, "</svg>", ""])


def _line(layout: Layout, tops: dict[str, int], line: tuple[str, str]) -> str:
    start, end = line
    begin = _port(layout, start, end, outgoing=True)
    finish = _port(layout, end, start, outgoing=False)
    top, bottom = tops[start] + BOX_HEIGHT, tops[end]
    tip = "" if "@" in end else ' marker-end="url(#tip)"'
    middle = (top + bottom) / 2
    curve = f"M{begin:.0f} {top} C{begin:.0f} {middle:.0f} {finish:.0f} {middle:.0f} {finish:.0f} {bottom}"
    return f'  <path class="import" d="{curve}"{tip}/>'


def _port(layout: Layout, name: str, other: str, *, outgoing: bool) -> float:
    """Return where a line leaves or enters: lines of one box side by side, in the order of their other ends."""
    if "@" in name:
        return layout.middles[name]
    others = [b if outgoing else a for a, b in layout.lines if (a if outgoing else b) == name]
    others.sort(key=lambda each: layout.middles[each])
    return layout.middles[name] + (others.index(other) - (len(others) - 1) / 2) * 36


def _point(layout: Layout, tops: dict[str, int], name: str) -> str:
    return f'  <path class="import" d="M{layout.middles[name]:.0f} {tops[name]} v{BOX_HEIGHT}"/>'


def _box(layout: Layout, tops: dict[str, int], name: str) -> str:
    left, top = layout.middles[name] - BOX_WIDTH / 2, tops[name]
    lines = textwrap.wrap(described(name), MAX_CHARACTERS, max_lines=2, placeholder=" ...")
    text = "".join(
        f'<text class="tiny" x="{left + 10:.0f}" y="{top + 34 + 15 * number}">{html.escape(line)}</text>'
        for number, line in enumerate(lines)
    )
    place = f'x="{left:.0f}" y="{top}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}"'
    return (
        f'  <rect class="{COLOURS.get(name, "layer")}" {place} rx="6"/>'
        f'<text class="part" x="{left + 10:.0f}" y="{top + 18}">{name}</text>{text}'
    )


def redrawn() -> str:
    """Return the whole picture, as it should be with the code as it is."""
    by_hand, _, _ = PICTURE.read_text().partition(MARK)
    return by_hand + MARK + drawn({name: imports(name) for name in folders()})


def main() -> int:
    """Write the picture; with --check, only say whether it is up to date."""
    text = redrawn()
    if "--check" in sys.argv[1:]:
        return int(text != PICTURE.read_text())
    PICTURE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
