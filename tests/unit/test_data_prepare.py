"""Preparation: every record accounted for, errors before training, stores found by their content."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unisono.config.schema import DataSection
from unisono.data import build as building
from unisono.data import digests, progress
from unisono.data import prepare as preparing
from unisono.data.prepare import Prepared, prepare
from unisono.data.source.files import SourceFile
from unisono.data.source.read import read_records
from unisono.data.store import TokenStore, open_store
from unisono.errors import DataError, ModelError, OutputError


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The byte tokenizer without a chat template: a prompt/completion record has exactly its characters + 1 tokens."""
    from support.tiny import save_tokenizer

    return save_tokenizer(tmp_path_factory.mktemp("plain"), chat_template=None)


def pair(prompt: str, completion: str) -> dict[str, str]:
    return {"prompt": prompt, "completion": completion}


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    return path


class Bench:
    """A folder with files, a cache and the settings of one test."""

    def __init__(self, folder: Path, tokenizer: Path) -> None:
        self.folder, self.tokenizer = folder, tokenizer
        self.said: list[str] = []

    def file(self, *records: object, name: str = "a.jsonl") -> str:
        return str(write(self.folder / name, *records))

    def prepare(self, *files: str, max_length: int = 100, **settings: Any) -> Prepared:
        data = DataSection(train=list(files), cache_dir=str(self.folder / "cache"), **settings)
        return prepare(data, self.tokenizer, max_length=max_length, progress=self.said.append)

    def stores(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "cache" / "stores").glob("*") if path.is_dir())


@pytest.fixture
def bench(tmp_path: Path, plain: Path) -> Bench:
    return Bench(tmp_path, plain)


def test_samples_keep_the_source_order_over_files(bench: Bench) -> None:
    files = bench.file(pair("a", "1"), pair("bb", "22")), bench.file(pair("c", "333"), name="b.jsonl")
    prepared = bench.prepare(*files)
    assert prepared.format == "prompt_completion" and prepared.validation == {}
    store = prepared.train
    assert len(store) == 3 and store.record.tolist() == [0, 1, 2]
    assert (store.lengths.tolist(), store.num_targets.tolist()) == ([3, 5, 5], [2, 3, 4])
    assert (store.lengths.dtype, store.num_targets.dtype, store.record.dtype) == (np.int64,) * 3
    ids, is_target = store.sample(1)
    assert (ids.tolist(), is_target.tolist()) == ([98, 98, 50, 50, 257], [False, False, True, True, True])
    assert (ids.dtype, is_target.dtype) == (np.int32, np.bool_)
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 1


def test_b23_a_sample_that_lost_its_answer_is_dropped_and_named(bench: Bench) -> None:
    too_long, fits = pair("p" * 20, "abcd"), pair("p" * 4, "abcd")
    prepared = bench.prepare(bench.file(too_long, fits), max_length=16)
    assert prepared.train.record.tolist() == [1] and prepared.train.num_targets.tolist() == [5]
    text = "\n".join(prepared.messages)
    assert "1 kept, 1 dropped" in text
    assert f"{bench.folder / 'a.jsonl'}:1: 25 tokens, and data.max_length is 16" in text


@pytest.mark.parametrize("overlong", ["drop", "error"])
def test_b23_only_samples_without_room_for_the_answer_stop_before_training(bench: Bench, overlong: str) -> None:
    path = bench.file(pair("p" * 20, "abcd"), pair("p" * 20, "efgh"))
    with pytest.raises(DataError, match=r"max_length") as caught:
        bench.prepare(path, max_length=16, overlong=overlong)
    assert ("no sample is left" in str(caught.value)) == (overlong == "drop")
    assert bench.stores() == []


def test_overlong_error_names_every_record(bench: Bench) -> None:
    path = bench.file(pair("p" * 20, "abcd"), pair("p", "a"), pair("p" * 30, "a"))
    with pytest.raises(DataError, match=r"2 of 3 records are too long") as caught:
        bench.prepare(path, max_length=16, overlong="error")
    assert f"{path}:1: 25 tokens" in str(caught.value) and f"{path}:3: 32 tokens" in str(caught.value)


def test_b25_every_token_and_record_is_accounted_for(bench: Bench) -> None:
    # Lengths 4, 2, 3, 1 and at most 3: a text of n - 1 characters has n tokens, an end token included.
    path = bench.file(*({"text": text} for text in ("abc", "a", "ab", "<eos>")))
    counts = (prepared := bench.prepare(path, max_length=3)).counts
    assert counts.records == counts.kept + counts.dropped_overlong + counts.dropped_no_target + counts.skipped_bad == 4
    assert (counts.kept, counts.dropped_overlong, counts.dropped_no_target) == (2, 1, 1)
    assert counts.tokens + counts.dropped_tokens == 10
    assert prepared.train.record.tolist() == [1, 2] and prepared.train.lengths.tolist() == [2, 3]
    text = "\n".join(prepared.messages)
    assert "lost 50.0% of the records and 50.0% of the tokens" in text
    assert f"{path}:4: no target" in text


def test_b26_zero_samples_after_filtering_name_the_counts(bench: Bench) -> None:
    path = bench.file(pair("p" * 20, "abcd"), {"prompt": "x"})
    with pytest.raises(DataError) as caught:
        bench.prepare(path, max_length=16, on_error="skip")
    text = str(caught.value)
    assert "2 records: 0 kept, 1 dropped (1 longer than data.max_length), 1 skipped as bad; 0 samples" in text
    assert bench.stores() == []


@pytest.mark.parametrize("content", ["", "\n\n", "[1]\n"])
def test_b26_files_without_a_record_are_refused(bench: Bench, content: str) -> None:
    path = bench.folder / "a.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match="0 samples"):
        bench.prepare(str(path))


def test_b32_mark_and_line_ends_do_not_change_the_ids(bench: Bench) -> None:
    records = [pair("größe", "三"), pair("b", "c")]
    content = "".join(f"{json.dumps(record, ensure_ascii=False)}\n" for record in records)
    found = []
    for name, mark, end in [("a", "", "\n"), ("b", "\ufeff", "\n"), ("c", "\ufeff", "\r\n")]:
        path = bench.folder / f"{name}.jsonl"
        path.write_bytes((mark + content.replace("\n", end)).encode())
        store = bench.prepare(str(path)).train
        found.append([store.sample(i)[0].tolist() for i in range(2)])
    assert found[0] == found[1] == found[2]


BAD_FILE = (
    b'{"text": "a"}\n{"text": "\\ud800"}\n[1,2]\n\n{"text": "cut\n{"prompt": "x", "completion": "y"}\n{"text": "b"}'
)


def test_b33_strict_stops_and_reports_all_bad_records_at_once(bench: Bench) -> None:
    path = bench.folder / "a.jsonl"
    path.write_bytes(BAD_FILE)
    with pytest.raises(DataError, match=r"4 of 6 records cannot be used") as caught:
        bench.prepare(str(path))
    places = [line.split(": ")[0].strip() for line in str(caught.value).splitlines()[1:5]]
    assert places == [f"{path}:{line}" for line in (2, 3, 5, 6)]
    assert "data.on_error=skip" in str(caught.value)
    assert bench.stores() == []


def test_b33_a_long_list_of_bad_records_is_cut(bench: Bench) -> None:
    path = bench.file({"text": "a"}, *([{"text": ""}] * 30))
    with pytest.raises(DataError, match=r"30 of 31[\s\S]*a\.jsonl:21: [\s\S]*\.\.\. and 10 more"):
        bench.prepare(path)


def test_b33_lenient_skips_up_to_the_allowed_number_and_lists_them(bench: Bench) -> None:
    path = bench.folder / "a.jsonl"
    path.write_bytes(BAD_FILE)
    prepared = bench.prepare(str(path), on_error="skip", max_skipped=4)
    assert prepared.train.record.tolist() == [0, 5] and prepared.counts.skipped_bad == 4
    listed = (prepared.train.folder.parent / "left_out.jsonl").read_text().splitlines()
    assert [json.loads(line)["place"] for line in listed] == [f"{path}:{line}" for line in (2, 3, 5, 6)]
    with pytest.raises(DataError, match=r"more than data\.max_skipped = 3[\s\S]*a\.jsonl:6"):
        bench.prepare(str(path), on_error="skip", max_skipped=3)


def test_b35_a_huge_record_is_dropped_and_counted(bench: Bench) -> None:
    path = bench.file(*({"text": f"small {i}"} for i in range(10)), {"text": "x" * 8_000_000})
    prepared = bench.prepare(path)
    assert (prepared.counts.kept, prepared.counts.dropped_overlong) == (10, 1)
    assert f"{path}:11: more than " in "\n".join(prepared.messages)


def test_a_record_of_another_shape_is_named(bench: Bench) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl:2: .*not of the shape prompt_completion"):
        bench.prepare(bench.file(pair("a", "b"), {"text": "c"}))
    with pytest.raises(DataError, match=r"a\.jsonl:1: .*not of the shape text"):
        bench.prepare(bench.file(pair("a", "b")), format="text")


def test_what_is_missing_is_named(bench: Bench, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.jsonl: the file does not exist"):
        bench.prepare(str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(DataError, match="is a folder"):
        bench.prepare(str(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="no tokenizer"):
        Bench(tmp_path, tmp_path / "empty").prepare(bench.file(pair("a", "b")))
    (tmp_path / "taken").write_text("")
    data = DataSection(train=[bench.file(pair("a", "b"))], cache_dir=str(tmp_path / "taken"))
    with pytest.raises(OutputError, match=r"taken[\s\S]*data\.cache_dir"):
        prepare(data, bench.tokenizer, max_length=10, progress=bench.said.append)


def _records(store: TokenStore) -> list[int]:
    return store.record[np.arange(len(store))].tolist()


def _sides(prepared: Prepared) -> dict[int, str]:
    held_out = prepared.validation[""]
    return dict.fromkeys(_records(prepared.train), "train") | dict.fromkeys(_records(held_out), "val")


def test_the_validation_side_of_a_record_depends_on_its_content_alone(bench: Bench) -> None:
    records = [pair(f"question {i}", str(i)) for i in range(200)]
    prepared = bench.prepare(bench.file(*records), validation=0.2)
    sides = _sides(prepared)
    num_held_out = list(sides.values()).count("val")
    assert prepared.counts.kept_validation == num_held_out
    assert any(f"{num_held_out} of the kept ones are for validation" in line for line in prepared.messages)
    assert sorted(sides) == list(range(200)) and 20 <= list(sides.values()).count("val") <= 60
    more = _sides(bench.prepare(bench.file(pair("new", "x"), *records, name="b.jsonl"), validation=0.2))
    assert all(more[i + 1] == side for i, side in sides.items())
    twice = _sides(bench.prepare(bench.file(*records, *records, name="c.jsonl"), validation=0.2))
    assert all(twice[i] == twice[i + 200] == side for i, side in sides.items())


def test_a_share_that_leaves_a_side_empty_is_refused(bench: Bench) -> None:
    with pytest.raises(DataError, match=r"data\.validation = 0\.01 of 3 samples leaves none for validation"):
        bench.prepare(bench.file(*(pair("q", str(i)) for i in range(3))), validation=0.01)


def test_validation_files_are_a_store_of_their_own(bench: Bench) -> None:
    train, held_out = bench.file(pair("a", "b"), pair("c", "d")), bench.file({"text": "e"}, name="v.jsonl")
    prepared = bench.prepare(train, validation=[held_out])
    assert (len(prepared.train), len(prepared.validation[""])) == (2, 1)
    assert prepared.counts.records == 2 and any(line.startswith("validation: 1 records") for line in prepared.messages)
    assert len(bench.stores()) == 2


def test_a_store_is_found_by_content_and_settings(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    path = bench.file(pair("a", "b"), pair("c" * 20, "d"), pair("e", "f"))
    first = bench.prepare(path, max_length=10)
    built: list[str] = []

    def build(*args: Any, **settings: Any) -> tuple[str, list[str]]:
        key, hashes = building.build(*args, **settings)
        built.append(key)
        return key, hashes

    monkeypatch.setattr(preparing, "build", build)
    Path(path).rename(bench.folder / "renamed.jsonl")
    path = str(bench.folder / "renamed.jsonl")
    again = bench.prepare(path, max_length=10)
    assert again.train.key == first.train.key and not built
    # Names in what is said are today's, although the store was made under another.
    assert any("renamed.jsonl:2" in line for line in again.messages)
    bench.prepare(path, max_length=11)
    bench.prepare(path, max_length=10, validation=0.5)
    bench.prepare(path, max_length=10, format="prompt_completion")
    write(Path(path), pair("a", "B"), pair("c" * 20, "d"))
    bench.prepare(path, max_length=10)
    assert len(set(built)) == len(built) == 4
    assert len(bench.stores()) == 5


def test_another_chat_template_gives_another_store(tmp_path: Path) -> None:
    from support.tiny import CHATML, save_tokenizer

    bench = Bench(tmp_path, save_tokenizer(tmp_path / "tokenizer"))
    path = bench.file(pair("a", "b"))
    first = bench.prepare(path)
    (bench.tokenizer / "chat_template.jinja").write_text(CHATML.replace("\n", "!"))
    second = bench.prepare(path)
    assert first.train.key != second.train.key
    assert first.train.sample(0)[0].tolist() != second.train.sample(0)[0].tolist()


def test_a_prepared_store_is_opened_without_torch_and_transformers(bench: Bench) -> None:
    path = bench.file(pair("a", "b"))
    time.sleep(0.06)  # a file younger than a clock's tick is compared once more
    bench.prepare(path)
    code = (
        "import sys; from pathlib import Path; from unisono.config.schema import DataSection;"
        "from unisono.data.prepare import prepare;"
        "data = DataSection(train=[sys.argv[1]], cache_dir=sys.argv[2]);"
        "print(len(prepare(data, Path(sys.argv[3]), max_length=100).train));"
        "print(sorted({'torch', 'transformers', 'tokenizers'} & set(sys.modules)))"
    )
    arguments = [path, str(bench.folder / "cache"), str(bench.tokenizer)]
    answer = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True, env={**os.environ}
    )
    assert answer.stdout.splitlines() == ["1", "[]"]


def test_a_damaged_store_is_refused(bench: Bench) -> None:
    path = bench.file(pair("a", "b"))
    folder = bench.prepare(path).train.folder
    (folder / "tokens.bin").write_bytes(b"123")
    with pytest.raises(DataError, match=r"damaged: tokens\.bin has 3 bytes instead of 12[\s\S]*remove"):
        open_store(folder)


def test_a_file_that_changes_while_it_is_read_is_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    path = bench.file(pair("a", "b"), pair("c", "d"))
    original = building.recognise

    def grow(*args: Any) -> Any:
        with open(path, "a", encoding="utf-8") as file:
            file.write("\n")
        return original(*args)

    monkeypatch.setattr(building, "recognise", grow)
    with pytest.raises(DataError, match="was changed while it was read"):
        bench.prepare(path)
    assert bench.stores() == []


def test_long_work_says_how_far_it_is(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PROGRESS_SECONDS", 0.0)
    bench.prepare(bench.file(*(pair("a", str(i)) for i in range(10))))
    assert any("100%, 10 records" in line and "records/s" in line for line in bench.said)


def test_a_full_disk_is_named_and_leaves_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(building, "write_summary", full)
    with pytest.raises(OutputError, match=r"No space left on device[\s\S]*data\.cache_dir"):
        bench.prepare(bench.file(pair("a", "b")))
    assert bench.stores() == []


def test_show_prints_targets_lengths_and_counts(bench: Bench) -> None:
    import io

    from rich.console import Console

    from unisono.data.show import show

    path = bench.file(pair("Q: [bold]1+1 ", "two!"), pair("a", "b" * 30))
    prepared = bench.prepare(path)
    outputs = []
    for is_terminal in (False, True):
        out = io.StringIO()
        console = Console(
            file=out, width=100, force_terminal=is_terminal, color_system="standard" if is_terminal else None
        )
        show(prepared, bench.tokenizer, number=1, console=console)
        outputs.append(out.getvalue())
    text, coloured = outputs
    assert "Q: [bold]1+1 ⟦two!<eos>⟧" in text and "⟦bb" not in text
    assert "record 0: 18 tokens, 5 targets" in text and "median 25, 95 % up to" in text
    assert "2 records: 2 kept, 0 dropped" in text and "targets (" in text
    assert "\x1b[1;32mtwo!<eos>" in coloured and "⟦" not in coloured


def test_named_sources_are_laid_end_to_end_and_cached_one_by_one(bench: Bench) -> None:
    math = bench.file(pair("a", "1"), pair("b" * 30, "x"), pair("c", "3"), name="math.jsonl")
    chat = bench.file({"text": "hello"}, {"text": "world!"}, name="chat.jsonl")
    data = DataSection(
        train={"math": [math], "chat": [chat]}, weights={"chat": 2.5}, cache_dir=str(bench.folder / "cache")
    )
    prepared = prepare(data, bench.tokenizer, max_length=10, progress=bench.said.append)
    assert (prepared.sizes, prepared.weights, prepared.format) == ((2, 2), (1.0, 2.5), "prompt_completion, text")
    everything = np.arange(4)[::-1]
    assert prepared.train.record[everything].tolist() == [4, 3, 2, 0], "the left out one leaves a gap"
    assert prepared.train.lengths[everything].tolist() == [7, 6, 3, 3]
    assert prepared.train.num_targets[everything].tolist() == [6, 5, 2, 2]
    assert bytes(prepared.train.sample(3)[0].tolist()[:-1]) == b"world!"
    assert (prepared.train.num_tokens, prepared.train.longest, len(prepared.train)) == (19, 7, 4)
    assert any(line.startswith("train math: 3 records") for line in prepared.messages)
    alone = bench.prepare(chat, max_length=10)
    assert alone.train.key in prepared.train.key and len(bench.stores()) == 2


def test_named_validation_sets(bench: Bench) -> None:
    files = {name: [bench.file(pair(name, "x"), name=f"{name}.jsonl")] for name in ("one", "two")}
    prepared = bench.prepare(bench.file(pair("a", "b")), validation=files)
    assert {name: len(store) for name, store in prepared.validation.items()} == {"one": 1, "two": 1}
    shares = DataSection(
        train={"a": files["one"], "b": files["two"]}, validation=0.5, cache_dir=str(bench.folder / "cache")
    )
    with pytest.raises(DataError, match="leaves none"):
        prepare(shares, bench.tokenizer, max_length=10, progress=bench.said.append)


def test_what_the_settings_of_a_sample_do(bench: Bench) -> None:
    path = bench.file({"q": "p" * 20, "a": "answer"})
    prepared = bench.prepare(path, max_length=10, fields={"prompt": "q", "completion": "a"}, overlong="truncate_prompt")
    assert bytes(prepared.train.sample(0)[0].tolist()[:-1]) == b"pppanswer"
    assert "1 prompts cut to data.max_length" in prepared.counts.sentence()
    text = bench.file({"text": "0123456789" * 3}, name="t.jsonl")
    pieces = bench.prepare(text, max_length=10, overlong="split")
    assert pieces.counts.kept == 1 and pieces.counts.samples == len(pieces.train) == 4
    assert _records(pieces.train) == [0, 0, 0, 0] and pieces.train.num_tokens == 31


class Hasty:
    """Counts what the record reader yields, so that reading a file once can be told from twice."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        for module in (building, digests):
            monkeypatch.setattr(module, "read_records", self.read)

    def read(self, file: SourceFile, *args: Any, **settings: Any) -> Any:
        self.names.append(Path(file.name).name)
        return read_records(file, *args, **settings)


def test_a_file_is_read_once_and_then_never_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    path = bench.file(pair("a", "b"), pair("c", "d"))
    old = time.time() - 100
    os.utime(path, (old, old))
    time.sleep(0.06)
    reading = Hasty(monkeypatch)
    first = bench.prepare(path)
    assert reading.names == ["a.jsonl"]
    assert bench.prepare(path).train.key == first.train.key and bench.prepare(path, max_length=50)
    assert reading.names == ["a.jsonl", "a.jsonl"], "once for each build, never to hash"
    Path(path).touch()
    assert bench.prepare(path).train.key == first.train.key
    assert len(reading.names) == 3, "touched: read once more to compare"
    content = Path(path).read_text()
    Path(path).write_text(content.replace('"c"', '"C"'))
    assert bench.prepare(path).train.key != first.train.key, "same size, other content"


@pytest.mark.parametrize("name", ["prepared.json", "train/tokens.bin", "train/store.json"])
def test_prepared_data_that_cannot_be_read_is_told(name: str, bench: Bench) -> None:
    path = bench.file(pair("a", "b"))
    file = bench.prepare(path).parts[0].folder / name
    file.unlink()
    file.symlink_to(file)  # a loop: root may read anything else
    with pytest.raises(OutputError, match=rf"{name}: the prepared data cannot be read: [\s\S]*permissions"):
        bench.prepare(path)


def test_a_tokenizer_that_cannot_be_read_is_told(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Path.read_bytes

    def read(path: Path) -> bytes:
        if path.name == "tokenizer.json":
            raise PermissionError(13, "Permission denied", str(path))
        return original(path)

    monkeypatch.setattr(Path, "read_bytes", read)
    with pytest.raises(ModelError, match=r"tokenizer\.json: the tokenizer cannot be read: Permission denied"):
        bench.prepare(bench.file(pair("a", "b")))
