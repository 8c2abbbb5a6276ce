"""A reader of `relay_hosts.py`: says which version it has, and when.

`relay_hosts_reader.py SOURCE TOKEN`
"""

import json
import sys
import time

import paceline

PATIENCE_S = 600.0


def main() -> None:
    """Take version after version, until the process is ended."""
    with paceline.subscribe(sys.argv[1], token=sys.argv[2]) as reader:
        while True:
            with reader.wait(timeout_s=PATIENCE_S) as version:
                print(json.dumps([version.digest, time.monotonic()]), flush=True)


if __name__ == "__main__":
    main()
