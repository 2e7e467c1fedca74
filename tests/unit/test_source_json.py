"""The source's JSON: encodings, line endings, what is no record, huge lines, arrays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.data.source.files import expand
from unisono.data.source.raw import MAX_RECORD_BYTES, Raw, parse
from unisono.data.source.read import read_records
from unisono.errors import DataError

BOM = b"\xef\xbb\xbf"


def write(folder: Path, content: bytes, name: str = "data.jsonl") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def read(path: Path, limit_bytes: int = MAX_RECORD_BYTES) -> list[Raw]:
    (file,) = expand([str(path)])
    return [parse(raw) for raw in read_records(file, limit_bytes=limit_bytes)]


def values(path: Path) -> list[object]:
    return [raw.value for raw in read(path)]


def lines(*records: object) -> bytes:
    return b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records)


THREE = ({"text": "eins"}, {"text": "zwölf"}, {"text": "三"})


@pytest.mark.parametrize("name", ["data.jsonl", "data.json", "DATA.JSONL", "data.ndjson"])
def test_b32_mark_at_the_start_is_dropped(tmp_path: Path, name: str) -> None:
    assert values(write(tmp_path, BOM + lines(*THREE), name)) == list(THREE)
    assert values(write(tmp_path, lines(*THREE), name)) == list(THREE)


def test_b32_mark_elsewhere_is_kept(tmp_path: Path) -> None:
    assert values(write(tmp_path, lines({"text": "\ufeffa"}))) == [{"text": "\ufeffa"}]
    second = read(write(tmp_path, lines({"text": "a"}) + BOM + lines({"text": "b"})))
    assert second[1].value is None and second[1].place == "2"


@pytest.mark.parametrize(
    ("encoding", "named"),
    [("utf-16", "UTF-16"), ("utf-16-le", "UTF-16"), ("utf-16-be", "UTF-16"), ("utf-32", "UTF-32")],
)
def test_b32_other_encodings_are_refused_by_name(tmp_path: Path, encoding: str, named: str) -> None:
    path = write(tmp_path, '{"text": "a"}\n'.encode(encoding))
    with pytest.raises(DataError, match=f"data.jsonl.*{named}"):
        values(path)


def test_b32_latin1_is_named_with_its_line(tmp_path: Path) -> None:
    bad = read(write(tmp_path, b'{"text": "a"}\n{"text": "z\xfcrich"}\n'))[1]
    assert (bad.place, bad.value) == ("2", None)
    assert "not UTF-8" in bad.problem and "0xfc" in bad.problem


def test_b32_the_locale_plays_no_part(tmp_path: Path) -> None:
    path = write(tmp_path, lines(*THREE))
    code = (
        "import sys, json; from unisono.data.source.raw import parse;"
        "from unisono.data.source.read import read_records;"
        "from unisono.data.source.files import expand;"
        "print(json.dumps([parse(raw).value for raw in read_records(expand(sys.argv[1:])[0])]))"
    )
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    answer = subprocess.run([sys.executable, "-c", code, str(path)], env=environment, capture_output=True, check=True)
    assert json.loads(answer.stdout) == list(THREE)


def test_b33_lines_of_every_kind(tmp_path: Path) -> None:
    content = (
        b'{"text": "crlf"}\r\n'
        b"\r\n"
        b"   \t \n" + '{"text": "a\u2028b\u0085c\u2029d"}\n'.encode() + b'{"text": "\\ud83d\\ude00"}\n'
        b'{"text": "\\ud83d alone"}\n'
        b"[1,2]\n"
        b'{"text": "cut in ha\n'
        b'{"text": "last"}'
    )
    raws = read(write(tmp_path, content))
    good = {int(raw.place): raw.value["text"] for raw in raws if raw.value is not None}
    assert good == {1: "crlf", 4: "a\u2028b\u0085c\u2029d", 5: "😀", 9: "last"}
    bad = {int(raw.place): raw.problem for raw in raws if raw.value is None}
    assert list(bad) == [6, 7, 8]
    assert "surrogate" in bad[6] and "a list, not an object" in bad[7] and "not valid JSON" in bad[8]


@pytest.mark.parametrize("value", ["1", '"a"', "null", "true", "[]"])
def test_what_is_no_object_is_reported(tmp_path: Path, value: str) -> None:
    (raw,) = read(write(tmp_path, value.encode()))
    assert raw.value is None and "not an object" in raw.problem


def test_b35_one_enormous_line(tmp_path: Path) -> None:
    small = [{"text": f"small {i}"} for i in range(10)]
    path = write(tmp_path, lines(*small[:5], {"text": "x" * 8_000_000}, *small[5:]))
    tracemalloc.start()
    began = time.monotonic()
    found = [len(raw.value["text"]) for raw in read(path) if raw.value]
    seconds, peak = time.monotonic() - began, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == [7] * 5 + [8_000_000] + [7] * 5
    assert seconds < 5 and peak < 10 * 8_000_000


@pytest.mark.parametrize("text", ["\\ud800", "NaN", "cut"])
def test_b35_a_large_line_is_judged_like_a_small_one(tmp_path: Path, text: str) -> None:
    value = {"\\ud800": '"\\ud800"', "NaN": "NaN", "cut": '"cut'}[text]
    for size in (10, 2_000_000):
        line = f'{{"text": "{"x" * size}", "more": {value}}}'.encode()
        (raw,) = read(write(tmp_path, line))
        assert raw.value is None
        assert ("surrogate" if text == "\\ud800" else "not valid JSON") in raw.problem


@pytest.mark.parametrize("name", ["data.jsonl", "data.json"])
def test_b35_above_the_limit_is_named_and_bounded(tmp_path: Path, name: str) -> None:
    records = [{"text": "a"}, {"text": "x" * 3_000_000}, {"text": "b"}]
    as_array = b"[\n" + b",\n".join(lines(record).strip() for record in records) + b"\n]"
    for content, line in [(lines(*records), 2), (as_array, 3)]:
        if content is as_array and name == "data.jsonl":
            continue
        path = write(tmp_path, content, name)
        tracemalloc.start()
        raws = read(path, limit_bytes=100_000)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert [raw.value for raw in raws] == [records[0], None, records[2]]
        assert raws[1].place == str(line) and "100,000 bytes" in raws[1].problem
        assert peak < 3_000_000


def test_arrays_give_the_line_of_each_record(tmp_path: Path) -> None:
    content = b'\n[\n {"text": "a]}[{\\""},\n\n {"text":\n "b"}, {"c": [1, {"d": []}]},\n 5, [{}], {"x": tru}\n]\n'
    raws = read(write(tmp_path, content, "data.json"))
    assert [(int(raw.place), raw.value) for raw in raws] == [
        (3, {"text": 'a]}[{"'}),
        (5, {"text": "b"}),
        (6, {"c": [1, {"d": []}]}),
        (7, None),
        (7, None),
        (7, None),
    ]


@pytest.mark.parametrize("content", [b"[]", b" [ ] \n", b"", b"\n"])
def test_empty_files_have_no_records(tmp_path: Path, content: bytes) -> None:
    assert values(write(tmp_path, content, "data.json")) == []


@pytest.mark.parametrize("content", [b'[{"a": 1}', b'[{"a": 1},', b'[{"a": "', b'[{"a": [', b"[", b'[{"a": 1}, "x'])
def test_a_torn_array_is_reported(tmp_path: Path, content: bytes) -> None:
    raws = read(write(tmp_path, content, "data.json"))
    assert raws[-1].value is None and "cut off" in raws[-1].problem and raws[-1].place == "1"


@pytest.mark.parametrize("content", [b"[,{}]", b"[{} {}]", b"[{}] x", b"[{}],"])
def test_a_malformed_array_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(DataError, match=r"data\.json:1"):
        read(write(tmp_path, content, "data.json"))


def test_an_array_in_a_jsonl_file_gets_a_hint(tmp_path: Path) -> None:
    raw = read(write(tmp_path, b'[\n{"text": "a"}\n]\n'))[0]
    assert "must be named .json" in raw.problem


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [("a.parquet", b"PAR1", "parquet"), ("a.jsonl", b"\x1f\x8b\x08", "gzip"), ("a.json", b"PK\x03\x04", "zip")],
)
def test_other_kinds_of_file_are_named(tmp_path: Path, name: str, content: bytes, named: str) -> None:
    with pytest.raises(DataError, match=named):
        values(write(tmp_path, content, name))


_texts = st.text(st.characters(codec="utf-8"), max_size=20)
_records = st.lists(
    st.dictionaries(_texts, st.recursive(_texts | st.integers(-9, 9) | st.none(), st.lists, max_leaves=4), max_size=3),
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(records=_records, indent=st.sampled_from([None, 1]), is_ascii=st.booleans())
def test_what_was_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, records: list[dict[str, object]], indent: int | None, is_ascii: bool
) -> None:
    folder = tmp_path_factory.mktemp("read")
    array = json.dumps(records, indent=indent, ensure_ascii=is_ascii).encode()
    assert values(write(folder, array, "a.json")) == records
    assert values(write(folder, lines(*records))) == records


@settings(max_examples=60, deadline=None)
@given(content=st.binary(max_size=60), is_array=st.booleans())
def test_any_bytes_give_records_or_reasons(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, is_array: bool
) -> None:
    path = write(tmp_path_factory.mktemp("read"), (b"[" if is_array else b"") + content, "a.json")
    try:
        raws = read(path)
    except DataError as refusal:
        error = refusal
    else:
        assert all(isinstance(raw, Raw) and (raw.value is None) == bool(raw.problem) for raw in raws)
        return
    assert error.where is not None and str(path) in error.where
