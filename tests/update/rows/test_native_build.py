"""The C libraries come with the package where there is a compiler, and their absence is no failure."""

from __future__ import annotations

import importlib.util
import os
import pkgutil
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.nodes.cluster import hosted_tables

from paceline.update import rows
from paceline.update.named_rules import Add
from paceline.update.native_steps import FUNCTIONS
from paceline.update.native_steps import LIBRARY as STEPS
from paceline.update.rows.native_ops import NativeOps, load_library
from paceline.update.rows.ops import row_ops, tell_of_missing_library
from paceline.update.rows.spec import RowTableSpec
from paceline.update.rows.torch_ops import TorchOps

ROOT = Path(__file__).parents[3]

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="this machine has no C compiler")


@pytest.fixture(scope="module")
def hatch_build() -> ModuleType:
    found = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.fixture
def project(tmp_path: Path, hatch_build: ModuleType) -> Path:
    """A project that has nothing but the sources of the libraries."""
    for name in hatch_build.SOURCES:
        source = tmp_path / name
        source.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source)
    return tmp_path


@pytest.fixture(params=[0, 1], ids=["rows", "steps"])
def source(request: pytest.FixtureRequest, project: Path, hatch_build: ModuleType) -> Path:
    """The source of one of the libraries."""
    return project / hatch_build.SOURCES[request.param]


def build_data(hatch_build: ModuleType, project: Path, version: str) -> dict[str, Any]:
    """What a build of the project would put into the wheel."""
    hook = hatch_build.NativeBuildHook(str(project), {}, None, None, str(project / "dist"), "wheel")
    data: dict[str, Any] = {"force_include": {}, "pure_python": True, "tag": ""}
    hook.initialize(version, data)
    return data


@needs_compiler
def test_an_ordinary_installation_has_the_library() -> None:
    assert row_ops().name == "native", load_library()
    assert not isinstance(load_library(STEPS, FUNCTIONS), str)


@needs_compiler
def test_a_wheel_carries_the_library_and_the_tag_of_its_platform(hatch_build: ModuleType, project: Path) -> None:
    data = build_data(hatch_build, project, "standard")
    assert list(data["force_include"].values()) == [
        "paceline/update/rows/native.c.so",
        "paceline/update/steps.c.so",
    ]
    assert not data["pure_python"]
    assert data["tag"].startswith("py3-none-")
    assert not set("-.") & set(data["tag"].removeprefix("py3-none-"))
    library = load_library(Path(next(iter(data["force_include"]))))
    assert not isinstance(library, str)
    assert NativeOps(library).unique(torch.tensor([4, 4]))[0].tolist() == [4]


@needs_compiler
def test_an_editable_installation_finds_it_beside_its_source(hatch_build: ModuleType, project: Path) -> None:
    assert build_data(hatch_build, project, "editable")["force_include"] == {}
    for source in hatch_build.SOURCES:
        found = sorted(path.name for path in (project / source).parent.iterdir() if path.is_file())
        assert found == [source.name, f"{source.name}.so"]


@pytest.mark.parametrize("compiler", ["a-compiler-that-is-not-there", "false"])
def test_without_a_compiler_the_package_goes_without_and_says_so(
    hatch_build: ModuleType,
    project: Path,
    compiler: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CC", compiler)
    old = [hatch_build.library_of(project / source) for source in hatch_build.SOURCES]
    for library in old:
        library.touch()
    data = build_data(hatch_build, project, "standard")
    assert data == {"force_include": {}, "pure_python": True, "tag": ""}
    assert not any(library.exists() for library in old)
    output = capsys.readouterr()
    assert "goes without its C library, row tables and updates will be slower" in output.out + output.err


@needs_compiler
def test_the_source_compiles_without_a_warning(source: Path, project: Path, hatch_build: ModuleType) -> None:
    warnings = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror"]
    made = project / "made"
    command = ["cc", *hatch_build.OPTIONS, *warnings, "-o", str(made), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, "")


def test_python_does_not_take_the_library_for_a_module() -> None:
    names = [module.name for module in pkgutil.iter_modules(rows.__path__)]
    assert names.count("native_ops") == 1
    assert "native" not in names
    assert not [name for name in names if name.startswith("native.")]


def test_a_library_that_does_not_load_is_explained(tmp_path: Path) -> None:
    assert "install a C compiler" in str(load_library(tmp_path / "missing"))
    (tmp_path / "empty").touch()
    assert "install this package once more" in str(load_library(tmp_path / "empty"))


@needs_compiler
def test_a_library_of_another_source_is_not_called(hatch_build: ModuleType, project: Path) -> None:
    """As after an update of a checkout: its functions take other arguments, which crashed the process."""
    source = project / hatch_build.SOURCES[0]
    assert hatch_build.build(source) == ""
    library = hatch_build.library_of(source)
    assert not isinstance(load_library(library), str)
    source.write_text(source.read_text() + "/* changed */\n")
    assert "was built from another native.c; install this package once more" in str(load_library(library))


@needs_compiler
def test_a_process_with_row_tables_tells_once_of_a_library_that_it_cannot_use(
    hatch_build: ModuleType, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = project / hatch_build.SOURCES[0]
    assert hatch_build.build(source) == ""
    monkeypatch.setattr("paceline.update.rows.ops.LIBRARY", hatch_build.library_of(source))

    def told() -> str:
        tell_of_missing_library.cache_clear()
        tables = hosted_tables(ops=TorchOps())
        for name in "ab":
            tables.declare(RowTableSpec(name, 2, "float32", Add(), "bsp", "mean", "reject"))
        tables.close()
        return capsys.readouterr().err

    assert told() == ""
    source.write_text(source.read_text() + "/* changed */\n")
    [line] = told().splitlines()
    assert "row tables are looked up in torch, which is slower" in line
    assert line.endswith("was built from another native.c; install this package once more")
    hatch_build.library_of(source).unlink()
    [line] = told().splitlines()
    assert line.endswith("native.c.so is not there; install a C compiler, and then this package once more")
    tell_of_missing_library.cache_clear()


@pytest.mark.parametrize(
    "num_rounds", [pytest.param(3, id="quick"), pytest.param(1000, id="long", marks=pytest.mark.campaign)]
)
@needs_compiler
def test_sanitizers_find_nothing(num_rounds: int, hatch_build: ModuleType, tmp_path: Path) -> None:
    """Nothing that C leaves undefined, and no access beside what was given, be the calls right or wrong."""
    loaded = [
        subprocess.run(["cc", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    if not all(Path(path).is_absolute() for path in loaded):
        pytest.skip("this compiler has no sanitizers")
    options = [option for option in hatch_build.OPTIONS if option != "-O3"]
    checks = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-Wall", "-Wextra", "-Werror")
    libraries = [str(tmp_path / f"{source.stem}.so") for source in hatch_build.SOURCES]
    for source, library in zip(hatch_build.SOURCES, libraries, strict=True):
        command = ["cc", *options, *checks, "-o", library, str(ROOT / source)]
        subprocess.run(command, check=True, timeout=hatch_build.TIMEOUT_S)
    done = subprocess.run(
        [sys.executable, "-m", "tests.update.rows.scripts.sanitized", *libraries, str(num_rounds)],
        env={**os.environ, "LD_PRELOAD": " ".join(loaded), "ASAN_OPTIONS": "detect_leaks=0", "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "sound"), done.stderr[-4000:]
