"""Every form of data: what is read, where what is wrong stands, and that the digest is the file's."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import pickle
import sys
import tarfile
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.forms import PACK, WRITE, json_lines, parquet, shard, tar, zstd
from unisono.data.source.files import SourceFile, expand
from unisono.data.source.raw import MAX_RECORD_BYTES, Raw, parse
from unisono.data.source.read import read_records
from unisono.errors import DataError, OutputError

THREE: list[dict[str, object]] = [{"text": "eins"}, {"text": 'zwölf, "x"\nund'}, {"text": "007"}]


def write(folder: Path, name: str, content: bytes) -> SourceFile:
    (folder / name).write_bytes(content)
    return expand([str(folder / name)])[0]


def read(file: SourceFile, limit_bytes: int = MAX_RECORD_BYTES) -> list[Raw]:
    return [parse(raw) for raw in read_records(file, limit_bytes=limit_bytes)]


@pytest.mark.parametrize("packing", list(PACK))
@pytest.mark.parametrize("kind", list(WRITE))
def test_every_form_gives_the_records_and_the_digest_of_the_file(kind: str, packing: str, tmp_path: Path) -> None:
    content = PACK[packing](WRITE[kind](THREE))
    file = write(tmp_path, f"data.{kind}{packing}", content)
    digest = hashlib.sha256()
    raws = list(read_records(file, digest, scratch=tmp_path))
    assert [parse(pickle.loads(pickle.dumps(raw))).value for raw in raws] == THREE
    assert digest.hexdigest() == hashlib.sha256(content).hexdigest()
    assert 0.9 * len(content) < raws[-1].end_bytes <= len(content) == file.num_bytes
    assert [path.name for path in tmp_path.iterdir()] == [f"data.{kind}{packing}"]
    assert [raw.value for raw in read(file)] == THREE


@pytest.mark.parametrize("packing", list(PACK))
def test_a_text_file_is_one_record(packing: str, tmp_path: Path) -> None:
    content = PACK[packing]("\ufeffein\r\nText\n".encode())
    file = write(tmp_path, "a.txt" + packing, content)
    digest = hashlib.sha256()
    (raw,) = read_records(file, digest)
    assert raw.value == {"text": "ein\r\nText\n"} and digest.hexdigest() == hashlib.sha256(content).hexdigest()
    (raw,) = read(file, limit_bytes=5)
    assert raw.value is None and "longer than 5 bytes" in raw.problem and "JSON Lines" in raw.problem
    (raw,) = read(write(tmp_path, "b.txt", b"z\xfcrich"))
    assert "not UTF-8: byte 0xfc at byte 2" in raw.problem


def test_a_table_gives_texts_and_the_line_where_a_row_begins(tmp_path: Path) -> None:
    content = b'\xef\xbb\xbfid,text\r\n007,"a\nb"\r\n\r\n1\n2,z\xfc\n3,\n4,5,6\n"5","say ""x"""\n'
    raws = read(write(tmp_path, "a.csv", content))
    assert [(raw.place, raw.value) for raw in raws] == [
        ("2", {"id": "007", "text": "a\nb"}),
        ("5", None),
        ("6", None),
        ("7", {"id": "3", "text": ""}),
        ("8", None),
        ("9", {"id": "5", "text": 'say "x"'}),
    ]
    assert raws[1].problem == "the number of fields is 1, and the header names 2"
    assert "0xfc" in raws[2].problem and "is 3, and the header names 2" in raws[4].problem


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"a,a\n1,2\n", r"a.csv:1: the header names 'a' twice"),
        (b"a,\n1,2\n", r"a.csv:1: field 2 of the header has no name"),
        (b"a;b\n1;2\n", r"a.csv:1: .*separated by ';'; ',' is needed"),
        (b'a,b\n1,2\n"x,1\n2,3\n', r"a.csv:3: the quotes"),
        (b'a,b\n1,2\n"x"y,1\n', r"a.csv:3: the quotes"),
        (b"a,b\n1,\xfe\rx\n", r"a.csv:2: the quotes or line ends"),
        (b'a,b\n1,"' + b"x\n" * 600, r"a.csv:2: the row that begins here is longer than 1,000 bytes"),
    ],
)
def test_a_table_that_is_uncertain_is_refused(content: bytes, told: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=told):
        read(write(tmp_path, "a.csv", content), limit_bytes=1000)


def test_parquet_gives_nested_records_and_rows(tmp_path: Path) -> None:
    records = [{"messages": [{"role": "user", "content": str(i)}], "n": i, "x": None, "ok": True} for i in range(5)]
    raws = read(write(tmp_path, "a.parquet", parquet(records)))  # type: ignore[arg-type]
    assert [raw.value for raw in raws] == records
    assert [raw.place for raw in raws] == [f"row {i}" for i in range(1, 6)]
    raws = read(write(tmp_path, "b.parquet", parquet([{"t": "a"}, {"t": "x" * 2000}, {"t": "b"}])), limit_bytes=1000)
    assert [raw.value for raw in raws] == [{"t": "a"}, None, {"t": "b"}] and "1,000 bytes" in raws[1].problem


def test_parquet_columns_that_json_has_not_are_named(tmp_path: Path) -> None:
    columns = pa.table({"t": ["a"], "d": pa.array([1], pa.date32()), "b": pa.array([[b"x"]], pa.list_(pa.binary()))})
    with pytest.raises(DataError, match=r"a.parquet: .*'d' is date32\[day\]; 'b' is list<.*binary>"):
        read(write(tmp_path, "a.parquet", parquet(columns)))
    spoilt = pa.StringArray.from_buffers(
        2, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pa.py_buffer(b"a\xff"), None, 0, 0
    )
    raws = read(write(tmp_path, "c.parquet", parquet(pa.table({"t": spoilt}))))
    assert raws[0].value == {"t": "a"} and raws[1].place == "row 2" and "not UTF-8: byte 0xff" in raws[1].problem


@pytest.mark.parametrize("cut", [4, 100, -1, -8, -20])
def test_torn_parquet_is_refused(cut: int, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a.parquet: "):
        read(write(tmp_path, "a.parquet", parquet(THREE)[:cut]))


LONG = "folder/" * 30 + "x" * 90


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_shards_group_members_as_webdataset_does(form: int, tmp_path: Path) -> None:
    members = {
        "a/0.1/000.jpg": b"\xff",
        "a/0.1/000.json": b'{"text": "json"}',
        "a/0.1/001.txt": "ü".encode(),
        "a/0.1/002.jpg": b"x" * 513,
        "a/0.1/002.seg.json": b"{}",
        "a/0.1/003.JSON": b"{}",
        "a/0.1/003.txt": b"caption",
        "a/0.1/004.json": b"[1]",
        "a/0.1/005.txt": b"\xff",
        "README": b"hi",
        "__meta__.json": b"{}",
        "a/.json": b"{}",
        "a/006.json": b'{"text": "%s"}' % (b"x" * 2000),
    }
    if form != tarfile.USTAR_FORMAT:
        members[LONG + ".json"] = b'{"text": "long"}'
    raws = read(write(tmp_path, "a.tar", tar(members, form)), limit_bytes=1000)
    found = {raw.place: (raw.value or {}).get("text") or raw.problem for raw in raws}
    assert found.pop(LONG + ".json", "long") == "long"
    assert found == {
        "a/0.1/000.json": "json",
        "a/0.1/001.txt": "ü",
        "a/0.1/002": "the sample has neither a json nor a txt member (it has: jpg, seg.json)",
        "a/0.1/003": "the sample has 003.JSON and 003.txt; which one is the record is not clear",
        "a/0.1/004.json": "is a list, not an object",
        "a/0.1/005.txt": "is not UTF-8: byte 0xff at byte 1 of the record",
        "a/006.json": "is longer than 1,000 bytes, the most that one record may have",
    }


def test_links_in_a_shard_are_not_followed(tmp_path: Path) -> None:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for i, kind in enumerate((tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE)):
            info = tarfile.TarInfo(f"{i}.json")
            info.type, info.linkname = kind, "/etc/passwd"
            archive.addfile(info)
    raws = read(write(tmp_path, "a.tar", file.getvalue()))
    assert [raw.place for raw in raws] == ["0.json", "1.json", "2.json"]
    assert all("is a link" in raw.problem for raw in raws)


def test_every_cut_of_a_shard_is_told(tmp_path: Path) -> None:
    """Also where the standard library's reader sees an end: between members, and at a damaged header."""
    whole = shard(THREE)
    end = 6 * 512
    assert len(read(write(tmp_path, "a.tar", whole))) == 3
    for cut in [*range(0, end, 128), end]:
        raws: list[Raw] = []
        with pytest.raises(DataError, match=r"a.tar: the tar archive is cut off"):
            raws.extend(read_records(write(tmp_path, "a.tar", whole[:cut])))
    spoilt = bytearray(whole)
    spoilt[1024 + 3] ^= 1
    with pytest.raises(DataError, match=r"damaged: a header's checksum is wrong \(after its member 000000.json\)"):
        read(write(tmp_path, "a.tar", bytes(spoilt)))
    with pytest.raises(DataError, match="something follows the end mark"):
        read(write(tmp_path, "a.tar", whole + whole))


@pytest.mark.parametrize("packing", [".gz", ".zst"])
def test_archives_of_several_parts_cut_or_damaged(packing: str, tmp_path: Path) -> None:
    pack = PACK[packing]
    parts = pack(json_lines(THREE[:1])) + pack(b"") + pack(json_lines(THREE[1:]))
    name = f"a.jsonl{packing}"
    assert [raw.value for raw in read(write(tmp_path, name, parts))] == THREE
    many = json_lines([{"text": hashlib.sha256(bytes([i % 256, i // 256])).hexdigest()} for i in range(60_000)])
    whole = pack(many)
    raws: list[Raw] = []
    records = read_records(write(tmp_path, name, whole[:-9]))
    with pytest.raises(DataError, match=rf"{name}: the .* archive is cut off after"):
        raws.extend(records)
    assert len(raws) > 10_000 and all(parse(raw).value for raw in raws)
    for cut in (1, 3, 12, len(parts) - 1):
        with pytest.raises(DataError, match="cut off"):
            read(write(tmp_path, name, parts[:cut]))
    with pytest.raises(DataError, match=r"follows the archive"):
        read(write(tmp_path, name, whole + b"garbage"))
    spoilt = bytearray(whole)
    spoilt[len(spoilt) // 2] ^= 0xFF
    with pytest.raises(DataError, match=r"is damaged"):
        read(write(tmp_path, name, bytes(spoilt)))
    with pytest.raises(DataError, match=r"is no .* archive"):
        read(write(tmp_path, name, json_lines(THREE)))


def test_gzip_padded_with_zeros_is_read(tmp_path: Path) -> None:
    assert len(read(write(tmp_path, "a.jsonl.gz", gzip.compress(json_lines(THREE)) + bytes(3000)))) == 3


def test_zstandard_frames_to_be_skipped_are_skipped(tmp_path: Path) -> None:
    skipped = b"\x5a*M\x18\x05\0\0\0hello"
    content = skipped + zstd.compress(json_lines(THREE)) + skipped
    assert [raw.value for raw in read(write(tmp_path, "a.jsonl.zst", content))] == THREE


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.jsonl", gzip.compress(b"{}"), r"is a gzip archive; .*needed[\s\S]*\.gz"),
        ("a.csv", zstd.compress(b"{}"), r"is a zstandard archive"),
        ("a.jsonl", parquet(THREE), r"is a Parquet file[\s\S]*\.parquet"),
        ("a.parquet", b"{}\n", r"no Parquet file"),
        ("a.parquet", b"", r"no Parquet file"),
        ("a.txt", "x".encode("utf-16"), r"is UTF-16; text in UTF-8 is needed"),
        ("a.csv.gz", gzip.compress("x".encode("utf-16-le")), r"UTF-16"),
        ("a.tar", gzip.compress(shard(THREE)), r"is a gzip archive"),
        ("a.jsonl", shard(THREE), r"is a tar archive"),
        ("a.jsonl.gz", gzip.compress(gzip.compress(b"{}")), r"is a gzip archive"),
        ("a.txt", bz2.compress(b"x"), r"bzip2"),
    ],
)
def test_content_that_is_not_what_the_name_says(name: str, content: bytes, told: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=told):
        read(write(tmp_path, name, content))


@pytest.mark.parametrize("packing", [".gz", ".zst"])
def test_memory_stays_bounded(packing: str, tmp_path: Path) -> None:
    line = json.dumps({"text": "x" * 1000}).encode() + b"\n"
    file = write(tmp_path, f"a.jsonl{packing}", PACK[packing](line * 50_000))
    tracemalloc.start()
    num_bytes = sum(len(raw.text or b"") for raw in read_records(file))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert num_bytes == 50_000 * len(line) and peak < 8 * 2**20


@pytest.mark.parametrize(
    ("module", "name", "extra"),
    [
        ("pyarrow", "a.parquet", "parquet"),
        (zstd.__name__, "a.jsonl.zst", "zstd"),
        ("datasets", "hub://a/b?split=train", "datasets"),
        ("aiohttp", "https://127.0.0.1:9/a.jsonl", "remote"),
        ("s3fs", "s3://b/a.jsonl", "s3"),
        ("gcsfs", "gs://b/a.jsonl", "gcs"),
    ],
)
def test_a_missing_library_is_named_with_its_command(
    module: str, name: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for local, content in (("a.parquet", parquet(THREE)), ("a.jsonl.zst", zstd.compress(b"{}"))):
        (tmp_path / local).write_bytes(content)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DataError, match=rf"needs the package {module}, [\s\S]*pip install 'unisono\[{extra}\]'"):
        list(read_records(expand([name])[0]))


_texts = st.text(st.characters(codec="utf-8", exclude_characters="\r\0"), max_size=12)


@settings(max_examples=40)
@given(
    rows=st.lists(st.tuples(_texts, _texts), min_size=1, max_size=5),
    kind=st.sampled_from(sorted(WRITE)),
    packing=st.sampled_from(sorted(PACK)),
)
def test_what_was_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]], kind: str, packing: str
) -> None:
    records: list[dict[str, object]] = [{"prompt": prompt, "completion": answer} for prompt, answer in rows]
    folder = tmp_path_factory.mktemp("source")
    file = write(folder, f"a.{kind}{packing}", PACK[packing](WRITE[kind](records)))
    assert [raw.value for raw in read(file)] == records


def test_no_room_to_unpack_is_told(tmp_path: Path) -> None:
    file = write(tmp_path, "a.json.gz", gzip.compress(b"[]"))
    with pytest.raises(OutputError, match=r"nowhere: a file that must be unpacked .* No such file"):
        list(read_records(file, scratch=tmp_path / "nowhere"))
