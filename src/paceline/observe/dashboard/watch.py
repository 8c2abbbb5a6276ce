"""Shows runs to browsers until it is told to end: what `paceline dashboard` and `paceline run --dashboard` do.

    python -m paceline.observe.dashboard.watch RUN_DIR

is the process beside a job: it writes the address of the page on its standard output, and ends with its input.
"""

from __future__ import annotations

import select
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from paceline.observe.dashboard.feed import Feed
from paceline.observe.dashboard.server import DashboardServer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

REFRESH_S: Final = 1.0
_UNSEEN_REFRESH_S: Final = 3.0  # while no page is open


def watch(
    folders: Sequence[Path],
    labels: Sequence[str],
    tell: Callable[[str], None],
    wait: Callable[[float], bool],
    port: int = 0,
) -> None:
    """Serve a page on these runs, and tell its address; `wait` waits so many seconds, and returns whether to go on."""
    feed = Feed(folders, labels)
    with DashboardServer(feed, port) as server:
        tell(server.url)
        looked_s = 0.0
        while True:
            now = time.monotonic()
            if feed.num_looking or now - looked_s >= _UNSEEN_REFRESH_S:
                feed.publish()
                looked_s = now
            if not wait(REFRESH_S):
                feed.publish()  # how it has ended
                return


def main(folder: Path) -> None:
    """Show a run until standard input ends."""

    def tell(url: str) -> None:
        sys.stdout.write(f"{url}\n")
        sys.stdout.flush()

    def wait(seconds: float) -> bool:
        return not select.select([sys.stdin], [], [], seconds)[0]

    watch([folder], [folder.name], tell, wait)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
