"""Streamed samples: every record once an epoch, the same for every world, and any position to go on from."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.config.schema import DataSection
from unisono.data.loader import Batches, Cut, UpdateBatch
from unisono.data.prepare import prepare
from unisono.data.spread import CostModel
from unisono.data.stream import RECORDS_OF_A_FILE, Stream, StreamedUpdates, StreamPlan
from unisono.errors import DataError


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from support.tiny import save_tokenizer

    return save_tokenizer(tmp_path_factory.mktemp("plain"), chat_template=None)


def write(folder: Path, *counts: int) -> list[str]:
    """Write files with as many texts each; a text names its file and place."""
    paths = [folder / f"{number}.jsonl" for number in range(len(counts))]
    for number, (path, count) in enumerate(zip(paths, counts)):
        lines = (json.dumps({"text": f"{number}-{place}" + "." * (place % 5)}) for place in range(count))
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return [str(path) for path in paths]


def plan_of(files: list[str], tokenizer: Path, *, max_length: int = 100, **settings: Any) -> StreamPlan:
    data = DataSection(train=files, mode="stream", cache_dir=str(tokenizer / "cache"), **settings)
    plan = prepare(data, tokenizer, max_length=max_length).train
    assert isinstance(plan, StreamPlan)
    return plan


def updates(
    plan: StreamPlan,
    *,
    size: int = 4,
    window: int = 7,
    rank: int = 0,
    world: int = 1,
    position: dict[str, Any] | None = None,
    shuffle: bool = True,
) -> Callable[[int], UpdateBatch]:
    batches_of = partial(Batches, cut=Cut(True, 64), cost=CostModel(0.0, 1.0), rank=rank, world=world)
    stream = Stream(plan, seed=3, shuffle=shuffle, window=window)
    return StreamedUpdates(stream, batches_of, global_size=size, position=position)


def ids(*counts: int) -> list[int]:
    return [number * RECORDS_OF_A_FILE + place for number, count in enumerate(counts) for place in range(count)]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any),
    st.integers(1, 6),
    st.integers(1, 12),
    st.booleans(),
)
def test_b28_every_record_once_an_epoch_and_any_place_to_go_on_from(
    tmp_path_factory: pytest.TempPathFactory, plain: Path, counts: list[int], size: int, window: int, shuffle: bool
) -> None:
    plan = plan_of(write(tmp_path_factory.mktemp("files"), *counts), plain)
    build = updates(plan, size=size, window=window, shuffle=shuffle)
    per_epoch = -(-sum(counts) // size)
    walked = [build(number) for number in range(1, 3 * per_epoch + 1)]
    for epoch in range(3):
        batches = walked[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert [batch.epoch for batch in batches] == [epoch] * per_epoch
        assert [len(batch.records) for batch in batches[:-1]] == [size] * (per_epoch - 1)
        trained = [record for batch in batches for record in batch.records]
        assert sorted(trained) == ids(*counts)
        assert shuffle or trained == ids(*counts)
    for number, before in enumerate(walked[:-1], 1):
        again = updates(plan, size=size, window=window, shuffle=shuffle, position=before.position)(number + 1)
        assert again.records == walked[number].records and again.position == walked[number].position


def test_b28_ranks_share_each_update_and_agree_on_it(tmp_path: Path, plain: Path) -> None:
    plan = plan_of(write(tmp_path, 13, 5, 8), plain)
    alone = updates(plan, size=6)
    ranks = [updates(plan, size=6, rank=rank, world=3) for rank in range(3)]
    for number in range(1, 9):
        whole, parts = alone(number), [build(number) for build in ranks]
        assert all(part.records == whole.records and part.num_targets == whole.num_targets for part in parts)
        assert sum(micro.num_targets for part in parts for micro in part.micro_batches) == whole.num_targets
        trained = Counter(record for mine in parts[0].records_by_rank for record in mine)
        assert trained == Counter(whole.records)


def test_b29_epochs_and_windows_are_shuffled(tmp_path: Path, plain: Path) -> None:
    plan = plan_of(write(tmp_path, 40, 40, 40), plain)
    build = updates(plan, size=120, window=40)
    first, second = build(1).records, build(2).records
    assert first != second and sorted(first) == sorted(second) == ids(40, 40, 40)
    assert first != ids(40, 40, 40)
    for start in (0, 40, 80):
        assert len({record // RECORDS_OF_A_FILE for record in first[start : start + 40]}) == 1


@pytest.mark.parametrize("start", range(5))
def test_pieces_of_a_split_text_are_gone_on_with(tmp_path: Path, plain: Path, start: int) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "0123456789" * 3}) + "\n" + json.dumps({"text": "short"}) + "\n")
    plan = plan_of([str(path)], plain, max_length=8, overlong="split")
    build = updates(plan, size=1)
    walked = [build(number) for number in range(1, 6)]
    assert Counter(batch.records[0] for batch in walked) == {0: 4, 1: 1}
    assert sum(batch.num_tokens for batch in walked) == 31 + 6
    if start:
        build = updates(plan, size=1, position=walked[start - 1].position)
        again = [build(number) for number in range(start + 1, 6)]
        assert [batch.records for batch in again] == [batch.records for batch in walked[start:]]
        assert [batch.num_tokens for batch in again] == [batch.num_tokens for batch in walked[start:]]


def test_what_is_left_out_is_listed_once_and_counted(tmp_path: Path, plain: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": "x" * n}) for n in (3, 200, 4, 5)]
    path.write_text("\n".join([lines[0], "[1]", *lines[1:3], '{"text": 7}', lines[3]]) + "\n")
    plan = plan_of([str(path)], plain, on_error="skip", max_skipped=2)
    build = updates(plan, size=2, shuffle=False)
    walked = [build(number) for number in range(1, 4)]
    assert [batch.records for batch in walked] == [[0, 3], [5], [0, 3]]
    listed = [[item.place for item in batch.left_out] for batch in walked]
    assert listed == [[f"{path}:2", f"{path}:3"], [f"{path}:5"], []], "in the first epoch only"
    assert "200" in walked[0].left_out[1].reason or "201" in walked[0].left_out[1].reason
    again = updates(plan, size=2, shuffle=False, position=walked[0].position)(2)
    assert [item.place for item in again.left_out] == listed[1]
    assert again.position == walked[1].position and (again.position or {})["num_skipped"] == 2


def test_bad_records_and_empty_epochs_are_refused(tmp_path: Path, plain: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n{"text": 7}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2: 'text' is a number"):
        updates(plan_of([str(path)], plain), size=9)(1)
    with pytest.raises(DataError, match=r"more than data\.max_skipped = 0"):
        updates(plan_of([str(path)], plain, on_error="skip", max_skipped=0), size=9)(1)
    path.write_text(json.dumps({"text": "a" * 50}) + "\n")
    with pytest.raises(DataError, match="a whole epoch gave no sample"):
        updates(plan_of([str(path)], plain, max_length=9), size=9)(1)
    with pytest.raises(DataError, match=r"a\.jsonl:1: 51 tokens"):
        updates(plan_of([str(path)], plain, max_length=9, overlong="error"), size=9)(1)
    path.write_text("\n")
    with pytest.raises(DataError, match="0 samples"):
        plan_of([str(path)], plain)


def test_sources_of_two_shapes_in_one_stream(tmp_path: Path, plain: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps({"prompt": str(i), "completion": "yes"}) + "\n" for i in range(5)))
    texts = write(tmp_path, 4)
    data = DataSection(train={"pairs": [str(pairs)], "texts": texts}, mode="stream", cache_dir=str(tmp_path / "c"))
    prepared = prepare(data, plain, max_length=100)
    assert prepared.format == "prompt_completion, text" and isinstance(prepared.train, StreamPlan)
    batch = updates(prepared.train, size=9, window=9)(1)
    assert sorted(batch.records) == ids(5, 4)
    with pytest.raises(DataError, match=r"data\.mode=store"):
        prepared.store  # noqa: B018 - asking is the test
    assert np.array(batch.records).tolist() != ids(5, 4)


def grow(path: Path) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"text": "more"}) + "\n")


def cut(path: Path) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def edit(path: Path) -> None:
    path.write_text(path.read_text().replace("0-1", "9-9"))


@pytest.mark.parametrize("change", [grow, cut, edit])
@pytest.mark.parametrize("num_before", [1, 5], ids=["within a file", "between epochs"])
def test_a_file_that_changes_while_it_is_streamed_is_refused(
    change: Callable[[Path], None], num_before: int, tmp_path: Path, plain: Path
) -> None:
    (path,) = write(tmp_path, 20)
    build = updates(plan_of([path], plain), size=4)
    for number in range(1, num_before + 1):
        build(number)
    change(Path(path))
    with pytest.raises(DataError, match=r"0\.jsonl: the file was changed while the run streams it"):
        list(map(build, range(num_before + 1, 20)))


@pytest.mark.parametrize("change", [grow, cut, edit])
def test_a_stream_is_not_gone_on_with_after_a_change(
    change: Callable[[Path], None], tmp_path: Path, plain: Path
) -> None:
    (path,) = write(tmp_path, 20)
    before = plan_of([path], plain).key
    change(Path(path))
    assert plan_of([path], plain).key != before


def test_a_copy_on_another_machine_is_the_same_stream(tmp_path: Path, plain: Path) -> None:
    (path,) = write(tmp_path, 20)
    plan = plan_of([path], plain)
    there = tmp_path / "there"
    there.mkdir()
    (there / "0.jsonl").write_bytes(Path(path).read_bytes())
    os.utime(there / "0.jsonl", (1, 1))
    assert plan_of([str(there / "0.jsonl")], plain).key == plan.key
    os.link(path, tmp_path / "backup.jsonl")
    Path(path).chmod(0o600)
    assert len(updates(plan, size=20)(1).records) == 20, "a link and other rights change no record"
