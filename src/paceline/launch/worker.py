"""The entry of a worker process: `python -m paceline.launch.worker script.py args...`.

The script runs as it would under plain `python script.py args...`: as `__main__`, with its own folder first on the
import path; its exceptions, SystemExit and KeyboardInterrupt end the process in the ordinary way.
"""

import os
import runpy
import sys

from paceline.launch.lifeline import die_with_launcher


def main() -> None:
    """Run the script named on the command line."""
    die_with_launcher()
    del sys.argv[0]
    script = sys.argv[0]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
