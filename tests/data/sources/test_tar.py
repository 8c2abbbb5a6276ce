"""Samples of tar files, as WebDataset has them."""

from __future__ import annotations

import io
import tarfile
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.sources.made import read

from paceline import sources
from paceline.data.sources.declared import BatchRecipe
from paceline.data.sources.records import Records, open_recipe
from paceline.errors import DataError, RecordError


def write(path: Path, *names: str, mode: str = "w") -> None:
    """A tar file whose files hold their own names."""
    with tarfile.open(path, mode) as archive:  # pyright: ignore[reportCallIssue, reportArgumentType]
        for name in names:
            member = tarfile.TarInfo(name)
            if name.endswith("/"):
                member.type = tarfile.DIRTYPE
            else:
                member.size = len(name)
            archive.addfile(member, io.BytesIO(name.encode()))


def opened(*paths: Path) -> Records:
    return open_recipe(BatchRecipe(sources.webdataset([*paths])), None)


def test_files_of_one_name_are_a_sample(tmp_path: Path) -> None:
    long = "a" * 150  # a name that takes headers of its own
    write(tmp_path / "b.tar", "d.e/", "d.e/1.JPG", "d.e/1.seg.png", "d.e/2.jpg", "d.e/2.seg.png", ".hidden", "README")
    write(tmp_path / "a.tar", f"{long}.jpg", f"{long}.seg.png")
    records = opened(tmp_path / "*.tar")
    assert records.num_samples == 3
    assert read(records, 2, 0, 1).content == {
        "__key__": ["d.e/2", long, "d.e/1"],
        "jpg": [b"d.e/2.jpg", f"{long}.jpg".encode(), b"d.e/1.JPG"],
        "seg.png": [b"d.e/2.seg.png", f"{long}.seg.png".encode(), b"d.e/1.seg.png"],
    }
    records.close()


def test_an_empty_tar_file_has_no_samples(tmp_path: Path) -> None:
    write(tmp_path / "a.tar")
    assert opened(tmp_path / "a.tar").num_samples == 0


def test_a_file_twice_in_a_sample(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", "1.jpg", "1.JPG")
    with pytest.raises(DataError, match=r"a.tar has a file twice in sample 1: jpg, jpg"):
        opened(tmp_path / "a.tar")


def test_compressed_or_no_tar_at_all(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", "1.jpg", mode="w:gz")
    with pytest.raises(DataError, match="It must not be compressed"):
        opened(tmp_path / "a.tar")
    (tmp_path / "a.tar").write_bytes(b"")
    with pytest.raises(DataError, match="cannot be read as a tar file"):
        opened(tmp_path / "a.tar")


def test_a_damaged_header_is_not_taken_for_the_end(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    write(path, *(f"{number}.jpg" for number in range(5)))
    whole = path.read_bytes()
    path.write_bytes(whole[:2048] + b"\xff" * 512 + whole[2560:])
    with pytest.raises(DataError, match="damaged at byte 2048"):
        opened(path)
    path.write_bytes(whole[:2200])
    with pytest.raises(DataError, match="damaged at byte 2048"):
        opened(path)
    path.write_bytes(whole[:1540])
    with pytest.raises(DataError, match=r"cannot be read as a tar file|damaged"):
        opened(path)


def test_a_tar_file_that_is_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    write(path, "1.jpg", "2.jpg", "3.jpg")
    whole = path.read_bytes()
    for size in (0, 1, 511, 512, 514, 517, 518, 1023, 1024, 1536, 2047, 2048, 2053, 3072, 3073, 3584, 4095):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"a\.tar"):
            opened(path)
    path.write_bytes(whole[:2048])
    with pytest.raises(DataError, match="ends at byte 2048 without the 1024 bytes of zeros"):
        opened(path)
    path.write_bytes(whole[:1538])
    with pytest.raises(DataError, match=r"ends at byte 1538, in the middle of 2.jpg, .* bytes 1536 to 1541"):
        opened(path)
    path.write_bytes(whole[:4096])
    assert opened(path).num_samples == 3


def test_archives_one_behind_the_other_are_read_wholly(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / f"{name}.tar", *(f"{name}{number}.jpg" for number in range(20)))
    whole = (tmp_path / "a.tar").read_bytes(), (tmp_path / "b.tar").read_bytes()
    for joined in (b"".join(whole), whole[0] + bytes(1 << 21) + whole[1], whole[0][: 20 * 1024] + whole[1]):
        (tmp_path / "c.tar").write_bytes(joined)
        records = opened(tmp_path / "c.tar")
        assert records.num_samples == 40
        assert read(records, 39, 0).content["jpg"] == [b"b19.jpg", b"a0.jpg"]
        records.close()
    (tmp_path / "c.tar").write_bytes(whole[0] + b"signed" + bytes(506))
    with pytest.raises(DataError, match=f"damaged at byte {len(whole[0])}"):
        opened(tmp_path / "c.tar")
    (tmp_path / "c.tar").write_bytes(whole[0] + whole[1][:-512] + whole[1][:512])
    with pytest.raises(DataError, match=r"c\.tar"):
        opened(tmp_path / "c.tar")


def put(archive: tarfile.TarFile, name: str, data: bytes = b"", **fields: Any) -> None:
    """Add one member, which may say anything of itself."""
    member = tarfile.TarInfo(name)
    member.size = len(data)
    for field, value in fields.items():
        setattr(member, field, value)
    archive.addfile(member, io.BytesIO(data))


SPARSE = b"abc" + bytes(97) + b"de" + bytes(50)


def write_sparse(path: Path, form: str, stated: int = len(SPARSE), first: int = 3) -> None:
    """A file of two pieces and two holes, as three versions of GNU tar write it, then another file."""
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        pieces, number = b"abcde", str(stated)
        pax = {"GNU.sparse.name": "1.bin"}
        if form == "1.0":
            pax |= {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": number}
            spans = f"3\n0\n{first}\n100\n2\n152\n0\n".encode()
            put(archive, "GNUSparseFile.0/1.bin", spans.ljust(512, b"\0") + pieces, pax_headers=pax)
        elif form == "0.1":
            pax |= {"GNU.sparse.size": number, "GNU.sparse.numblocks": "2", "GNU.sparse.map": f"0,{first},100,2"}
            put(archive, "GNUSparseFile.0/1.bin", pieces, pax_headers=pax)
        else:
            member = tarfile.TarInfo("1.bin")
            member.size, member.type = len(pieces), b"S"
            header = bytearray(member.tobuf(tarfile.GNU_FORMAT))
            spans = b"".join(b"%011o\0" % place for place in (0, first, 100, 2, 152, 0))
            header[386 : 386 + len(spans)] = spans
            header[483:495] = b"%011o\0" % stated
            header[148:156] = b" " * 8
            header[148:156] = b"%06o\0 " % sum(header)
            cast("Any", archive).fileobj.write(bytes(header) + pieces.ljust(512, b"\0"))
            cast("Any", archive).offset += 1024
        put(archive, "1.txt", b"next")


@pytest.mark.parametrize("form", ["old", "0.1", "1.0"])
def test_files_stored_without_their_holes(tmp_path: Path, form: str) -> None:
    write_sparse(tmp_path / "a.tar", form)
    records = opened(tmp_path / "a.tar")
    assert read(records, 0).content == {"__key__": ["1"], "bin": [SPARSE], "txt": [b"next"]}
    records.close()
    write_sparse(tmp_path / "a.tar", form, first=800, stated=2000)
    with pytest.raises(DataError, match=r"has pieces up to byte \d+, where the next file begins"):
        opened(tmp_path / "a.tar")
    write_sparse(tmp_path / "a.tar", form, stated=20)
    with pytest.raises(DataError, match=r"1.bin in .*a\.tar, at byte \d+, has 2 bytes at 100, and a size of 20"):
        opened(tmp_path / "a.tar")
    write_sparse(tmp_path / "a.tar", form, stated=3 << 30)
    with pytest.raises(DataError, match="with its holes filled, expected at most"):
        opened(tmp_path / "a.tar")


def test_links_stand_for_the_files_that_they_lead_to(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        put(archive, "./d/1.jpg", b"one")
        put(archive, "./d/1.txt", type=tarfile.LNKTYPE, linkname="./d/1.jpg")
        put(archive, "./d/2.jpg", type=tarfile.LNKTYPE, linkname="./d/1.txt")
        put(archive, "./d/2.txt", type=tarfile.SYMTYPE, linkname="../e/later")
        put(archive, "./d/3.jpg", type=tarfile.LNKTYPE, linkname="./d/2.txt")
        put(archive, "./d/current", type=tarfile.SYMTYPE, linkname="nowhere")  # no name of a sample's file
        put(archive, "./e/later", type=tarfile.SYMTYPE, linkname="last")
        put(archive, "./e/last", b"last")
        put(archive, "./d/1.jpg", b"none", type=tarfile.DIRTYPE, size=0)
        for name, content in (("jpg", b"early"), ("txt", b"late")):  # a hard link is to what had the name before it
            put(archive, "source", content)
            put(archive, f"./f/1.{name}", type=tarfile.LNKTYPE, linkname="source")
    records = opened(tmp_path / "a.tar")
    assert records.num_samples == 4
    assert read(records, 0, 1).content["jpg"] == [b"one", b"one"]
    assert read(records, 0, 1).content["txt"] == [b"one", b"last"]
    assert read(records, 2).content == {"__key__": ["./d/3"], "jpg": [b"last"]}
    assert read(records, 3).content == {"__key__": ["./f/1"], "jpg": [b"early"], "txt": [b"late"]}
    records.close()


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (
            {"type": tarfile.LNKTYPE, "linkname": "0.jpg"},
            r"1.txt in .*, at byte 1024, is a link to 0.jpg, which is not",
        ),
        ({"type": tarfile.SYMTYPE, "linkname": "0.jpg"}, r"1.txt in .* is a link to 0.jpg, which is not"),
        ({"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}, r"is a link to /etc/passwd, which is not"),
        ({"type": tarfile.SYMTYPE, "linkname": "1.txt"}, r"is a link to 1.txt, which is not"),
        ({"type": tarfile.FIFOTYPE}, r"1.txt in .*, at byte 1024, is neither a file, a folder nor a link"),
        ({"type": b"M"}, r"is neither a file, a folder nor a link"),
    ],
)
def test_what_cannot_be_read_as_a_file_is_refused(tmp_path: Path, fields: dict[str, Any], why: str) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        put(archive, "1.jpg", b"one")
        put(archive, "1.txt", **fields)
        put(archive, "2.jpg", b"two")
    with pytest.raises(DataError, match=why):
        opened(tmp_path / "a.tar")


def test_names_that_are_no_text(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.GNU_FORMAT) as archive:
        put(archive, "odd\udcff.jpg", b"one")
        put(archive, "two.odd\udcff", b"two")
    records = opened(tmp_path / "a.tar")
    assert read(records, 0).content == {"__key__": ["odd\udcff"], "jpg": [b"one"]}
    with pytest.raises(
        RecordError, match=r"sample two of .*: it has a dict with the key 'odd.udcff', which is not valid"
    ):
        read(records, 1)
    records.close()


NAMES = st.sampled_from(["a.jpg", "a.txt", "b.jpg", "dir/a.jpg", "./b.seg.png", "ä.jpg", "c" * 120 + ".txt", "README"])


@given(st.lists(st.tuples(NAMES, st.binary(max_size=1200)), max_size=8, unique_by=lambda file: file[0]), st.booleans())
@settings(max_examples=60)
def test_any_archive_is_read_as_tarfile_reads_it(tmp_path: Path, files: list[tuple[str, bytes]], pax: bool) -> None:
    form = tarfile.PAX_FORMAT if pax else tarfile.GNU_FORMAT
    with tarfile.open(tmp_path / "a.tar", "w", format=form) as archive:
        for name, data in files:
            put(archive, name, data)
    with closing(opened(tmp_path / "a.tar")) as records:
        found: list[tuple[str, bytes]] = []
        for index in range(records.num_samples):
            content = read(records, index).content
            [key] = content.pop("__key__")
            found += [(f"{key}.{extension}", data) for extension, [data] in content.items()]
    assert found == [(name, data) for name, data in files if "." in name.rpartition("/")[2]]


@given(st.integers(0, 5 * 512), st.binary(min_size=1, max_size=30))
@settings(max_examples=100)
def test_a_damaged_archive_is_read_or_refused(tmp_path: Path, at: int, noise: bytes) -> None:
    path = tmp_path / "a.tar"
    write_sparse(path, "1.0")
    whole = path.read_bytes()
    path.write_bytes(whole[:at] + noise + whole[at + len(noise) :])
    try:
        records = opened(path)
    except DataError:
        return
    with closing(records):
        for index in range(records.num_samples):
            with suppress(RecordError):  # a name of a member that is no text, for example
                read(records, index)
