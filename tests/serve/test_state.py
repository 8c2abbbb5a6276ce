"""What a server of its own keeps on disk: whole saves, of which the newest counts, and none that is damaged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import CheckpointError, PacelineError, UsageError
from paceline.serve.state import Manifest, ManifestEntry, NamespaceFolder, StateFolder
from paceline.snapshots.files import digest_of


def writing(text: str) -> Callable[[Path], Manifest]:
    """A save of one table with this content."""

    def fill(folder: Path) -> Manifest:
        file = folder / "0.safetensors"
        file.write_text(text)
        return Manifest("job", 7, (ManifestEntry("w", "shape", file.name, digest_of(file), 1, b"spec", b"hyper"),))

    return fill


def content(folder: NamespaceFolder, *, or_previous: bool = False) -> str | None:
    save = folder.newest(or_previous=or_previous)
    return None if save is None else (save.folder / save.manifest.entries[0].file).read_text()


@pytest.fixture
def folder(tmp_path: Path) -> NamespaceFolder:
    found = NamespaceFolder(tmp_path / "job")
    assert found.start_generation() == 1
    return found


def test_the_newest_save_counts_and_the_one_before_it_is_kept(folder: NamespaceFolder) -> None:
    assert content(folder) is None
    for text in ("one", "two", "three"):
        folder.write(writing(text))
        assert content(folder) == text
    assert sorted(path.name for path in folder.path.glob("save*")) == ["save-2", "save-3"]
    assert [folder.start_generation(), folder.start_generation()] == [2, 3]


def test_a_save_that_broke_off_changes_nothing(folder: NamespaceFolder) -> None:
    folder.write(writing("one"))

    def fill(path: Path) -> Manifest:
        (path / "0.safetensors").write_text("half of ")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        folder.write(fill)
    (folder.path / "unfinished-2").mkdir()  # as a killed process leaves it
    (folder.path / "unfinished-2" / "0.safetensors").write_text("half of ")
    (folder.path / "save-2").mkdir()  # killed before it was named as the newest
    assert content(folder) == "one"
    folder.start_generation()
    assert not list(folder.path.glob("unfinished*"))
    folder.write(writing("three"))
    assert content(folder) == "three"
    assert sorted(path.name for path in folder.path.glob("save*")) == ["save-1", "save-3"]


@pytest.mark.parametrize("name", ["0.safetensors", "manifest.json", "manifest.sha256", ""])
@pytest.mark.parametrize("damage", ["flip", "remove"])
def test_damage_is_told_with_the_file_and_the_save_before_is_used_if_asked(
    folder: NamespaceFolder, name: str, damage: str
) -> None:
    folder.write(writing("one"))
    folder.write(writing("two"))
    damaged = folder.path / "save-2" / name
    if name == "":
        damaged.rename(folder.path / "elsewhere")
    elif damage == "remove":
        damaged.unlink()
    else:
        damaged.write_bytes(bytes([damaged.read_bytes()[0] ^ 1]) + damaged.read_bytes()[1:])
    with pytest.raises(CheckpointError, match=r"save-2.*Start with --or-previous"):
        folder.newest()
    assert content(folder, or_previous=True) == "one"
    assert content(folder) == "one"
    folder.write(writing("three"))
    assert content(folder) == "three"
    if name:
        assert (folder.path / "save-2.damaged").exists()  # set aside, and not lost


def test_what_is_damaged_with_nothing_before_it_is_told(folder: NamespaceFolder) -> None:
    save = folder.write(writing("one"))
    (save.folder / "0.safetensors").write_text("one more")
    expected = r"0\.safetensors is damaged: its SHA-256 is [0-9a-f]{64}, expected [0-9a-f]{64}.*no save before it"
    with pytest.raises(CheckpointError, match=expected):
        folder.newest(or_previous=True)


@pytest.mark.parametrize("stray", ["file", "link", "folder"])
def test_what_lies_where_a_save_is_written_blocks_nothing(folder: NamespaceFolder, stray: str, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("kept")

    def put_in_the_way(number: int) -> None:
        place = folder.path / f"unfinished-{number}"
        if stray == "file":
            place.write_text("stray")
        elif stray == "link":
            place.symlink_to(elsewhere)
        else:
            place.mkdir()
            (place / "half").write_text("half")

    put_in_the_way(1)
    folder.write(writing("one"))
    put_in_the_way(2)
    assert folder.start_generation() == 2
    assert content(folder) == "one"
    assert sorted(path.name for path in folder.path.iterdir()) == ["generation", "newest", "save-1"]
    assert (elsewhere / "kept").read_text() == "kept"


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


@pytest.mark.parametrize("name", ["../../token", "save-", "save-x", "unfinished-1", "save-1/../../x", ""])
def test_nothing_but_a_save_can_be_the_newest(folder: NamespaceFolder, name: str) -> None:
    (folder.path / "newest").write_text(name)
    with pytest.raises(CheckpointError, match="which names no save; in this folder there is no save"):
        folder.newest()


@pytest.mark.parametrize("left", [str(1 << 70).encode(), b"9" * 5000, b"-5", b"1_0", b"\xff", b""])
def test_a_generation_that_cannot_be_is_refused_and_left_as_it_is(folder: NamespaceFolder, left: bytes) -> None:
    (folder.path / "generation").write_bytes(left)
    with pytest.raises(CheckpointError, match=r"generation says .*, expected a number of at most 18 digits"):
        folder.start_generation()
    assert (folder.path / "generation").read_bytes() == left


@pytest.mark.parametrize("left", [None, b"", b"\xff\x00", b"save-", b"../save-2", b"save-" + b"9" * 5000])
def test_saves_survive_the_loss_of_the_name_of_the_newest(folder: NamespaceFolder, left: bytes | None) -> None:
    for text in ("one", "two"):
        folder.write(writing(text))
    (folder.path / "newest").unlink()
    if left is not None:
        (folder.path / "newest").write_bytes(left)
    with pytest.raises(CheckpointError, match=r"newest, which names .* there is save-1, save-2\. Start with --or-prev"):
        folder.newest()
    folder.drop_if_empty()
    folder.write(writing("three"))  # as a server does whose file was lost while it ran
    assert sorted(path.name for path in folder.path.glob("save*")) == ["save-2", "save-3"]
    (folder.path / "newest").unlink()
    assert content(folder, or_previous=True) == "three"
    assert content(folder) == "three"


def test_a_first_save_that_was_not_named_any_more_counts(folder: NamespaceFolder) -> None:
    folder.write(writing("one"))
    (folder.path / "newest").unlink()  # as a kill between the two leaves it
    assert content(folder) == "one"


def test_of_several_damaged_saves_the_newest_that_is_whole_counts(folder: NamespaceFolder) -> None:
    for text in ("one", "two"):
        folder.write(writing(text))
    (folder.path / "newest").write_text("save-3")
    (folder.path / "save-2" / "manifest.json").write_text("{")
    assert content(folder, or_previous=True) == "one"
    assert sorted(path.name for path in folder.path.glob("save*")) == ["save-1", "save-2.damaged"]
    (folder.path / "save-1" / "manifest.json").unlink()
    folder.drop_if_empty()
    assert (folder.path / "save-2.damaged").exists()
    with pytest.raises(CheckpointError, match=r"save-1.*There is no save before it"):
        folder.newest(or_previous=True)


def test_what_could_not_be_read_again_is_not_written(folder: NamespaceFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write(writing("one"))
    monkeypatch.setattr("paceline.serve.state.MAX_MANIFEST_BYTES", 100)
    with pytest.raises(CheckpointError, match=r"would have \d+ bytes, at most 100 are read: declare fewer tables"):
        folder.write(writing("two"))
    monkeypatch.undo()
    assert content(folder) == "one"


@pytest.mark.parametrize(
    "change",
    [
        (b"0.safetensors", b"../0.tensors"),
        (b'"shape"', b'"other"'),
        (b"paceline state 1", b"paceline state 9"),
        (b'"clock": 7', b'"clock":-7'),
        (b'"version"', b'"varsion"'),
    ],
)
def test_a_manifest_says_what_it_may_and_nothing_else(change: tuple[bytes, bytes]) -> None:
    file = "0.safetensors"
    good = Manifest("job", 7, (ManifestEntry("w", "shape", file, "0" * 64, 1, b"spec", b"hyper"),)).encode()
    assert Manifest.decode(good, Path("m")).clock == 7
    assert change[0] in good
    with pytest.raises(CheckpointError, match=r"^m "):
        Manifest.decode(good.replace(*change), Path("m"))


@given(st.binary(max_size=200))
def test_bytes_that_are_no_manifest_are_refused(text: bytes) -> None:
    with pytest.raises(CheckpointError):
        Manifest.decode(text, Path("m"))


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
    folder.write(writing("one"))
    (folder.path / "generation").unlink()
    first = folder.start_generation()
    assert first > 1
    assert folder.start_generation() == first + 1
