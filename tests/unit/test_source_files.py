"""Names: globs, braces, what is missing, what is named twice, stamps, data set folders and hub ids."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import datasets
import pytest

from unisono.data.source.files import expand
from unisono.data.source.names import expand_braces, kind_of
from unisono.data.source.raw import parse
from unisono.data.source.read import read_records
from unisono.errors import DataError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("b.jsonl", "a.jsonl", "s-08.tar", "s-09.tar", "s-10.tar", "deep/er/c.jsonl", "odd[1].jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"{}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("[ab].jsonl", ["a.jsonl", "b.jsonl"]),
        ("{b,a}.jsonl", ["b.jsonl", "a.jsonl"]),
        ("s-{08..10}.tar", ["s-08.tar", "s-09.tar", "s-10.tar"]),
        ("./**/*.jsonl", ["./a.jsonl", "./b.jsonl", "./deep/er/c.jsonl", "./odd[1].jsonl"]),
        ("odd[1].jsonl", ["odd[1].jsonl"]),
        ("{a,deep/*/?}.jsonl", ["a.jsonl", "deep/er/c.jsonl"]),
    ],
)
def test_patterns_stand_for_sorted_files(folder: Path, name: str, expected: list[str]) -> None:
    assert [file.name for file in expand([name])] == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("x{000..002}", ["x000", "x001", "x002"]),
        ("{9..11}", ["9", "10", "11"]),
        ("{3..1}{a,}", ["3a", "3", "2a", "2", "1a", "1"]),
        ("{a}", ["{a}"]),
        ("{1..x}", ["{1..x}"]),
    ],
)
def test_braces_stand_for_what_a_shell_takes_them_for(name: str, expected: list[str]) -> None:
    assert list(expand_braces(name)) == expected


def test_braces_for_too_many_names_are_refused() -> None:
    with pytest.raises(DataError, match=r"stand for 1,000,000,000 names"):
        expand(["x{1..1000000000}.jsonl"])


def test_all_that_is_wrong_is_told_at_once(folder: Path) -> None:
    (folder / "plain").mkdir()
    (folder / "c.docx").touch()
    os.mkfifo(folder / "p.jsonl")
    names = ["no.jsonl", "*.none", "plain", "c.docx", "ftp://x/a.jsonl", "s-{10..12}.tar", "p.jsonl", "hub://a/b", ""]
    with pytest.raises(DataError) as caught:
        expand(names)
    told = str(caught.value)
    for part in (
        "10 problems",
        "no.jsonl: the file does not exist",
        "*.none: no file matches",
        "plain: is a folder",
        "c.docx: files of the kind '.docx'",
        "ftp://x/a.jsonl: addresses of the kind ftp:// are not read",
        "s-11.tar: the file does not exist",
        "s-12.tar: the file does not exist",
        "p.jsonl: is not a file, but a pipe",
        "hub://a/b: the hub id is not complete",
        "an empty name",
    ):
        assert part in told


@pytest.mark.parametrize("names", [["a.jsonl", "a.jsonl"], ["a.jsonl", "*.jsonl"], ["a.jsonl", "deep/../a.jsonl"]])
def test_a_file_named_twice_is_refused(folder: Path, names: list[str]) -> None:
    with pytest.raises(DataError, match=r"a.jsonl: is named twice"):
        expand(names)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("A.JSONL.GZ", ("jsonl", "gzip")),
        ("a.b.csv.zst", ("csv", "zstd")),
        ("x.tgz", ("tar", "gzip")),
        ("https://h/a.parquet?x=a.json", ("parquet", "")),
        ("s3://b/k?.tsv", ("tsv", "")),
    ],
)
def test_kinds_are_told_by_suffixes(name: str, expected: tuple[str, str]) -> None:
    assert kind_of(name) == expected


def test_a_stamp_changes_with_the_file(folder: Path) -> None:
    (file,) = expand(["a.jsonl"])
    stamp = file.stamp()
    assert stamp is not None and str(folder) in stamp and file.stamp() == stamp
    (folder / "new").write_bytes(b"{}\n")
    os.utime(folder / "new", ns=(1, (folder / "a.jsonl").stat().st_mtime_ns))
    os.replace(folder / "new", folder / "a.jsonl")
    assert file.stamp() != stamp


def test_a_file_that_vanishes_is_named(folder: Path) -> None:
    (file,) = expand(["a.jsonl"])
    (folder / "a.jsonl").unlink()
    for action in (file.stamp, lambda: file.num_bytes, lambda: list(read_records(file))):
        with pytest.raises(DataError, match=r"a.jsonl: cannot be read: No such file"):
            action()


def test_a_dataset_folder_is_read(folder: Path) -> None:
    records = [{"messages": [{"role": "user", "content": str(i)}], "n": None} for i in range(700)]
    made = datasets.Dataset.from_list(records)
    made.filter(lambda row: row["messages"][0]["content"] != "3").save_to_disk("set")
    del records[3]
    (file,) = expand(["set"])
    digest = hashlib.sha256()
    raws = list(read_records(file, digest))
    assert [parse(raw).value for raw in raws] == records and raws[3].place == "row 4"
    contents = [path.read_bytes() for path in sorted((folder / "set").rglob("*")) if path.is_file()]
    assert digest.hexdigest() == hashlib.sha256(b"".join(contents)).hexdigest()
    assert raws[-1].end_bytes == file.num_bytes == sum(map(len, contents))
    stamp = file.stamp()
    (folder / "set/state.json").touch()
    assert file.stamp() != stamp
    assert [file.name for file in expand(["s*t"])] == ["set"]


def test_splits_must_be_named(folder: Path) -> None:
    part = datasets.Dataset.from_list([{"text": "a"}])
    datasets.DatasetDict({"train": part}).save_to_disk("one")
    datasets.DatasetDict({"train": part, "test": part}).save_to_disk("two")
    assert [raw.value for raw in read_records(expand(["one"])[0])] == [{"text": "a"}]
    assert [raw.value for raw in read_records(expand(["two/test"])[0])] == [{"text": "a"}]
    with pytest.raises(DataError, match=r"several splits: train, test[\s\S]*hint: .*two/train"):
        expand(["two"])


@pytest.mark.parametrize("spoilt", ["state.json", "dataset_info.json", "data-00000-of-00001.arrow"])
def test_a_damaged_dataset_folder_is_refused(folder: Path, spoilt: str) -> None:
    datasets.Dataset.from_list([{"text": "a"}]).save_to_disk("set")
    (folder / "set" / spoilt).write_bytes(b'{"x"')
    with pytest.raises(DataError, match="set: the data set cannot be loaded"):
        list(read_records(expand(["set"])[0]))


def test_a_hub_id_is_loaded_by_its_parts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def load_dataset(*names: object, **options: object) -> datasets.Dataset:
        asked.append((names, options))
        return datasets.Dataset.from_list([{"text": "007"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    commit = "0123456789abcdef" * 2 + "01234567"
    (file,) = expand([f"hub://owner/name?config=main&split=train&revision={commit}"])
    assert [raw.value for raw in read_records(file, hashlib.sha256())] == [{"text": "007"}]
    assert asked == [(("owner/name", "main"), {"split": "train", "revision": commit})]
    assert file.stamp() == file.name and expand(["hub://owner/name?split=x"])[0].stamp() is None
    (folder / "owner/name").mkdir(parents=True)
    with pytest.raises(DataError, match="a folder owner/name is here"):
        list(read_records(file))


def test_a_hub_that_cannot_be_reached_is_named(folder: Path) -> None:
    (file,) = expand(["hub://owner/name?split=train"])
    with pytest.raises(DataError, match=r"hub://owner/name\?split=train: the data set cannot be loaded"):
        list(read_records(file))


@pytest.mark.parametrize("name", ["hub://a/b/c?split=x", "hub://?split=x", "hub://a/b?split=x&code=1", "hub://a/b"])
def test_other_hub_ids_are_refused(name: str) -> None:
    with pytest.raises(DataError, match="the form is hub://owner/name"):
        expand([name])


def test_names_of_columns_and_values_survive(folder: Path) -> None:
    (folder / "x.json").write_text(json.dumps([{"a b": "\u2028"}]))
    assert [parse(raw).value for raw in read_records(expand(["x.json"])[0])] == [{"a b": "\u2028"}]


@pytest.mark.parametrize("at", [0, 325_000, 599_999])
def test_a_sketch_is_of_the_whole_file(at: int, folder: Path) -> None:
    path = folder / "big.jsonl"
    path.write_bytes(bytes(600_000))
    (file,) = expand(["big.jsonl"])
    before = file.sketch()
    assert before == file.sketch()
    content = bytearray(600_000)
    content[at : at + 8000] = b"x" * min(8000, 600_000 - at)
    path.write_bytes(content)
    assert file.sketch() != before


@pytest.mark.parametrize("size", [1, 4096, 100_000, 262_143])
def test_every_byte_of_a_small_file_is_in_its_sketch(size: int, folder: Path) -> None:
    path = folder / "small.jsonl"
    path.write_bytes(bytes(size))
    (file,) = expand(["small.jsonl"])
    seen = {file.sketch()}
    for at in {0, size // 3, size // 2, size - 1}:
        content = bytearray(size)
        content[at] = 1
        path.write_bytes(content)
        seen.add(file.sketch())
    path.write_bytes(bytes(size + 1))
    seen.add(file.sketch())
    assert len(seen) == 2 + len({0, size // 3, size // 2, size - 1})
