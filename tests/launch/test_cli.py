"""The command line: what it hands on, what it refuses, and how fast it answers."""

import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tests.tidy.tree import ROOT

from paceline import cli
from paceline.errors import PeerError
from paceline.launch import local
from paceline.launch.crash_policy import CrashPolicy
from paceline.launch.plan import LocalRun, Programs


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[LocalRun]:
    """The runs that the command line asked for; each ends with exit code 7."""
    asked: list[LocalRun] = []

    def run_local(run: LocalRun, _: Programs) -> int:
        asked.append(run)
        return 7

    monkeypatch.setattr(local, "run_local", run_local)
    return asked


def test_every_option_reaches_the_run(runs: list[LocalRun]) -> None:
    line = (
        "run -n 4 -m 3 --data-servers 2 --consistency ssp:3 --strategy all-reduce --transport tcp --scale sum "
        "--divide-lr --on-crash restart --on-error continue --max-restarts 9 --run-dir runs/a --trace full --quiet "
        "--no-progress train.py"
    )

    assert cli.answer(line.split()) == 7
    assert runs == [
        LocalRun(
            script=Path("train.py"),
            num_workers=4,
            num_servers=3,
            num_data_servers=2,
            consistency="ssp:3",
            strategy="all-reduce",
            transport="tcp",
            scale="sum",
            divide_lr=True,
            crash_policy=CrashPolicy(on_crash="restart", on_error="continue", max_restarts=9),
            run_dir=Path("runs/a"),
            trace="full",
            quiet=True,
            progress=False,
        )
    ]


def test_what_follows_the_script_is_the_scripts(runs: list[LocalRun]) -> None:
    args = ["--workers", "9", "-n", "8", "--help", "--version", "--", "--traceback", "--", "x=1"]

    cli.answer(["run", "--workers=2", "train.py", *args])

    assert (runs[0].num_workers, runs[0].args) == (2, tuple(args))


@pytest.mark.parametrize(
    ("tokens", "split"),
    [
        (["run", "a.py"], (["run"], ["a.py"])),
        (["run", "--quiet", "a.py", "-x"], (["run", "--quiet"], ["a.py", "-x"])),
        (["run", "--no-progress", "-n", "2", "a.py"], (["run", "--no-progress", "-n", "2"], ["a.py"])),
        (["run", "--transport=tcp", "--", "-odd.py"], (["run", "--transport=tcp"], ["-odd.py"])),
        (["run", "--help"], (["run", "--help"], [])),
        (["run", "-n"], (["run", "-n"], [])),
        (["demo", "a.py"], (["demo", "a.py"], [])),
        ([], ([], [])),
    ],
)
def test_where_the_script_begins(tokens: list[str], split: tuple[list[str], list[str]]) -> None:
    assert cli.split_at_script(tokens) == split


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("run --consistency spp:3 train.py", "unknown consistency 'spp:3'"),
        ("run --consistency ssp:-1 train.py", "bound is -1, expected 0 or more"),
        (
            "run --strategy bsp --consistency ssp:2 train.py",
            "--consistency is ssp:2, and --strategy bsp says bsp: leave out one of the two, or say the same in both",
        ),
        ("run --strategy ring train.py", "strategy 'ring': 'ring' is not known"),
        ("run -n two train.py", "--workers is 'two', expected a whole number"),
        ("run -n 1.5 train.py", "--workers is '1.5', expected a whole number"),
        ("plan --parameters 1e6 --devices 2.5", "--devices is 2.5, expected a whole number"),
        ("plan --parameters 1e6 --devices 99999999999", "--devices is 99999999999, expected 1 to 1000000"),
        ("keys make k --days 99999999999", "99999999999 days are of no use: expected 1 to 36500"),
        ("run --run-dir a\0b train.py", r"--run-dir is 'a\x00b', expected a text without zero bytes"),
        (f"run --servers {'9' * 400} train.py", "expected a whole number of at most 18 digits"),
        (f"run -n {'1' * 5000} train.py", "expected no number of more than 18 digits"),
        (f"run --strategy local-sgd:{'1' * 5000} train.py", "expected no number of more than 18 digits"),
        (f"replay runs/a --until clock:{'1' * 5000}", "expected no number of more than 18 digits"),
        ("run --grace-s inf train.py", "--grace-s must be more than 0 seconds, got inf"),
        ("run --record-gib 1e300 train.py", "--record-gib must be more than 0 and at most 1073741824, got 1e+300"),
        ("run --server-threads 9999 train.py", "--server-threads must be at most 1024, got 9999"),
        ("report --last /nowhere", "No trace was found: expected files like worker-0.jsonl in /nowhere/trace"),
        ("report --last --seconds nan", "--seconds is nan, expected more than 0"),
        ("snapshot ls", "FOLDER requires an argument"),
        ("run -n 0 train.py", "--workers must be at least 1, got 0"),
        ("run --servers 0 train.py", "--servers must be at least 1, got 0"),
        ("run --server-threads 0 train.py", "--server-threads must be at least 1, got 0"),
        ("run --servers 2 --shares 1,two train.py", "--shares is '1,two', expected numbers such as 2,1,1"),
        ("run --servers 2 --shares 1,1,1 train.py", "the shares of 2 server(s) are 1, 1, 1, expected one number >= 0"),
        ("run --transport pigeon train.py", 'Choose from: "shm", "tcp", "memory"'),
        ("run --wrokers 2 train.py", "Did you mean --workers?"),
        ("run /nowhere/train.py", "there is no script /nowhere/train.py (looked from"),
        ("run", "SCRIPT requires an argument"),
    ],
)
def test_bad_input_is_one_clear_line(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.answer(line.split()) == 2

    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("paceline: ")
    assert message in captured.err
    assert "Traceback" not in captured.err


def test_numbers_of_any_length_are_the_scripts(runs: list[LocalRun]) -> None:
    assert cli.answer(["run", "train.py", "1" * 5000]) == 7
    assert runs[0].args == ("1" * 5000,)


def test_a_traceback_is_shown_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.answer(["run", "--traceback", "/nowhere/train.py"]) == 2

    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_the_failure_of_others_is_not_a_usage_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_local(run: LocalRun, _: Programs) -> int:
        raise PeerError(f"no answer while running {run.script}")

    monkeypatch.setattr(local, "run_local", run_local)

    assert cli.answer(["run", "train.py"]) == 1
    assert capsys.readouterr().err == "paceline: no answer while running train.py\n"


def test_help_and_version_answer_without_loading_anything_heavy() -> None:
    code = (
        "import sys; from paceline.cli import answer; codes = answer(['--help']), answer(['--version']); "
        "print(codes, sorted({'torch', 'numpy', 'matplotlib', 'asyncio'} & set(sys.modules)))"
    )

    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert result.stdout.splitlines()[-1] == "(0, 0) []"
    for command in ("run", "demo", "simulate"):
        assert command in result.stdout


def help_of(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    assert cli.answer([*command, "--help"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", ["spare", "relay", "tune", "top", "simulate"])
def test_the_help_of_a_command_has_all_that_its_function_says(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    function = cli.app[command].default_command
    assert function is not None
    said = (inspect.getdoc(function) or "").partition("\nParameters\n")[0].replace("`", "").split()

    assert " ".join(said) in " ".join(help_of(capsys, command).split())


def test_commands_and_options_are_listed_by_what_they_are_for(capsys: pytest.CaptureFixture[str]) -> None:
    commands, options = help_of(capsys), help_of(capsys, "run")

    for group in (cli.RUN, cli.LOOK, cli.CHOOSE, cli.KEEP, cli.OPTIONS):
        assert f" {group.name} " in commands
    assert " Commands " not in commands
    assert " Snapshots " in options
    assert " Parameters " not in options
    assert " Parameters " in help_of(capsys, "serve"), "the groups are those of `run`"
    assert " Commands " in help_of(capsys, "keys"), "the groups are those of `paceline`"


def test_the_page_of_commands_has_each_under_the_heading_of_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    shown, page = help_of(capsys), (ROOT / "docs" / "commands.md").read_text()
    listed = {head: re.findall(r"^│ ([a-z]+) ", body, re.MULTILINE) for head, body in panels(shown)}
    described = {
        part.partition("\n")[0]: re.findall(r"^\| `paceline ([a-z]+)`", part, re.MULTILINE)
        for part in page.split("\n## ")[1:]
    }

    assert {head: sorted(names) for head, names in described.items()} == {
        head: sorted(names) for head, names in listed.items() if names
    }


def panels(shown: str) -> list[tuple[str, str]]:
    """The frames of a help text: the title and what is in it."""
    return re.findall(r"^╭─ ([^─]+) ─+╮\n(.*?)^╰", shown, re.MULTILINE | re.DOTALL)


def test_help_shows_no_default_that_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    shown = " ".join(help_of(capsys, name) for name in ("run", "simulate", "relay", "dashboard"))

    assert "[default: False]" not in shown
    assert "[default: ()]" not in shown
    assert "('bsp'," not in shown


def test_the_module_is_the_command() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "paceline", "run", "/nowhere/train.py"], capture_output=True, text=True, check=False
    )

    assert result.returncode == 2
    assert result.stderr.startswith("paceline: there is no script /nowhere/train.py")


# Ctrl-C arrives while what the command line needs is imported.
INTERRUPTED = """
import runpy, signal, sys
class Interrupt:
    def find_spec(self, name, path, target=None):
        if name == "cyclopts":
            signal.raise_signal(signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupt())
"""


@pytest.mark.parametrize("how", ["module", "command"])
def test_a_command_that_is_interrupted_while_it_is_imported_ends_without_a_traceback(how: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["paceline"].partition(":")
    run = {
        "module": "runpy.run_module('paceline', run_name='__main__')",
        "command": f"from {module} import {function}; {function}()",  # as an installer writes it
    }
    result = subprocess.run([sys.executable, "-c", INTERRUPTED + run[how]], capture_output=True, text=True, check=False)

    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


def completions(line: str, folder: Path) -> list[str]:
    """Return what bash offers for the last word of a line."""
    script = folder / "completion.sh"
    script.write_text(cli.app.generate_completion(shell="bash"))
    words = line.split(" ")
    ask = f"source {script}; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _paceline; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", ask], cwd=folder, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.split()


def test_a_shell_completes_commands_options_and_scripts(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    assert completions("paceline sna", tmp_path) == ["snapshot"]
    assert completions("paceline run --consis", tmp_path) == ["--consistency"]
    assert completions("paceline run --workers 2 tr", tmp_path) == ["train.py"]
