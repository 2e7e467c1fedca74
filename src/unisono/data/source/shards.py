"""WebDataset shards: tar archives whose members of one name, up to the first dot of its last part, are one sample.

The ``json`` member of a sample is its record, a ``txt`` member alone becomes ``{"text": ...}``. A sample with both is
unusable (which one is meant is not clear), and so is one with neither, with the same member twice, or with a link in
their place. Members of other kinds (pictures, sound) play no part. As in WebDataset, folders, names without a dot and
names that begin with a dot or two underscores belong to no sample.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

from unisono.data.source.raw import Raw, decode, too_big, unusable
from unisono.data.source.stream import FileBytes
from unisono.data.source.tar import Member, TarReader

_NAME = re.compile(r"((?:.*/)?(?!__)[^./][^./]*)\.([^/]*)", re.DOTALL)
_NUM_NAMED = 5


@dataclass
class _Sample:
    """What was seen of a sample: the records in it, or why there is none, and how its other members end."""

    key: str
    found: list[Raw] = field(default_factory=list)
    others: list[str] = field(default_factory=list)


def read_shard(content: BinaryIO, source: FileBytes, name: str, limit_bytes: int) -> Iterator[Raw]:
    """Yield the samples of a shard; json members unparsed."""
    sample = _Sample("")
    archive = TarReader(content, name)
    for member in archive:
        match = _NAME.fullmatch(member.name)
        if match is None or member.kind == b"5":
            continue
        key, ending = match.group(1), match.group(2).lower()
        if key != sample.key:
            yield from _finish(sample, source.num_bytes)
            sample = _Sample(key)
        if ending in ("json", "txt"):
            sample.found.append(_read_member(archive, member, ending, source.num_bytes, limit_bytes))
        else:
            sample.others.append(ending)
    yield from _finish(sample, source.num_bytes)


def _read_member(archive: TarReader, member: Member, ending: str, end_bytes: int, limit_bytes: int) -> Raw:
    if not member.is_file:
        return unusable(member.name, "is a link, a device or a sparse file; a plain member is needed", end_bytes)
    if member.num_bytes > limit_bytes:
        return unusable(member.name, too_big(limit_bytes), end_bytes)
    content = archive.read(member)
    if ending == "json":
        return Raw(member.name, content, None, "", end_bytes)
    text, problem = decode(content)
    return Raw(member.name, None, None if problem else {"text": text}, problem, end_bytes)


def _finish(sample: _Sample, end_bytes: int) -> Iterator[Raw]:
    """Yield the record of a sample, or why it has none."""
    if len(sample.found) == 1:
        yield sample.found[0]
    elif sample.found:
        names = " and ".join(raw.place.rsplit("/", 1)[-1] for raw in sample.found[:_NUM_NAMED])
        problem = f"the sample has {names}; which one is the record is not clear"
        yield unusable(sample.key, problem, end_bytes)
    elif sample.key:
        others = ", ".join(sample.others[:_NUM_NAMED])
        yield unusable(sample.key, f"the sample has neither a json nor a txt member (it has: {others})", end_bytes)
