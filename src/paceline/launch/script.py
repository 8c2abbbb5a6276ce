"""Checks the script that the user named."""

import difflib
import os
from pathlib import Path
from typing import Final

from paceline.errors import UsageError

NUM_SUGGESTIONS: Final = 3


def check_script(script: Path) -> None:
    """Raise UsageError, with what may have been meant, when the script is not there."""
    if script.is_file():
        if not os.access(script, os.R_OK):
            raise UsageError(f"the script {script} cannot be read by user {os.geteuid()}: chmod it, or name another")
        return
    if script.is_dir():
        raise UsageError(f"{script} is a folder, not a script; name the .py file to run")
    similar = _similar_files(script)
    hint = f"; did you mean {' or '.join(similar)}?" if similar else ""
    raise UsageError(f"there is no script {script} (looked from {Path.cwd()}){hint}")


def _similar_files(script: Path) -> list[str]:
    if not script.parent.is_dir():
        return []
    beside = {path.name: str(path) for path in script.parent.glob("*.py")}
    names = difflib.get_close_matches(script.name, beside, n=NUM_SUGGESTIONS, cutoff=0.5)
    return [beside[name] for name in names]
