"""Draws what the gate of the actors and their learner does."""

from __future__ import annotations

from pathlib import Path

from pictures import COLOURS, make_quiet, new_picture


def draw(path: Path, runs: list[dict[str, object]]) -> None:
    """Draw throughput and return against the bound, and how stale samples were."""
    figure = new_picture(14.0, 4.6)
    axes = figure.subplots(1, 3)
    names = ["none" if each["bound"] is None else str(each["bound"]) for each in runs]
    for panel, key, title in ((axes[0], "samples_per_s", "Samples a second"), (axes[1], "return", "Return at the end")):
        panel.bar(names, [each[key] for each in runs], color=COLOURS[0])
        panel.set_title(f"{title}, by the bound", loc="left")
        make_quiet(panel)
    for each, name, colour in zip(runs, names, COLOURS, strict=False):
        found = each["staleness"]
        assert isinstance(found, dict)
        total = sum(found.values())
        axes[2].plot(list(found), [num / total for num in found.values()], "o-", color=colour, label=f"bound {name}")
    axes[2].xaxis.get_major_locator().set_params(integer=True)
    axes[2].set_title("Share of samples by staleness", loc="left")
    axes[2].legend(frameon=False)
    make_quiet(axes[2])
    figure.savefig(path)
