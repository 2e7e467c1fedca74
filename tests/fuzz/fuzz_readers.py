"""A fuzzer over the readers: bytes in, records or a DataError out; anything else is a find, and so is a hang.

    python tests/fuzz/fuzz_readers.py SECONDS [SEED]

An input is a function of (seed, index): a good file of some kind with bytes flipped, put in, cut out, torn or spliced.
The work is done in a process of its own, so that a crash of a library is a find as well. Finds are kept in
``tests/fuzz/finds`` as ``<hash>.<kind>`` and read again by the unit tests.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
FINDS = HERE / "finds"
HANG_SECONDS = 10
if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "src")]

from support.forms import PACK, WRITE, tar  # noqa: E402
from unisono.data.records import convert, ignored_fields, recognise  # noqa: E402
from unisono.data.source.files import SourceFile  # noqa: E402
from unisono.data.source.names import kind_of  # noqa: E402
from unisono.data.source.raw import parse  # noqa: E402
from unisono.data.source.read import read_records  # noqa: E402
from unisono.errors import DataError  # noqa: E402

CHAT = [{"role": "user", "content": "ü\n?"}, {"role": "assistant", "content": 'ja, "x"'}]
RECORDS: list[dict[str, object]] = [{"text": "007"}, {"text": 'zwölf, "x"\nund'}, {"text": "x" * 600}]
MORE: list[dict[str, object]] = [{"messages": CHAT}, {"prompt": "a", "completion": "b"}, {"text": None}]
SPLICES = (
    b"\0",
    b"\n",
    b'"',
    b"\\ud800",
    b"\xef\xbb\xbf",
    b"[",
    b"]",
    b"{",
    b",",
    b"\r",
    b"1e999",
    b"99999999999999999999",
)


@functools.cache
def seeds() -> tuple[tuple[str, bytes], ...]:
    """Return good files of every kind, each with its ending, not compressed."""
    plain = [(kind, write(RECORDS)) for kind, write in WRITE.items()]
    plain += [(kind, WRITE[kind](MORE)) for kind in ("jsonl", "json", "tar")]
    plain += [("txt", "ein Text\nüber zwei Zeilen".encode())]
    plain += [("tar", tar({"x/" * 80 + "a.txt": b"t", "a.json": b"{}"}, form)) for form in (0, 1, 2)]
    return tuple(plain)


def make_input(seed: int, index: int) -> tuple[str, bytes]:
    """Return the ending and the content of one input: spoilt before it is compressed, or after."""
    dice = random.Random(f"{seed} {index}")
    kind, content = dice.choice(seeds())
    packing = dice.choice(("", "", *PACK))
    if packing and dice.randrange(2):
        return kind + packing, spoil(PACK[packing](content), dice)
    content = spoil(content, dice)
    if kind == "tar" and dice.randrange(3):
        content = right_checksums(content)
    return kind + packing, PACK[packing](content)


def spoil(content: bytes, dice: random.Random) -> bytes:
    """Change some bytes, or many."""
    data = bytearray(content)
    for _ in range(dice.choice((1, 1, 1, 2, 3, 8))):
        at = dice.randrange(len(data) + 1)
        action = dice.randrange(7)
        if action == 0 and data:
            data[at % len(data)] ^= 1 << dice.randrange(8)
        elif action == 1 and data:
            data[at % len(data)] = dice.choice((0, 1, 0x30, 0x7F, 0x80, 0xFF, dice.randrange(256)))
        elif action == 2:
            data[at:at] = dice.choice(SPLICES) * dice.choice((1, 1, 2, 600))
        elif action == 3:
            del data[at : at + dice.choice((1, 2, 8, 64, 512))]
        elif action == 4:
            del data[at:]
        elif action == 5 and data:
            piece = dice.choice(SPLICES)
            data[at : at + len(piece)] = piece
        else:
            _, other = dice.choice(seeds())
            begin = dice.randrange(len(other))
            data[at:at] = other[begin : begin + dice.choice((4, 64, 512, 4096))]
    return bytes(data)


def right_checksums(content: bytes) -> bytes:
    """Make the checksums of a tar archive's headers right, so that what they guard is reached."""
    data = bytearray(content)
    for at in range(0, len(data) - 511, 512):
        if data[at + 257 : at + 262] == b"ustar":
            data[at + 148 : at + 156] = b" " * 8
            data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + 512])
    return bytes(data)


def read_all(path: Path) -> int:
    """Read a file as the preparation does and return how many records came; DataError is a right answer."""
    file = SourceFile(str(path), *kind_of(path.name), False)
    digest = hashlib.sha256()
    num_records = 0
    try:
        for raw in read_records(file, digest, scratch=path.parent, limit_bytes=100_000):
            parsed = parse(raw)
            assert (parsed.value is None) == bool(parsed.problem), parsed
            num_records += 1
            if parsed.value is None:
                continue
            json.dumps(parsed.value, ensure_ascii=False).encode("utf-8")
            try:
                shape = recognise(parsed.value, raw.place)
                convert(parsed.value, shape, raw.place)
                ignored_fields(parsed.value, shape)
            except DataError:
                continue
    except DataError as error:
        if str(path) not in str(error.where):
            raise
        return num_records
    assert digest.digest() == hashlib.sha256(path.read_bytes()).digest(), "not every byte was hashed once"
    return num_records


def work(seed: int, start: int, seconds: float) -> None:
    """Read inputs until the time is over; tell the index of each before it is read."""
    ends = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        index = start
        while time.monotonic() < ends:
            ending, content = make_input(seed, index)
            path = Path(folder, f"input.{ending}")
            path.write_bytes(content)
            print(index, flush=True)
            read_all(path)
            index += 1


def keep(seed: int, index: int, reason: str) -> None:
    """Keep an input that was not answered rightly."""
    ending, content = make_input(seed, index)
    FINDS.mkdir(exist_ok=True)
    path = FINDS / f"{hashlib.sha256(content).hexdigest()[:16]}.{ending}"
    path.write_bytes(content)
    print(f"find {path.name} (seed {seed}, index {index}): {reason}", flush=True)


def main(seconds: float, seed: int) -> int:
    """Fuzz for some seconds; return how many finds there were."""
    ends = time.monotonic() + seconds
    index = num_finds = 0
    while (left := ends - time.monotonic()) > 0:
        with tempfile.TemporaryFile() as told:
            command = [sys.executable, __file__, "--work", str(seed), str(index), str(left)]
            worker = subprocess.Popen(command, stdout=told, stderr=subprocess.PIPE)
            position, changed = 0, time.monotonic()
            while worker.poll() is None:
                time.sleep(0.2)
                if told.seek(0, 2) != position:
                    position, changed = told.tell(), time.monotonic()
                if time.monotonic() - changed > HANG_SECONDS:
                    worker.kill()
            assert worker.stderr is not None
            problem = worker.stderr.read().decode(errors="replace").strip().splitlines()
            worker.stderr.close()
            told.seek(0)
            done = told.read().split()
        index = int(done[-1]) + 1 if done else index + 1
        if worker.returncode:
            num_finds += 1
            keep(seed, index - 1, f"exit {worker.returncode}: {problem[-1] if problem else 'crash or hang'}")
    print(f"{index:,} inputs, {num_finds} finds, seed {seed}")
    return num_finds


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
        sys.exit()
    sys.exit(main(float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else int(time.time())) > 0)
