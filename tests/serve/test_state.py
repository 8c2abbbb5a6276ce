"""What a server of its own keeps on disk: whole snapshots, of which the newest counts, and none that is damaged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import CheckpointError, PacelineError, UsageError
from paceline.serve.state import NamespaceFolder, StateFolder
from paceline.snapshots.files import write_file
from paceline.snapshots.folder import SnapshotManifest, write_snapshot


def writing(text: str) -> Callable[[Path], SnapshotManifest]:
    """A snapshot of one file with this content."""

    def fill(folder: Path) -> SnapshotManifest:
        return SnapshotManifest(7, 1, 1, 1, (), (write_file(folder / "0.bin", text.encode()),))

    return fill


def write(folder: NamespaceFolder, *texts: str) -> None:
    for text in texts:
        write_snapshot(folder.path, writing(text), keep=2)


def content(folder: NamespaceFolder, *, or_previous: bool = False) -> str | None:
    found = folder.newest(or_previous=or_previous)
    return None if found is None else (found.folder / "0.bin").read_text()


@pytest.fixture
def folder(tmp_path: Path) -> NamespaceFolder:
    found = NamespaceFolder(tmp_path / "job")
    assert found.start_generation() == 1
    return found


def test_the_newest_snapshot_counts_and_generations_grow(folder: NamespaceFolder) -> None:
    assert content(folder) is None
    for text in ("one", "two", "three"):
        write(folder, text)
        assert content(folder) == text
    assert [folder.start_generation(), folder.start_generation(), folder.start_generation(7)] == [2, 3, 8]


@pytest.mark.parametrize("name", ["0.bin", "manifest.json", "manifest.sha256"])
@pytest.mark.parametrize("damage", ["flip", "remove"])
def test_damage_is_told_with_the_file_and_the_snapshot_before_is_used_if_asked(
    folder: NamespaceFolder, name: str, damage: str
) -> None:
    write(folder, "one", "two")
    damaged = folder.path / "snapshot-2" / name
    if damage == "remove":
        damaged.unlink()
    else:
        damaged.write_bytes(bytes([damaged.read_bytes()[0] ^ 1]) + damaged.read_bytes()[1:])
    with pytest.raises(CheckpointError, match=r"snapshot-2.*Start with --or-previous to go on from snapshot-1"):
        folder.newest()
    assert content(folder, or_previous=True) == "one"
    assert content(folder) == "one"
    write(folder, "three")
    assert content(folder) == "three"
    names = sorted(path.name for path in folder.path.glob("snapshot-*"))
    assert names == ["snapshot-1", "snapshot-2.damaged", "snapshot-3"], "set aside, and not lost"


def test_what_is_damaged_with_nothing_before_it_is_told(folder: NamespaceFolder) -> None:
    write(folder, "one")
    (folder.path / "snapshot-1" / "0.bin").write_text("one more")
    expected = r"0\.bin is damaged: its SHA-256 is [0-9a-f]{64}, expected [0-9a-f]{64}.*no snapshot before it"
    for or_previous in (False, True):
        with pytest.raises(CheckpointError, match=expected):
            folder.newest(or_previous=or_previous)
    folder.drop_if_empty()
    assert (folder.path / "snapshot-1").exists()


def test_of_several_damaged_snapshots_the_newest_that_is_whole_counts(folder: NamespaceFolder) -> None:
    for text in ("one", "two", "three"):
        write_snapshot(folder.path, writing(text), keep=3)
    for number in (2, 3):
        (folder.path / f"snapshot-{number}" / "manifest.json").write_text("{")
    assert content(folder, or_previous=True) == "one"
    names = sorted(path.name for path in folder.path.glob("snapshot-*"))
    assert names == ["snapshot-1", "snapshot-2.damaged", "snapshot-3.damaged"]
    (folder.path / "snapshot-1").rename(folder.path / "snapshot-1.damaged")
    assert content(folder) is None
    folder.drop_if_empty()
    assert (folder.path / "snapshot-2.damaged").exists()


def test_a_namespace_that_a_full_disk_does_not_take_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> None:
        path.with_name(f".{path.name}").write_bytes(content[:0])
        raise OSError(28, "No space left on device")

    state = StateFolder(tmp_path / "state")
    known = state.folder("known")
    known.start_generation()
    with monkeypatch.context() as patch:
        patch.setattr("paceline.serve.state.write_durably", full)
        for folder in (known, state.folder("new")):
            with pytest.raises(OSError, match="No space left"):
                folder.start_generation()
    assert state.names() == ["known"]
    assert [state.folder(name).start_generation() for name in ("known", "new")] == [2, 1]
    state.close()


@pytest.mark.parametrize("left", [str(1 << 70).encode(), b"9" * 5000, b"-5", b"1_0", b"\xff", b""])
def test_a_generation_that_cannot_be_is_refused_and_left_as_it_is(folder: NamespaceFolder, left: bytes) -> None:
    (folder.path / "generation").write_bytes(left)
    with pytest.raises(CheckpointError, match=r"generation says .*, expected a number of at most 18 digits"):
        folder.start_generation()
    assert (folder.path / "generation").read_bytes() == left


def test_a_folder_is_that_of_one_server_and_of_one_user(tmp_path: Path) -> None:
    first = StateFolder(tmp_path / "state")
    with pytest.raises(UsageError, match=r"another server keeps its state in .*\(process \d+\)"):
        StateFolder(tmp_path / "state")
    first.close()
    StateFolder(tmp_path / "state").close()
    (tmp_path / "state").chmod(0o777)
    with pytest.raises(UsageError, match="others than you can write in"):
        StateFolder(tmp_path / "state")
    (tmp_path / "file").touch()
    with pytest.raises(
        UsageError, match=r"cannot use the folder .*/file: File exists; name another folder for the state"
    ):
        StateFolder(tmp_path / "file")


@given(st.text(min_size=1, max_size=64))
def test_names_on_disk_are_ours_and_lead_back_to_those_of_the_wire(name: str) -> None:
    from paceline.serve.state import folder_name, name_of

    try:
        on_disk = folder_name(name)
    except (UnicodeEncodeError, PacelineError):  # halves of pairs, which travel nowhere
        return
    assert set(on_disk) <= set("abcdefghijklmnopqrstuvwxyz0123456789-_%")
    assert name_of(on_disk) == name


def test_a_lost_generation_begins_none_that_was_there_before(folder: NamespaceFolder) -> None:
    write(folder, "one")
    (folder.path / "generation").unlink()
    first = folder.start_generation()
    assert first > 1
    assert folder.start_generation() == first + 1
