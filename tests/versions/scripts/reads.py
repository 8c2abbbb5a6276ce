"""A reader for tests that kill it: takes version after version and checks each, and says when it has begun.

`reads.py FOLDER`
"""

import sys

import paceline

with paceline.subscribe(sys.argv[1]) as reader:
    while True:
        version = reader.wait(timeout_s=100)
        values = {float(tensor.min()) for tensor in version.values()} | {float(t.max()) for t in version.values()}
        assert values == {float(version.number)}, values
        print("has", version.number, flush=True)
