"""How long the whole demonstration takes.

python benchmarks/demo.py [--json]
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time

TIMEOUT_S = 600.0


def main() -> None:
    """Run the demonstration once and print its seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "paceline", "demo", "--report", folder]
        subprocess.run(command, stdout=subprocess.DEVNULL, timeout=TIMEOUT_S, check=True)
    wall_s = time.perf_counter() - start
    print(f"the demonstration takes {wall_s:.0f} s")
    if options.json:
        print(json.dumps({"name": "demo", "wall_s": round(wall_s, 1)}))


if __name__ == "__main__":
    main()
