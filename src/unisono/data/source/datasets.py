"""Hugging Face data sets: folders that ``save_to_disk`` wrote, and hub ids ``hub://owner/name?config=main&split=train``.

No code of a data set is run: versions of `datasets` that could are not supported. A hub id is fetched into the
library's own cache with the library's own credentials (HF_TOKEN). Fetching from the hub itself is not tested.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import orjson

from unisono.data.source.arrow import check_columns, damaged, read_batch
from unisono.data.source.libraries import load_library
from unisono.data.source.names import HUB
from unisono.data.source.raw import Raw
from unisono.data.source.stream import Digest
from unisono.errors import DataError

_BATCH_ROWS = 256
_PIECE_BYTES = 2**20


@dataclass(frozen=True)
class HubId:
    """What a hub id names; empty: the data set's own default."""

    repository: str
    config: str
    split: str
    revision: str


def hub_id(name: str) -> HubId:
    """Take a hub id apart; DataError when it is none."""
    repository, _, query = name[len(HUB) :].partition("?")
    fields = dict(parse_qsl(query, keep_blank_values=True))
    unknown = sorted(set(fields) - {"config", "split", "revision"})
    form = "hub://owner/name?config=main&split=train&revision=main; all but owner/name and split may be absent"
    if repository.count("/") > 1 or not all(repository.split("/")) or unknown or "split" not in fields:
        what = f"does not know {unknown[0]!r}" if unknown else "is not complete"
        raise DataError(f"the hub id {what}", where=name, hint=f"the form is {form}")
    return HubId(repository, fields.get("config", ""), fields["split"], fields.get("revision", ""))


def find_dataset(folder: Path) -> list[str]:
    """Return the splits in a folder that ``save_to_disk`` wrote; one without a name for a data set without splits."""
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        return [""]
    try:
        splits = orjson.loads((folder / "dataset_dict.json").read_bytes())["splits"]
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError):
        return []
    return [split for split in splits if isinstance(split, str)] if isinstance(splits, list) else []


def dataset_files(folder: Path) -> list[Path]:
    """Return the files of a data set folder, sorted by name."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def read_dataset(name: str, digest: Digest | None, limit_bytes: int) -> Iterator[Raw]:
    """Yield the rows of a data set, some at a time.

    The digest gets the files of the folder, sorted by name; of a hub id the Arrow files that the library made of it.
    """
    datasets = load_library("datasets", "datasets", name)
    arrow = load_library("pyarrow", "datasets", name)
    dataset = _load(datasets, arrow, name)
    if not isinstance(dataset, datasets.Dataset):
        raise DataError("is not one data set but several splits", where=name)
    paths = (
        [Path(item["filename"]) for item in dataset.cache_files] if name.startswith(HUB) else dataset_files(Path(name))
    )
    num_bytes = _hash_files(paths, digest, name)
    check_columns(arrow, dataset.features.arrow_schema, name)
    number, num_rows = 0, max(1, len(dataset))
    try:
        for table in dataset.with_format("arrow").iter(batch_size=_BATCH_ROWS):
            for batch in table.to_batches():
                number += batch.num_rows
                yield from read_batch(batch, number - batch.num_rows, limit_bytes, num_bytes * number // num_rows)
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise damaged(name, number, error) from error


def _load(datasets: Any, arrow: Any, name: str) -> Any:
    try:
        if not name.startswith(HUB):
            return datasets.load_from_disk(name)
        wanted = hub_id(name)
        if os.path.exists(wanted.repository):
            raise DataError(
                f"a folder {wanted.repository} is here, and the library would take it for the hub's data set",
                where=name,
                hint="start elsewhere, or name the files of that folder",
            )
        return datasets.load_dataset(
            wanted.repository, wanted.config or None, split=wanted.split, revision=wanted.revision or None
        )
    except (datasets.exceptions.DatasetsError, arrow.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())
        hint = "check owner, name, config and split; a private one needs HF_TOKEN" if name.startswith(HUB) else None
        raise DataError(f"the data set cannot be loaded: {reason}", where=name, hint=hint) from error


def _hash_files(paths: list[Path], digest: Digest | None, name: str) -> int:
    """Hash the files, if they are to be hashed, and return their size together."""
    try:
        if digest is not None:
            for path in paths:
                with path.open("rb") as file:
                    while piece := file.read(_PIECE_BYTES):
                        digest.update(piece)
        return sum(path.stat().st_size for path in paths)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or error}", where=name) from error
