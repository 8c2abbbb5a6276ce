"""What is imported ahead for a script is what it names."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from paceline.errors import UsageError
from paceline.launch.script import check_script, find_module, may_make_optimizers, sets_variables


@pytest.mark.parametrize(
    ("text", "makes"),
    [
        ("import os, torch\nimport paceline\nfrom torch.nn import functional", False),
        ("update = paceline.update.Add()", False),
        ("update = paceline.update.Adagrad(lr=0.1)", True),
        ("paceline.distributed(torch.optim.SGD(model.parameters(), lr=0.1))", True),
        ("from trainer import train", True),
        ("from . import trainer", True),
        ("def f():\n    import lightning.pytorch", True),
        ("this is no Python", True),
    ],
)
def test_a_script_that_may_make_optimizers_is_known(text: str, makes: bool, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(text)

    assert may_make_optimizers(script) is makes


def test_what_cannot_be_read_may_make_anything(tmp_path: Path) -> None:
    (tmp_path / "bytes.py").write_bytes(b"\xff")

    (tmp_path / "deep.py").write_text("-" * 100_000 + "1")

    assert may_make_optimizers(tmp_path / "bytes.py")
    assert may_make_optimizers(tmp_path / "deep.py")
    assert may_make_optimizers(tmp_path / "none.py")


def test_a_script_that_this_parser_cannot_take_is_left_to_python(tmp_path: Path) -> None:
    deep, wrong = tmp_path / "deep.py", tmp_path / "wrong.py"
    deep.write_text("+".join("1" * 100_000))
    check_script(deep)
    wrong.write_text("1 +")
    with pytest.raises(UsageError, match=r"wrong\.py, line 1: invalid syntax"):
        check_script(wrong)


def test_a_module_that_comes_from_nowhere_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "from_nowhere", ModuleType("from_nowhere"))  # as `__main__` of a command is
    with pytest.raises(UsageError, match="there is no module from_nowhere"):
        find_module("from_nowhere", [str(tmp_path)])


@pytest.mark.parametrize(
    ("text", "sets"),
    [
        ("import os\nprint(os.environ['HOME'], os.environ.get('A'))", False),
        ("import os\nos.environ['OMP_NUM_THREADS'] = '4'\nimport torch", True),
        ("from os import environ\nenviron.setdefault('A', '1')", True),
        ("import os\ndef f():\n    os.environ.update(A='1')", True),
        ("import os\ndel os.environ['A']", True),
        ("import os\nos.putenv('A', '1')", True),
        ("import os\nos.environ |= {'A': '1'}", True),
        ("from os import environ as env\nenv['A'] = '1'", True),
        ("import os\nenv = os.environ\nenv.setdefault('A', '1')", True),
        ("import os\nenv = os.environ\nprint(env['A'])\nsettings = {**env}\nsettings['A'] = '1'", False),
        ("settings = {}\nsettings['A'] = 1\nsettings.update(A=1)", False),
        ("this is no Python", False),
    ],
)
def test_a_script_that_sets_variables_is_known(text: str, sets: bool, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(text)

    assert sets_variables(script, tmp_path) is sets


@pytest.mark.parametrize(
    "file", ["settings.py", "package/__init__.py", "package/inner.py", "package/sibling.py", "package/deep/__init__.py"]
)
def test_a_module_beside_the_script_that_sets_variables_is_known(file: str, tmp_path: Path) -> None:
    files = {
        "script.py": "import settings, torch\nfrom package import inner",
        "settings.py": "import script",  # and back again
        "package/__init__.py": "",
        "package/inner.py": "from . import sibling\nfrom .deep import *",
        "package/sibling.py": "from ....... import above",
        "package/deep/__init__.py": "",
        "unused.py": "import os\nos.environ['A'] = '1'",
    }
    (tmp_path / "package" / "deep").mkdir(parents=True)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert not sets_variables(tmp_path / "script.py", tmp_path)
    assert not sets_variables(tmp_path / "package" / "sibling.py", tmp_path)

    (tmp_path / file).write_text("from dotenv import load_dotenv\nload_dotenv()")
    assert sets_variables(tmp_path / "script.py", tmp_path)
    assert sets_variables(tmp_path / "package" / "deep" / "__init__.py", tmp_path) is (
        file in ("package/__init__.py", "package/deep/__init__.py")
    )
