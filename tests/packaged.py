"""Checks an installed package in an environment that has nothing else, no compiler included: `make release` runs it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from importlib.metadata import distribution, metadata
from pathlib import Path

COMMAND = Path(sys.executable).with_name("paceline")
EXAMPLE = Path(__file__).parents[1] / "examples" / "one_line.py"


def licences() -> set[str]:
    """Return the names of the licences that the metadata declares, each of which was installed."""
    installed = distribution("paceline")
    declared = installed.metadata.get_all("License-File") or []
    return {Path(name).name for name in declared if installed.read_text(f"licenses/{name}")}


def main() -> int:
    """Check one thing after the other; the first that does not hold ends this with an error."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # away from the source
        environment = {"PATH": str(COMMAND.parent), "HOME": folder, "CC": "false"}

        def run(*words: str, code: int = 0) -> str:
            done = subprocess.run([str(COMMAND), *words], env=environment, capture_output=True, text=True, timeout=300)
            said = done.stdout + done.stderr
            if done.returncode != code:
                raise SystemExit(f"paceline {' '.join(words)} ended with {done.returncode}, expected {code}:\n{said}")
            print(f"paceline {' '.join(words)}: {said.strip().splitlines()[-1]}")
            return said

        import paceline
        from paceline.update.rows.ops import row_ops

        package = Path(paceline.__file__).parent
        assert "site-packages" in package.parts, package
        assert (package / "py.typed").is_file()
        assert row_ops().name == "native", "the wheel comes without its C library"
        assert (package / "observe" / "dashboard" / "page" / "uPlot.iife.min.js").is_file()
        assert licences() == {"LICENSE", "uPlot.LICENSE"}, f"the licences that come with the package: {licences()}"
        assert "](docs/" not in (metadata("paceline").get_payload() or ""), "a link leads nowhere"
        assert run("--version").strip() == paceline.__version__
        assert "pip install 'paceline[demo]'" in run("demo", code=2)
        assert "loss" in run("run", "--workers", "2", str(EXAMPLE))
    return 0


if __name__ == "__main__":
    sys.exit(main())
