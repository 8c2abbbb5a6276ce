"""The page in a real browser: what it shows, at both widths and in both schemes, and what it does as time goes on."""

from collections.abc import Generator
from pathlib import Path

import pytest
from msgspec import structs
from tests.observe.dashboard.browser import Tab, browser, open_tab
from tests.observe.dashboard.test_feed import write
from tests.observe.stories import OWN_S, story

from paceline.observe.dashboard.feed import Feed
from paceline.observe.dashboard.server import DashboardServer
from paceline.observe.trace import Carried, Exit, Step, TraceRecord

pytestmark = pytest.mark.skipif(browser() is None, reason="no Chromium is installed: apt install chromium")
KILLED = Exit(110.0, "worker 2", "worker", 2, 0, 7, -9, 1.7e9, "was killed by SIGKILL", "the others go on without it")


def slow_run(worker: int) -> list[TraceRecord]:
    """Return the records of a run in which a worker is slow, with bytes of two tables."""
    records = story(more=lambda rank, _clock: 2 * OWN_S if rank == worker else 0.0)
    for second in range(3):
        links = tuple((rank, 1_000_000 * second * (rank + 1), 500_000 * second) for rank in range(3))
        tables = (("model", 4_000_000 * second, 1_000_000 * second), ("<b>words</b>", 2_000_000 * second, 0))
        records.append(Carried(100.0 + second, 0, links, tables))
    return records


def with_loss(record: TraceRecord, loss: float) -> TraceRecord:
    """Return a step with another loss; another record as it is."""
    return structs.replace(record, loss=loss) if isinstance(record, Step) else record


@pytest.fixture(scope="module")
def tab() -> Generator[Tab]:
    with open_tab() as opened:
        yield opened


def text(tab: Tab, selector: str) -> str:
    return tab.evaluate(f"document.querySelector({selector!r}).textContent")


def count(tab: Tab, selector: str) -> int:
    return tab.evaluate(f"document.querySelectorAll({selector!r}).length")


def pixels(tab: Tab, selector: str) -> int:
    """Return how many pixels of a canvas are drawn on."""
    return tab.evaluate(
        f"(canvas => canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data"
        f".filter((value, place) => place % 4 === 3 && value).length)(document.querySelector({selector!r}))"
    )


def test_a_run_that_goes_on(tab: Tab, tmp_path: Path) -> None:
    write(tmp_path, slow_run(1))
    feed = Feed([tmp_path], ["a"])
    feed.publish()
    with DashboardServer(feed) as server:
        tab.show(server.url, 1280)
        tab.wait("document.querySelectorAll('#workers tbody tr').length === 3")
        assert text(tab, ".verdict") == "worker 1 is 3.0x slower: computing; the others wait 66 % for it"
        assert text(tab, "#workers tr.blamed td") == "1"
        assert text(tab, "#workers tbody tr").startswith("014+1")
        assert text(tab, "#workers tbody tr").endswith("worker 10/0–")
        assert count(tab, ".uplot") == 6
        assert min(pixels(tab, f"#{name} canvas") for name in ("timeline", "staleness", "loss-time", "busy")) > 500
        assert "worker 2" in text(tab, "#bytes-up .u-legend")

        write(tmp_path, [KILLED])
        feed.publish()
        tab.wait("document.querySelectorAll('#events li').length === 1")
        assert text(tab, "#events li").endswith("worker 2 was killed by SIGKILL; the others go on without it")
        assert text(tab, ".verdict").startswith("worker 2 is dead since")

        tab.press("Tab")
        assert tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        assert tab.evaluate("document.activeElement.dataset.by") == "link"
        tab.evaluate("document.querySelector('[data-by=table]').click()")
        assert "<b>words</b>" in text(tab, "#bytes-up .u-legend"), "names of tables are text"
        assert count(tab, "b") == 0

        for width in (1280, 400):
            colours = set[str]()
            for dark in (False, True):
                tab.resize(width, dark=dark)
                tab.wait(f"innerWidth === {width} && document.querySelector('#timeline canvas').clientWidth < {width}")
                assert tab.evaluate("document.documentElement.scrollWidth") == width, "it scrolls sideways"
                colours.add(tab.evaluate("getComputedStyle(document.body).backgroundColor"))
            assert len(colours) == 2
    tab.wait("document.getElementById('connection').textContent.startsWith('Not connected')")
    assert count(tab, "#workers tbody tr") == 3, "what was told last stays"
    assert [
        error for error in tab.errors if "ERR_CONNECTION_REFUSED" not in error and "ERR_INCOMPLETE" not in error
    ] == []


def test_several_runs_beside_each_other(tab: Tab, tmp_path: Path) -> None:
    runs = {"even": story(), "slow": slow_run(2), "other": [with_loss(each, 2.0) for each in story()]}
    for name, records in runs.items():
        write(tmp_path / name, records)
    feed = Feed([tmp_path / name for name in runs], list(runs))
    feed.publish()
    tab.errors.clear()
    with DashboardServer(feed) as server:
        tab.show(server.url, 400)
        tab.wait("document.querySelectorAll('.verdict').length === 3")
        assert count(tab, "#loss-time .u-series") == 4
        assert count(tab, "#compared li") == 2
        assert text(tab, "#compared li").startswith("even and slow: equal: 42 losses of 3 workers")
        assert text(tab, "#compared li:last-child").startswith("even and other: not equal: worker 0")
        assert tab.evaluate("document.documentElement.scrollWidth") == 400
        assert count(tab, ".blamed") == 0
        tab.evaluate("document.querySelectorAll('#choice button')[1].click()")
        assert text(tab, "#workers tr.blamed td") == "2"
        assert text(tab, "#choice [aria-pressed=true]") == "slow"
        assert tab.errors == []
