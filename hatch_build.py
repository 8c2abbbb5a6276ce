"""Build the C libraries and the description with the package; without a compiler it goes without the libraries.

An ordinary wheel carries them and the tag of its platform; an editable install finds each beside its source.
`python hatch_build.py` builds them there too.
"""

import os
import re
import shlex
import subprocess
import sys
import sysconfig
import zlib
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

SOURCES = Path("src/paceline/update/rows/native.c"), Path("src/paceline/update/steps.c")
# No option for the processor of this machine: the wheel has to run on others.
# Products and sums are joined where a source says so, and nowhere else.
OPTIONS = ("-std=c99", "-O3", "-ffp-contract=off", "-fPIC", "-shared")
TIMEOUT_S = 120.0


class NativeBuildHook(BuildHookInterface):
    """Compiles the libraries before a wheel is put together."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the libraries to the wheel, or say why it stays without."""
        sources = [Path(self.root) / source for source in SOURCES]
        problem = build_all(sources)
        if problem:
            self.app.display_warning(notice(problem))
        elif version != "editable":
            for library in map(library_of, sources):
                build_data["force_include"][str(library)] = str(library.relative_to(Path(self.root) / "src"))
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform_tag()}"


class DescriptionHook(MetadataHookInterface):
    """Makes the description of the package from the README."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the description, with links to files of the repository as links to its source."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = with_absolute_links(text, metadata["urls"]["Source"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def with_absolute_links(text: str, source: str) -> str:
    """Return Markdown whose links to files are links below `source`.

    >>> with_absolute_links("[a](docs/a.md#b), [c](https://c.example), [d](#d)", "https://x")
    '[a](https://x/docs/a.md#b), [c](https://c.example), [d](#d)'
    """
    return re.sub(r"\]\((?!\w+:|#)", f"]({source}/", text)


def library_of(source: Path) -> Path:
    """Return where the library of a source belongs."""
    return source.with_name(f"{source.name}.so")


def build_all(sources: Sequence[Path]) -> str:
    """Compile each library beside its source; return why the first failed, "" if none did."""
    return next(filter(None, [build(source) for source in sources]), "")


def build(source: Path) -> str:
    """Compile the library and put it beside its source; return why that failed, and leave no library then."""
    library = library_of(source)
    with TemporaryDirectory(dir=source.parent, prefix=".build-") as folder:
        # Under another name at first: a process that has the old one open keeps it unchanged.
        made = Path(folder) / library.name
        compiler = shlex.split(os.environ.get("CC", "cc"))
        crc = zlib.crc32(source.read_bytes())  # what load_library compares
        command = [*compiler, *OPTIONS, f"-DSOURCE_CRC={crc}u", "-o", str(made), str(source)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            library.unlink(missing_ok=True)
            return str(error)
        if done.returncode:
            library.unlink(missing_ok=True)
            return f"{shlex.join(command)} failed:\n{done.stderr}"
        made.replace(library)
    return ""


def platform_tag() -> str:
    """Return this platform as the names of wheels have it, "linux_x86_64" for example."""
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


def notice(problem: str) -> str:
    """Say what it means that there is a library missing."""
    return f"Paceline goes without its C library, row tables and updates will be slower: {problem}"


def main() -> int:
    """Build the libraries beside their sources; return 1 when that failed."""
    problem = build_all([Path(__file__).parent / source for source in SOURCES])
    if problem:
        print(notice(problem), file=sys.stderr)
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
