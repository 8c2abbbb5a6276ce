"""Golden transcripts: one readable story for each named consistency, played by the real cores.

`pytest tests/core/test_transcripts.py --rewrite` records them anew; the difference is then for a person to read.
"""

from pathlib import Path

import pytest
from tests.core.interpreter import play

FILES = sorted((Path(__file__).parent / "transcripts").glob("*.txt"))


def test_every_named_consistency_has_its_story() -> None:
    assert [file.stem for file in FILES] == ["asynchronous", "backup", "bsp", "essp", "ssp"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_cores_still_tell_the_same_story(file: Path, request: pytest.FixtureRequest) -> None:
    recorded = file.read_text()
    played = play(recorded)
    if request.config.getoption("--rewrite", default=False):
        file.write_text(played)
    else:
        assert played == recorded
