"""Run every benchmark and print a table of the numbers: `python -m benchmarks [NAME...]`, or `make bench`.

A benchmark is a script in this folder whose docstring shows its command, `python benchmarks/NAME.py`. It takes
`--json`, and then prints one JSON object as its last line.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

HERE: Final = Path(__file__).resolve().parent
TIMEOUT_S: Final = 1800.0


def benchmarks() -> list[Path]:
    """Return the scripts that can be run, in the order of their names."""
    scripts = sorted(HERE.glob("*.py"))
    return [script for script in scripts if f"python benchmarks/{script.name}" in docstring(script)]


def docstring(script: Path) -> str:
    """Return what a script says of itself, without running it."""
    return ast.get_docstring(ast.parse(script.read_text())) or ""


def measure(script: Path) -> dict[str, object]:
    """Run one benchmark and return its JSON object; its progress goes to stderr as it comes.

    Raises CalledProcessError, TimeoutExpired or ValueError when it has none to give.
    """
    command = [sys.executable, str(script), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=True)
    return json.loads(done.stdout.strip().rpartition("\n")[2])


def rows(values: dict[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Lay a JSON object out as (what, number), objects within it by their path."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from rows(value, f"{name}.")
        elif isinstance(value, list) and all(isinstance(each, dict) for each in value):
            for each in value:
                yield from rows(each, f"{each['name']}.")
        elif isinstance(value, list):
            yield name, " to ".join(map(str, value)) if len(value) == 2 else ", ".join(map(str, value))
        elif key != "name":
            yield name, str(value)


def main() -> int:
    """Run the benchmarks that are named, or all; return 1 when one of them failed."""
    wanted = set(sys.argv[1:])
    chosen = [script for script in benchmarks() if not wanted or script.stem in wanted]
    unknown = wanted - {script.stem for script in chosen}
    if unknown:
        known = ", ".join(script.stem for script in benchmarks())
        print(f"no benchmark {', '.join(sorted(unknown))}; there are {known}", file=sys.stderr)
        return 2
    table = Table("benchmark", "what", "number", box=None, padding=(0, 3, 0, 0), header_style="dim")
    failed: list[str] = []
    for number, script in enumerate(chosen, start=1):
        print(f"[{number}/{len(chosen)}] {docstring(script).splitlines()[0]}", file=sys.stderr, flush=True)
        try:
            for index, (what, value) in enumerate(rows(measure(script))):
                table.add_row("" if index else script.stem, what, value)
        except (subprocess.SubprocessError, ValueError) as error:
            failed.append(f"{script.stem} failed: {error}")
        table.add_section()
    Console().print(table)
    print(*failed, sep="\n", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
