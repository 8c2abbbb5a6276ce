"""Open recipes: what each source gives, what is skipped, and what is said of data that cannot be read."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tests.data.sources.made import read, same
from torch.utils.data import DataLoader, TensorDataset

from paceline import sources
from paceline.data.sources.batch import BatchRequest
from paceline.data.sources.declared import BatchRecipe
from paceline.data.sources.records import Records, open_recipe
from paceline.errors import DataError, RecordError, UsageError

IMAGES = torch.arange(60, dtype=torch.float32).view(10, 2, 3)
LABELS = torch.arange(10)
OWN = "tests.data.sources.own"


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_arrays() -> None:
    """The same numbers in every form."""
    images, labels = IMAGES.numpy(), LABELS.numpy()
    np.savez("plain.npz", images=images, labels=labels, one=np.array(3), short=labels[:9], turned=images.T)
    np.savez_compressed("small.npz", images=images, labels=labels)
    np.save("x.npy", np.asfortranarray(images))
    np.save("y.npy", labels)
    save_file({"images": IMAGES, "labels": LABELS}, "both.safetensors")


def opened(source: sources.Source, transform: str | None = None, *, skip: bool = False, seed: int = 0) -> Records:
    return open_recipe(BatchRecipe(source, transform, "skip" if skip else "raise", seed), None)


COLUMNS: dict[str, Callable[[], sources.Source]] = {
    "npz": lambda: sources.arrays("plain.npz", "images", "labels"),
    "compressed": lambda: sources.arrays("small.npz", "images", "labels"),
    "safetensors": lambda: sources.tensors("both.safetensors", "images", "labels"),
}


# -- columns ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", COLUMNS)
def test_columns_give_what_a_loader_of_torch_gives(kind: str) -> None:
    write_arrays()
    records = opened(COLUMNS[kind]())
    loader = DataLoader(TensorDataset(IMAGES, LABELS), batch_sampler=[[7, 0, 7], [9]])
    for indices, batch in zip(((7, 0, 7), (9,)), loader, strict=True):
        assert same(read(records, *indices).content, batch)
    assert records.num_samples == 10
    assert read(records).content is None
    records.close()
    records.close()


def test_names_make_a_dict_and_one_array_stands_for_itself() -> None:
    write_arrays()
    named = sources.arrays(pixels="x.npy", labels="y.npy")
    assert same(read(opened(named), 3).content, {"pixels": IMAGES[3:4], "labels": LABELS[3:4]})
    assert same(read(opened(sources.arrays("x.npy")), 3).content, IMAGES[3:4])
    assert same(read(opened(sources.arrays("plain.npz", "turned")), 2).content, IMAGES.permute(2, 1, 0)[2:3])
    assert same(read(opened(sources.arrays("plain.npz", "labels")), 3, 1).content, torch.tensor([3, 1]))


def test_arrays_without_samples_and_of_unusual_types() -> None:
    save_file({"a": torch.arange(6).view(3, 2).bfloat16()}, "b.safetensors")
    np.save("none.npy", np.zeros((0, 3)))
    assert opened(sources.arrays("none.npy")).num_samples == 0
    assert same(read(opened(sources.tensors("b.safetensors", "a")), 2).content, torch.tensor([[4, 5]]).bfloat16())


def test_a_transform_may_change_its_record_and_the_file_stays_as_it_is() -> None:
    write_arrays()
    halved = opened(sources.arrays("x.npy"), f"{OWN}:half")
    assert same(read(halved, 3, 4).content, IMAGES[3:5] / 2)
    assert same(read(halved, 3, 4).content, IMAGES[3:5] / 2)
    assert np.array_equal(np.load("x.npy"), IMAGES.numpy())


def damaged() -> None:
    """Files that are not what their names say."""
    write_arrays()
    Path("short.npz").write_bytes(Path("plain.npz").read_bytes()[:-40])
    Path("short.npy").write_bytes(Path("x.npy").read_bytes()[:-4])
    Path("empty.npy").write_bytes(b"")
    Path("short.safetensors").write_bytes(Path("both.safetensors").read_bytes()[:-4])
    Path("folder").mkdir()
    np.save("objects.npy", np.array([{}, None]))
    np.savez("objects.npz", a=np.array([{}, None]))
    np.savez_compressed("packed.npz", a=np.array([{}, None]))
    with ZipFile("cut.npz", "w") as archive:
        archive.writestr("a.npy", Path("y.npy").read_bytes()[:-8])
        archive.writestr("b.npy", Path("y.npy").read_bytes())
    header = b"{'descr': '<i8', 'fortran_order': False, 'shape': (%s, 2)}"
    for name, first in (("negative", b"-3"), ("huge", b"1099511627776")):
        Path(f"{name}.npy").write_bytes(b"\x93NUMPY\x01\x00v\x00" + (header % first).ljust(117) + b"\n" + bytes(48))
        with ZipFile(f"{name}.npz", "w", ZIP_DEFLATED) as archive:
            archive.write(f"{name}.npy", "a.npy")
    Path("more.npy").write_bytes(Path("y.npy").read_bytes() * 2)
    np.savez_compressed("flipped.npz", a=np.arange(1000))
    whole = Path("flipped.npz").read_bytes()
    Path("flipped.npz").write_bytes(whole[:60] + bytes(255 - byte for byte in whole[60:200]) + whole[200:])
    np.save("words.npy", np.array(["a", "b"]))
    np.save("swapped.npy", np.arange(3, dtype=">i4"))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: sources.arrays("none.npz", "images"), r"none.npz \(in .*cannot be read: No such file"),
        (lambda: sources.arrays("folder", "images"), "is a folder"),
        (lambda: sources.arrays("/dev/null", "images"), "no file on a disk"),
        (lambda: sources.arrays("plain.npz", "image"), "has no array image, only images, labels"),
        (lambda: sources.arrays("plain.npz", "images", "short"), "images of plain.npz 10, short of plain.npz 9"),
        (lambda: sources.arrays("plain.npz", "one"), r"one of plain.npz has shape \(\)"),
        (lambda: sources.arrays("short.npz", "images"), "cannot be read as an .npz file"),
        (lambda: sources.arrays("short.npy"), "cannot be read as a .npy file"),
        (lambda: sources.arrays("empty.npy"), "cannot be read as a .npy file"),
        (lambda: sources.arrays("objects.npy"), "Arrays of objects are not taken"),
        (lambda: sources.arrays("objects.npz", "a"), "it is an array of objects"),
        (lambda: sources.arrays("packed.npz", "a"), "Arrays of objects are not taken"),
        (lambda: sources.arrays("cut.npz", "a"), r"it has 72 bytes, which are not an array of shape \(10,\)"),
        (lambda: sources.arrays("negative.npy"), r"it has 48 bytes, which are not an array of shape \(-3, 2\)"),
        (lambda: sources.arrays("negative.npz", "a"), r"it has 48 bytes, which are not an array of shape \(-3, 2\)"),
        (lambda: sources.arrays("huge.npy"), r"it has 48 bytes, which are not an array of shape"),
        (lambda: sources.arrays("huge.npz", "a"), r"it has 48 bytes, which are not an array of shape"),
        (lambda: sources.arrays("more.npy"), r"it has 288 bytes, which are not an array of shape \(10,\)"),
        (lambda: sources.arrays("flipped.npz", "a"), "a of flipped.npz cannot be read as an .npz file"),
        (lambda: sources.arrays("words.npy"), "array of <U1, expected numbers"),
        (lambda: sources.arrays("swapped.npy"), "native byte order"),
        (lambda: sources.tensors("none.safetensors", "a"), "cannot be read"),
        (lambda: sources.tensors("short.safetensors", "images"), "not a complete safetensors file"),
        (lambda: sources.tensors("both.safetensors", "a", "labels"), "no tensor a, only images, labels"),
    ],
)
def test_columns_that_cannot_be_read(make: Callable[[], sources.Source], why: str) -> None:
    damaged()
    with pytest.raises(DataError, match=why):
        opened(make())


@pytest.mark.parametrize("kind", COLUMNS)
def test_a_file_that_shrinks_ends_the_reading_and_not_the_process(kind: str) -> None:
    write_arrays()
    records = opened(COLUMNS[kind]())
    for path in Path().glob("*"):
        path.write_bytes(b"short")
    with pytest.raises(DataError, match=r"has 5 bytes, and had .* when it was opened"):
        read(records, 3)


# -- lines -----------------------------------------------------------------------------------------------------------

TEXTS = st.lists(st.binary(max_size=8).map(lambda data: data.replace(b"a", b"\n").replace(b"b", b"\r\n")), max_size=4)


@given(TEXTS)
@settings(max_examples=60)
def test_lines_of_any_files(contents: list[bytes]) -> None:
    for number, content in enumerate([*contents, b"one more"]):
        Path(f"{number}.txt").write_bytes(content)
    names = [f"{number}.txt" for number in range(len(contents) + 1)]
    expected = [
        line.removesuffix(b"\r")
        for name in names
        for line in Path(name).read_bytes().removesuffix(b"\n").split(b"\n")
        if Path(name).read_bytes()
    ]
    records = opened(sources.lines(names, binary=True))
    assert records.num_samples == len(expected)
    assert read(records, *range(len(expected))).content == expected
    assert read(records, *reversed(range(len(expected)))).content == expected[::-1]
    records.close()


def test_a_pattern_stands_for_its_files_by_name() -> None:
    for name in ("b", "a", "c[1]"):
        Path(f"{name}.txt").write_text(f"{name}ä\n", encoding="latin-1")
    with closing(opened(sources.lines("?.txt", encoding="latin-1"))) as records:
        assert read(records, 0, 1).content == ["aä", "bä"]
    with closing(opened(sources.lines("c[1].txt", encoding="latin-1"))) as records:
        assert read(records, 0).content == ["c[1]ä"]
    with pytest.raises(DataError, match=r"a.txt is 2 times among the files"):
        opened(sources.lines(["*.txt", "a.txt"]))
    with pytest.raises(DataError, match=r"no file matches \*.csv, looked for in /"):
        opened(sources.lines("*.csv"))


def test_a_byte_order_mark_is_left_out_where_the_encoding_says_so() -> None:
    Path("a.txt").write_text("\ufeffone\n\ufefftwo\r\n", encoding="utf-8", newline="")
    Path("b.txt").write_text("three", encoding="utf-8")
    for encoding, first in (("utf-8-sig", "one"), ("UTF_8_sig", "one"), ("utf-8", "\ufeffone")):
        with closing(opened(sources.lines(["a.txt", "b.txt"], encoding=encoding))) as records:
            assert read(records, 0, 1, 2).content == [first, "\ufefftwo", "three"]


def test_a_long_file_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.data.sources.text._CHUNK_BYTES", 7)
    Path("a.txt").write_text("".join(f"{i}\n" for i in range(100)))
    with closing(opened(sources.lines("a.txt"))) as records:
        assert read(records, *range(100)).content == [str(i) for i in range(100)]


def test_more_files_than_are_open_at_a_time() -> None:
    for number in range(150):
        Path(f"{number:03}.txt").write_text(str(number))
    records = opened(sources.lines("*.txt"))
    for _ in range(2):
        assert read(records, *range(150)).content == [str(number) for number in range(150)]
    records.close()


def test_text_files_that_change() -> None:
    Path("a.txt").write_text("one\ntwo\n")
    records = opened(sources.lines("a.txt"), skip=True)
    Path("a.txt").write_text("one\n")
    with pytest.raises(DataError, match="has 4 bytes, and had 8"):
        read(records, 0)
    Path("a.txt").write_text("one\ntwo\nthree\n")
    with pytest.raises(DataError, match="has 14 bytes, and had 8"):
        read(records, 1)
    records.close()


# -- records that do not decode --------------------------------------------------------------------------------------


def test_a_record_that_does_not_decode_is_named() -> None:
    Path("a.txt").write_text("1\n2\nthree\n4\n")
    records = opened(sources.lines("a.txt"), f"{OWN}:number")
    assert read(records, 3, 0).content.tolist() == [4, 1]
    with pytest.raises(RecordError, match=r"line 3 of a.txt could not .*: ValueError: could not convert.*'three'"):
        read(records, 3, 2)
    assert records.skipped().num_skipped == 0
    records.close()


def test_a_record_that_does_not_decode_is_skipped_and_counted() -> None:
    Path("a.txt").write_bytes(b"1\n2\n\xff\n4\nfive\n")
    records = opened(sources.lines("a.txt"), f"{OWN}:number", skip=True)
    batch = read(records, 4, 3, 2, 0)
    assert (batch.content.tolist(), batch.num_samples, batch.num_skipped) == ([4, 1], 2, 2)
    batch = read(records, 2, 4)
    assert (batch.content, batch.num_samples, batch.num_skipped) == (None, 0, 2)
    assert records.skipped().num_skipped == 4
    assert "line 3 of a.txt could not be made part of a batch: UnicodeDecodeError" in records.skipped().reasons[0]
    records.close()


def test_only_the_first_reasons_are_kept() -> None:
    records = opened(sources.dataset(f"{OWN}:squares", num=9), f"{OWN}:half", skip=True)
    assert read(records, *range(9)).num_skipped == 9
    assert (records.skipped().num_skipped, len(records.skipped().reasons)) == (9, 5)


def test_no_more_is_decoded_than_a_batch_may_have() -> None:
    Path("a.txt").write_text("0123456789\n" * 10)
    with closing(opened(sources.lines("a.txt"))) as records:
        batch = BatchRequest(0, (0,) * 1000)
        assert records.prepare(batch, 20_000).layout.num_samples == 1000
        with pytest.raises(UsageError, match="a batch of 51 samples has 510 bytes, at most 500 are served"):
            records.prepare(batch, 500)


def test_records_unlike_most_of_their_batch() -> None:
    Path("a.txt").write_text("ab\n#c\nd\n#e\nfg\n")
    source = sources.lines("a.txt")
    with closing(opened(source, f"{OWN}:letters", skip=True)) as records:
        assert same(read(records, 1, 0, 4).content, [["ab", "fg"], torch.tensor([2, 2])])
        assert read(records, 3, 0).content == ["#e"]  # of as many, the first
        assert records.skipped().num_skipped == 2
    unlike = r"line 2 of a.txt .* it is str, and most .* are \[str, int\]"
    with closing(opened(source, f"{OWN}:letters")) as records, pytest.raises(RecordError, match=unlike):
        read(records, 1, 0, 4)


# -- datasets and transforms of one's own ----------------------------------------------------------------------------


def test_a_dataset_of_ones_own() -> None:
    assert read(opened(sources.dataset(f"{OWN}:squares", num=5)), 4, 2).content.tolist() == [16, 4]
    pairs = opened(sources.dataset(f"{OWN}:pairs"))
    assert same(read(pairs, 5).content, [torch.tensor([[10.0, 11.0]]), torch.tensor([5])])
    with pytest.raises(RecordError, match=f"record 1 of {OWN}:squares .* NoneType in it"):
        read(opened(sources.dataset(f"{OWN}:squares", num=3, bad=1)), 0, 1)


def test_the_digits_of_the_examples_can_be_fed() -> None:
    records = opened(sources.dataset("examples.digits:training"))
    images, labels = read(records, 0, 1439).content
    assert (records.num_samples, images.shape, images.dtype, labels.dtype) == (
        1440,
        (2, 64),
        torch.float32,
        torch.int64,
    )


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        (BatchRecipe(sources.dataset(f"{OWN}:nothing")), "has no function nothing"),
        (BatchRecipe(sources.dataset(f"{OWN}:PLAIN")), "has no function PLAIN"),
        (BatchRecipe(sources.dataset("no_such_module:x")), "cannot be imported"),
        (BatchRecipe(sources.dataset("os:system", command="true")), "Python's own library"),
        (BatchRecipe(sources.dataset(f"{OWN}:stream")), "expected an object with __len__ and __getitem__"),
        (BatchRecipe(sources.dataset(f"{OWN}:broken")), "could not be built .* FileNotFoundError: no folder train"),
        (BatchRecipe(sources.dataset(f"{OWN}:refusing")), "^choose another one$"),
        (BatchRecipe(sources.dataset(f"{OWN}:squares")), "could not be built .* missing 1 required"),
        (BatchRecipe(sources.dataset(f"{OWN}:pairs"), f"{OWN}:nothing"), "has no function nothing"),
        (BatchRecipe(sources.dataset(f"{OWN}:pairs"), "half"), "names no transform"),
        (BatchRecipe(sources.dataset(f"{OWN}:pairs"), on_error="ignore"), "on_error is 'ignore'"),  # pyright: ignore
        (BatchRecipe("a.txt"), "the source is a str"),  # pyright: ignore
    ],
)
def test_recipes_that_make_no_sense(recipe: BatchRecipe, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        open_recipe(recipe, None)


def test_what_may_be_imported_is_limited() -> None:
    recipe = BatchRecipe(sources.dataset(f"{OWN}:pairs"), f"{OWN}:noisy")
    open_recipe(recipe, frozenset((f"{OWN}:pairs", f"{OWN}:noisy")))
    for allowed in ((), (f"{OWN}:pairs",), (f"{OWN}:noisy",)):
        with pytest.raises(UsageError, match="may not be loaded here"):
            open_recipe(recipe, frozenset(allowed))


def test_the_chance_of_a_transform_is_the_samples_own() -> None:
    source = sources.dataset(f"{OWN}:pairs")

    def image(index: int, *others: int, epoch: int = 2, seed: int = 7) -> torch.Tensor:
        content = read(opened(source, f"{OWN}:noisy", seed=seed), index, *others, epoch=epoch).content
        return content[0][0] - torch.tensor([2.0 * index, 2.0 * index + 1])

    again = torch.equal(image(3), image(3, 1, 2))
    others = [image(4), image(3, epoch=3), image(3, seed=8)]
    assert again
    assert not any(torch.allclose(image(3), other) for other in others)
    assert [f"{value:.4f}" for value in image(3).tolist()] == GOLDEN


GOLDEN = ["-0.8776", "0.4151"]


@pytest.mark.parametrize("indices", [(-1,), (0, 6)])
def test_samples_that_do_not_exist(indices: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="there are 6"):
        opened(sources.dataset(f"{OWN}:pairs")).prepare(BatchRequest(0, indices))


# -- fingerprints ----------------------------------------------------------------------------------------------------


def test_a_fingerprint_tells_different_files_apart() -> None:
    write_arrays()
    Path("a.txt").write_text("one\ntwo\n")
    found = {make().__class__.__name__ + kind: opened(make()).fingerprint() for kind, make in COLUMNS.items()}
    found["dataset"] = opened(sources.dataset(f"{OWN}:squares", num=3)).fingerprint()
    found["other dataset"] = opened(sources.dataset(f"{OWN}:squares", num=4)).fingerprint()
    found["lines"] = opened(sources.lines("*.txt")).fingerprint()
    again = opened(sources.lines("*.txt")).fingerprint()
    assert again == found["lines"]
    Path("a.txt").write_text("one\ntoo\nmuch\n")
    found["longer"] = opened(sources.lines("*.txt")).fingerprint()
    Path("b.txt").write_text("")
    found["more"] = opened(sources.lines("*.txt")).fingerprint()
    np.save("x.npy", IMAGES.numpy())
    found["x"] = opened(sources.arrays("x.npy")).fingerprint()
    np.save("x.npy", IMAGES.numpy().astype(np.int32))
    found["same size, other type"] = opened(sources.arrays("x.npy")).fingerprint()
    Path("b.txt").write_text("one\n2\nthree\n")
    found["b"] = opened(sources.lines("b.txt")).fingerprint()
    Path("b.txt").write_text("1\ntwo\nthree\n")
    found["b of the same size and number of lines"] = opened(sources.lines("b.txt")).fingerprint()
    assert len(set(found.values())) == len(found)


def test_names_that_are_no_text_can_be_told() -> None:
    Path(os.fsdecode(b"odd\xff.txt")).write_text("1\nnone\n")
    with closing(opened(sources.lines("odd*.txt"), f"{OWN}:number", skip=True)) as records:
        assert records.fingerprint()
        assert read(records, 0, 1).num_skipped == 1
        assert records.skipped().reasons[0].startswith("line 2 of odd\\udcff.txt could not")
