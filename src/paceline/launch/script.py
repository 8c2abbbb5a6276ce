"""Checks the script that the user named."""

import ast
import difflib
import warnings
from pathlib import Path
from typing import Final

from paceline.errors import UsageError
from paceline.launch.limits import explain

NUM_SUGGESTIONS: Final = 3
MAX_QUOTED: Final = 100


def check_script(script: Path) -> None:
    """Raise UsageError, with what may have been meant, when the script is not there."""
    if script.is_file():
        _check_readable(script)
        return
    if script.is_dir():
        raise UsageError(f"{script} is a folder, not a script; name the .py file to run")
    similar = _similar_files(script)
    hint = f"; did you mean {' or '.join(similar)}?" if similar else ""
    raise UsageError(f"there is no script {script} (looked from {Path.cwd()}){hint}")


def _check_readable(script: Path) -> None:
    """Raise UsageError for a script that no worker could even begin, so that it is told once."""
    try:
        content = script.read_bytes()
        if script.suffix == ".py":  # not an archive, or code that was compiled
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # each worker shows those that it is asked for
                ast.parse(content, str(script))
    except OSError as error:
        raise UsageError(f"cannot read the script {script}: {explain(error)}") from error
    except (SyntaxError, ValueError) as error:  # ValueError: it has null bytes
        line = getattr(error, "lineno", None)
        where = f", line {line}" if line else ""
        text = ((getattr(error, "text", None) or "").strip())[:MAX_QUOTED]
        problem = f"{getattr(error, 'msg', None) or error}"
        raise UsageError(f"{script}{where}: {problem}{f': {text}' if text else ''}") from error


def _similar_files(script: Path) -> list[str]:
    if not script.parent.is_dir():
        return []
    beside = {path.name: str(path) for path in script.parent.glob("*.py")}
    names = difflib.get_close_matches(script.name, beside, n=NUM_SUGGESTIONS, cutoff=0.5)
    return [beside[name] for name in names]
