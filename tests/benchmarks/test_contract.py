"""Every benchmark can be run and read by a program; nothing is timed here."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from benchmarks.__main__ import HERE, benchmarks, rows


def test_every_script_that_prints_json_is_found() -> None:
    parts = ("_worker", "_server", "_reader")  # processes that a benchmark starts
    texts = {script: script.read_text() for script in HERE.glob("[!_]*.py") if not script.stem.endswith(parts)}
    printing = {script for script, text in texts.items() if "json" in text and 'if __name__ == "__main__"' in text}
    assert printing == set(benchmarks())


# Runs each script as itself and asks for its help: in one process, as each would take seconds to start.
ASK_ALL = """
import contextlib, io, json, runpy, sys
told = {}
for script in sys.argv[1:]:
    sys.argv, sys.path[0] = [script, "--help"], script.rpartition("/")[0]
    code = None
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            code = end.code
    told[script] = [code or 0, out.getvalue()]
print(json.dumps(told))
"""


def test_every_benchmark_takes_json() -> None:
    command = [sys.executable, "-c", ASK_ALL, *map(str, benchmarks())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    told = json.loads(done.stdout)
    assert {script: code for script, (code, _) in told.items() if code != 0} == {}
    assert [script for script, (_, said) in told.items() if "--json" not in said] == []
    assert set(told) == set(map(str, benchmarks()))


def test_a_result_is_laid_out_in_rows() -> None:
    result: dict[str, object] = {"name": "x", "ms": 1.5, "spread": [1, 2], "wire": {"shm": {"ms": 3}}}
    assert list(rows(result)) == [("ms", "1.5"), ("spread", "1 to 2"), ("wire.shm.ms", "3")]
    sizes: dict[str, object] = {"name": "x", "sizes": [{"name": "small", "ms": 1}, {"name": "large", "ms": 2}]}
    assert list(rows(sizes)) == [("small.ms", "1"), ("large.ms", "2")]


@pytest.mark.skipif(torch.cuda.is_available(), reason="here it would measure for minutes")
def test_without_a_device_the_benchmark_of_devices_says_so() -> None:
    command = [sys.executable, str(HERE / "gpu.py"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    assert json.loads(done.stdout) == {"name": "gpu", "skipped": "no CUDA device"}
    assert "no CUDA device here" in done.stderr
