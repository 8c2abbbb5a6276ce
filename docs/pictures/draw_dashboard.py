"""Takes the pictures of the dashboard in docs/observability.md: pages of real runs, in a Chromium without a window.

    python docs/pictures/draw_dashboard.py [workers compared]

Each picture is a part of the page of a run of three workers and two servers, 800 pixels wide, in light colours, which
are reduced to 128 so that a picture has few bytes: `dashboard_NAME.png`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from draw_observability import PICTURES, finished
from PIL import Image

sys.path.insert(0, str(PICTURES.parents[1]))

from tests.observe.dashboard.browser import open_tab

from paceline.observe.dashboard.feed import Feed
from paceline.observe.dashboard.server import DashboardServer

WIDTH: Final = 800  # from 761 on, two figures stand beside each other
COLOURS: Final = 128
SLOW_FROM: Final = 150  # clocks
CLOCKS: Final = 350


def shot(name: str, folders: Sequence[Path], sections: Sequence[str], *, head: bool = True) -> None:
    """Write a picture of the page of these runs, with these sections of it and nothing else."""
    path = PICTURES / f"dashboard_{name}.png"
    feed = Feed(folders, [folder.name for folder in folders])
    with DashboardServer(feed) as server, open_tab() as tab:
        for _ in range(20):  # pieces of records, and of losses that are compared
            feed.publish()
        tab.show(server.url, WIDTH)
        tab.wait("document.querySelector('.verdict') && !document.querySelector('#loss-time .quiet')")
        kept = ", ".join(
            [*(f"[aria-labelledby={section}-title]" for section in sections), *(["header"] if head else [])]
        )
        tab.evaluate(
            "document.querySelectorAll('main > *').forEach(each => "
            f"each.style.display = each.matches({kept!r}) ? '' : 'none');"
            "document.querySelector('main').style.padding = '4px 20px 16px'"
        )
        tab.picture(path, "main")
        assert not tab.errors, tab.errors
    Image.open(path).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    sys.stdout.write(f"{path.name}: {path.stat().st_size} bytes\n")


def workers(folder: Path) -> None:
    """Show what workers wait for: one of them becomes slow."""
    late = ("--slow-s", "0.045", "--slow-from", f"{SLOW_FROM}", "--consistency", "ssp:3")
    run = finished(folder / "run", "--steps", f"{CLOCKS}", *late)
    shot("loss", [run], ["loss"])
    shot("workers", [run], ["workers", "stale"], head=False)


def compared(folder: Path) -> None:
    """Show whether runs are equal."""
    runs = [
        finished(folder / name, "--steps", "150", "--lr", lr)
        for name, lr in (("first", "0.02"), ("again", "0.02"), ("faster", "0.03"))
    ]
    shot("compared", runs, ["loss"])


PAGES: Final = {each.__name__: each for each in (workers, compared)}


def main(names: Sequence[str]) -> None:
    """Take these pictures, or all."""
    unknown = [name for name in names if name not in PAGES]
    if unknown:
        raise SystemExit(f"there is no picture '{unknown[0]}': {', '.join(PAGES)}")
    for name in names or PAGES:
        with tempfile.TemporaryDirectory(prefix="paceline-pictures-") as folder:
            PAGES[name](Path(folder))


if __name__ == "__main__":
    main(sys.argv[1:])
