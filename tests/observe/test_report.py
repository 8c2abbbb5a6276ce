import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tests.observe.synthetic import all_policies

from paceline.errors import UsageError
from paceline.observe.report import LabelledRun, write_report
from paceline.observe.runs import Run, gather
from paceline.observe.summary import summarize
from paceline.observe.trace import Epoch, Exit, Step

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
FACTS = {"data": "digits & more", "workers": "4"}


class Page(HTMLParser):
    """The rows of the table, every address that a browser would fetch, and the tags that were left open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.addresses: list[str] = []
        self.tags: set[str] = set()
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.addresses += [value or "" for name, value in attrs if name in {"src", "href"}]
        if tag not in {"meta", "img"}:
            self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in {"td", "th"}:
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self._open):
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    return all_policies()


@pytest.fixture(scope="module")
def folder(runs: dict[str, Run], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report") / "new"
    labelled = [LabelledRun(label, run, f"note on {label}") for label, run in runs.items()]
    assert write_report(labelled, folder, title="Digits <four ways>", facts=FACTS) == folder / "report.html"
    return folder


def test_the_page_has_every_number_of_every_run(folder: Path, runs: dict[str, Run]) -> None:
    _, *rows = Page((folder / "report.html").read_text()).rows
    assert len(rows) == len(runs)
    for cells, (label, run) in zip(rows, runs.items(), strict=True):
        summary = summarize(run)
        assert cells[0] == f"{label}note on {label}"
        assert cells[1:4] == [f"{summary.seconds:.1f}", f"{summary.num_clocks}", f"{summary.samples_per_s:,.0f}"]
        assert cells[4] == f"{summary.comm_share_mean:.1%}" != "0.0%"
        assert cells[5:7] == [f"{summary.wait_share_mean:.1%}", f"{summary.wait_share_max:.1%}"]
        assert cells[11] == f"{summary.num_refused}"
        assert cells[12:] == ["–", "–", f"{summary.test_loss:.4f}", f"{summary.test_accuracy:.2%}"]
        if label == "one process":
            assert cells[7:11] == ["–"] * 4
        else:
            shares = [f"{summary.freshest_share:.1%}", f"{summary.current_share:.1%}"]
            assert cells[7:11] == [*shares, f"{summary.max_staleness}", f"{summary.max_lead}"]


def test_the_page_needs_nothing_from_elsewhere(folder: Path) -> None:
    text = (folder / "report.html").read_text()
    page = Page(text)
    assert len(page.addresses) == 5
    assert all(address.startswith("data:image/png;base64,iVBORw0KGgo") for address in page.addresses)
    assert not page.tags & {"script", "link", "iframe"}
    assert not re.search(r"https?:|url\(|@import", text)


def test_the_page_says_what_was_run_in_words(folder: Path) -> None:
    text = (folder / "report.html").read_text()
    for part in (
        "<h1>Digits &lt;four ways&gt;</h1>",
        "digits &amp; more",
        "First to finish: ",
        "Workers waited",
        "clocks old under asynchronous",
        "lies between 95.28%",
    ):
        assert part in text


def test_the_sheet_is_a_picture(folder: Path) -> None:
    assert (folder / "report.png").read_bytes().startswith(PNG_SIGNATURE)


def test_a_run_with_little_to_show_gets_the_charts_it_can_fill(tmp_path: Path) -> None:
    run = gather([Step(float(clock), 0, clock, 1, 0.0, 0.0, 1.0) for clock in range(3)])
    page = write_report([LabelledRun("alone", run)], tmp_path, title="Alone", facts={})
    text = page.read_text()
    assert text.count("<img") == 2
    assert "Loss against time" in text
    assert "Final test accuracy" not in text


@pytest.mark.parametrize("labels", [[], ["bsp", "bsp"]])
def test_runs_must_have_different_labels(tmp_path: Path, labels: list[str]) -> None:
    with pytest.raises(UsageError, match="different labels"):
        write_report([LabelledRun(label, Run()) for label in labels], tmp_path, title="", facts={})
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_error_names_what_to_install(
    tmp_path: Path, runs: dict[str, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"pip install 'paceline\[demo\]'"):
        write_report([LabelledRun("bsp", runs["bsp"])], tmp_path, title="", facts={})
    assert list(tmp_path.iterdir()) == []


def test_an_empty_run_can_be_reported(tmp_path: Path) -> None:
    assert "<img" not in write_report([LabelledRun("empty", Run())], tmp_path, title="", facts={}).read_text()


def test_samples_that_were_read_again_or_skipped_are_counted(tmp_path: Path) -> None:
    epochs = [Epoch(2.0, worker, 0, samples=5000, skipped=worker, again=1000 * worker) for worker in range(3)]
    run = gather([Step(1.0, 0, 0, 1, 1.0, 0.0, 1.0), *epochs])
    page = Page(write_report([LabelledRun("fed", run)], tmp_path, title="t", facts={}).read_text())
    numbers = dict(zip(*page.rows, strict=True))
    assert (numbers["read again"], numbers["skipped"]) == ("3,000", "3")


def test_processes_that_were_lost_are_listed(tmp_path: Path) -> None:
    step = Step(10.0, 0, 0, 1, 1.0, 0.0, 1.0)
    killed = Exit(
        11.5, "worker 1", "worker", 1, 0, 4242, -9, 1e9, "was killed by SIGKILL", "the others go on without it"
    )
    write_report([LabelledRun("bsp", gather([step, killed]))], tmp_path, title="t", facts={})
    page = (tmp_path / "report.html").read_text()
    assert "After 2.5 s worker 1 was killed by SIGKILL; the others go on without it." in page
    write_report([LabelledRun("bsp", gather([step]))], tmp_path, title="t", facts={})
    assert "were lost" not in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    "label", ["a$\\frac{b$c\nd\x1b[31m<script>alert(1)</script>", "$" + "n" * 5000], ids=["formula", "long"]
)
def test_a_label_of_any_text_is_drawn_and_shown_as_it_is(label: str, tmp_path: Path, runs: dict[str, Run]) -> None:
    first, second = list(runs.values())[-2:]
    labelled = [LabelledRun(label, first, note=label), LabelledRun("other", second)]
    page = write_report(labelled, tmp_path, title=label, facts={label: label})
    assert (tmp_path / "report.png").read_bytes().startswith(PNG_SIGNATURE)
    assert "script" not in Page(page.read_text()).tags
