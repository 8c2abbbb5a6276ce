"""Files that say how a script is run."""

from __future__ import annotations

import builtins
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import cli
from paceline.errors import UsageError
from paceline.launch.config import RunConfig, read_config
from paceline.launch.plan import LocalRun

TEXTS = st.text(st.characters(exclude_categories=("Cs",)))
VALUES = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | TEXTS


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(st.from_regex(r"[a-z]+(-[a-z]+)*", fullmatch=True).filter("args".__ne__), VALUES),
    st.lists(TEXTS),
)
def test_what_is_written_is_read_back(options: dict[str, bool | int | float | str], args: list[str]) -> None:
    written = tomllib.loads(RunConfig(options, tuple(args)).to_toml("Some\nnote."))
    assert written.pop("args", []) == args
    assert written == options


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.toml", 'workers = 3\non_crash = "restart"\n[args]\nlr = 0.5\namp = true\n'),
        ("run.yaml", "workers: 3\non-crash: restart\nargs: {lr: 0.5, amp: true}\n"),
        ("run.json", '{"workers": 3, "on-crash": "restart", "args": ["--lr=0.5", "--amp"]}'),
    ],
)
def test_options_come_from_a_file_and_the_command_line_wins(
    name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_text(text)
    started: list[LocalRun] = []

    def start(engine: str, ray: object, asked: LocalRun) -> int:
        started.append(asked)
        return 0

    monkeypatch.setattr("paceline.tools.run.start", start)
    config = ["run", "--config", str(tmp_path / name), "--quiet"]
    assert cli.answer([*config, "train.py", "--lr=0.1"]) == 0
    assert cli.answer([*config, "-n", "5", "train.py"]) == 0
    assert [run.num_workers for run in started] == [3, 5]
    assert started[0].crash_policy.on_crash == "restart"
    assert started[0].args == ("--lr=0.5", "--amp", "--lr=0.1")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("run.toml", "wrkers = 3", "'wrkers' is not an option of paceline run"),
        ("run.toml", "config = 'other.toml'", "run.toml: a file names no other one: leave out 'config'"),
        ("run.toml", 'workers = "many"', "many"),
        ("run.toml", "workers = [1, 2]", "an option has one value"),
        ("run.toml", "workers = ", "cannot be read"),
        ("run.toml", "workers = 2\nworkers = 3", "cannot be read"),
        ("run.json", '{"workers": 2, "args": {"lr": 1, "lr": 2}}', "'lr' is there twice: only one of them would count"),
        ("run.yaml", "args:\n  lr: 1\n  batch: 2\n  lr: 2", "'lr' is there twice, in lines 2 and 4"),
        ("run.yaml", "args: [{a: 1, a: 2}]", "'a' is there twice, in lines 1 and 1"),
        ("run.yaml", "on_crash: stop\non-crash: restart", "'on_crash' and 'on-crash' are one option"),
        ("run.yaml", "- workers", "expected names with values, got ['workers']"),
        ("run.yaml", "# nothing", "run.yaml is empty, expected names with values"),
        ("run.yaml", "a:\n\tb: 1", "found character that cannot start any token, such as a tab (line 2, column 1)"),
        ("run.yaml", "workers: [", "cannot be read: while parsing a flow node"),
        ("run.yaml", "workers: 2026-13-45", "run.yaml cannot be read: month must be in 1..12"),
        ("run.yaml", "2: workers", "expected names with values, got the name 2"),
        ("run.json", "[" * 100_000, "while deserializing an object"),
        ("run.ini", "", "whose name ends in .toml, .yaml"),
        ("none.toml", None, "cannot read"),
    ],
)
def test_what_is_wrong_with_a_file_is_told(
    name: str, text: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    assert cli.answer(["run", "--config", str(tmp_path / name), "train.py"]) == 2
    assert said in capsys.readouterr().err


def test_yaml_without_its_library_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.yaml").write_text("workers: 2")
    load = builtins.__import__

    def refuse(name: str, *rest: object) -> object:
        if name == "yaml":
            raise ImportError(name)
        return load(name, *rest)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UsageError, match=r"needs PyYAML, .* pip install 'paceline\[tune\]'"):
        read_config(tmp_path / "run.yaml")
