"""Import scripts, or have them print their help, each in a process of its own that is forked from this one.

Lines of the input are `import PATH` or `help PATH`; a line of the output is a script that has failed, and why.
Arguments: a folder to import from, and packages that scripts may need and that need not be installed.
"""

from __future__ import annotations

import io
import os
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path

import torch

import paceline

LOADED = (torch, paceline)  # once, for all


def attempt(what: str, path: Path, foreign: list[str]) -> str:
    """Return why a script fails; empty where it does not."""
    sys.path.insert(0, str(path.parent))
    sys.argv = [str(path), "--help"]
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            runpy.run_path(str(path), run_name="__main__" if what == "help" else path.stem)
    except ModuleNotFoundError as error:
        return "" if (error.name or "").partition(".")[0] in foreign else f"needs {error.name}"
    except SystemExit as error:
        has_helped = what == "help" and not error.code and "--help" in printed.getvalue()
        return "" if has_helped else f"exits with {error.code}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "prints no help" if what == "help" else ""


def main() -> None:
    """Try out all scripts."""
    folder, *foreign = sys.argv[1:]
    sys.path.append(folder)
    for line in sys.stdin.read().splitlines():
        what, _, path = line.partition(" ")
        child = os.fork()
        if child == 0:
            why = attempt(what, Path(path), foreign)
            if why:
                os.write(1, f"{path}: {why}\n".encode())
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            os.write(1, f"{path}: the process ended\n".encode())


main()
