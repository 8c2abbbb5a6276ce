"""Makes the environment of one peer: `python benchmarks/peers/setup.py ray`.

It lies in .venv-peers/ beside the sources and touches nothing else. A peer that works with PyTorch sees the one of the
environment that this command runs in, so both sides of a comparison compute with the same.
"""

import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent.parent
TIMEOUT_S: Final = 1800


@dataclass(frozen=True, slots=True)
class Environment:
    """What to install, and whether the packages of this environment are visible beside it."""

    requirements: tuple[str, ...]
    sees_ours: bool


ENVIRONMENTS: Final = {
    "ray": Environment(("ray==2.60.0",), sees_ours=True),
    "torchft": Environment(("torchft-nightly==2026.10.26",), sees_ours=True),
    "tf": Environment(("tensorflow-cpu==2.21.0",), sees_ours=False),
}


def main() -> None:
    """Make the environments named on the command line."""
    names = sys.argv[1:]
    if not names or not set(names) <= ENVIRONMENTS.keys():
        sys.exit(f"usage: python benchmarks/peers/setup.py {'|'.join(ENVIRONMENTS)} ...")
    for name in names:
        make(ROOT / ".venv-peers" / name, ENVIRONMENTS[name])
        print(f"{name} is ready: python benchmarks/dense.py --peer {name}")


def make(folder: Path, environment: Environment) -> None:
    """Make one environment, from scratch; it is complete when the file `complete` is there."""
    print(f"Installing {', '.join(environment.requirements)} into {folder}", flush=True)
    venv.create(folder, with_pip=True, clear=True)
    python = folder / "bin" / "python"
    if environment.sees_ours:
        packages = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        (packages / "ours.pth").write_text(sysconfig.get_path("purelib") + "\n")
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    if subprocess.run([*command, *environment.requirements], check=False, timeout=TIMEOUT_S).returncode:
        sys.exit(f"pip could not install {', '.join(environment.requirements)}; its message is above")
    (folder / "complete").touch()


if __name__ == "__main__":
    main()
