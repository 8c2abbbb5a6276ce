"""A job whose data servers are all gone ends at once, and names the last; until then its transforms are found."""

from pathlib import Path

from tests.faults.running import run_to_end, write_script

TRANSFORM = """
import os

def doubled(line):
    return 2 * int(line), os.getpid()
"""

SCRIPT = """
import os, signal, sys
import paceline

ps = paceline.init()
batches = iter(paceline.feed(
    paceline.sources.lines(sys.argv[1]), batch_size=2, transform="transforms:doubled", leases=False, prefetch=1
))
numbers, makers = next(batches)
print("found", numbers.tolist(), "made elsewhere:", os.getpid() not in makers.tolist(), flush=True)
os.kill(int(makers[0]), signal.SIGKILL)
for numbers, _ in batches:
    print("more", flush=True)
"""


def test_the_last_data_server_is_named_when_it_is_gone(tmp_path: Path) -> None:
    (tmp_path / "transforms.py").write_text(TRANSFORM)
    (tmp_path / "numbers.txt").write_text("".join(f"{number}\n" for number in range(100)))
    script = write_script(tmp_path, SCRIPT)

    code, run = run_to_end(
        tmp_path / "run", script, str(tmp_path / "numbers.txt"), options=("-n", "1", "--data-servers", "1")
    )

    assert code == 1
    assert run.saying("found") == ["[worker 0] found [0, 2] made elsewhere: True"]
    assert len(run.saying("more")) < 10, "what was made ahead, and nothing else"
    assert run.told()[-1] == "paceline: data server 0 was killed by SIGKILL; no data server is left, and the run stops"
    assert "Traceback" not in run.output
