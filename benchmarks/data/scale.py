"""Prepare ten thousand, 100 thousand and a million synthetic chats: cost, memory, and beside `tokenizers` alone.

    python benchmarks/data/scale.py [--records 10000 100000 1000000] [--folder FOLDER]

A record is about 1 KB (some 200 tokens), so a million is about 1 GB of JSON Lines. For each size: seconds and records
per second of a first preparation, the peak memory of all its processes together (proportional set size, so that what
they share counts once), the time of a second start, which finds the store, and the time that
`tokenizers.Tokenizer.encode_batch` alone takes on the same texts, already rendered, with the same cores.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

from unisono.config.schema import DataSection
from unisono.cores import usable_cores
from unisono.data.prepare import prepare

MAX_LENGTH = 2048
SAMPLE_SECONDS = 2.0
LETTERS = "etaoinshrdlucmfwypvbgkjqxz"


def make_words(generator: random.Random, tokenizer_dir: Path) -> list[str]:
    """Take words of the tokenizer's vocabulary, and a fifth of invented ones, which it has to put together."""
    vocabulary = json.loads((tokenizer_dir / "tokenizer.json").read_bytes())["model"]["vocab"]
    known = [token[1:] for token in vocabulary if token[:1] == "Ġ" and token[1:].isascii() and token[1:].isalpha()]
    weights = [1 / (rank + 2) for rank in range(len(LETTERS))]
    invented = ["".join(generator.choices(LETTERS, weights, k=generator.randint(3, 9))) for _ in range(len(known) // 4)]
    return known + invented


def write_chats(file: Path, num_records: int, tokenizer_dir: Path) -> None:
    """Write chats of one or two rounds, as JSON Lines."""
    generator = random.Random(0)
    words = make_words(generator, tokenizer_dir)
    pool = [" ".join(generator.choices(words, k=generator.randint(10, 90))) + "." for _ in range(5000)]
    with file.open("w", encoding="utf-8") as out:
        for number in range(num_records):
            turns = []
            for _ in range(generator.choice((1, 1, 2))):
                turns.append({"role": "user", "content": f"{number}: {generator.choice(pool)}"})
                turns.append({"role": "assistant", "content": generator.choice(pool)})
            out.write(json.dumps({"messages": turns}) + "\n")


class Peak(threading.Thread):
    """Watches the memory of a process and all its children."""

    def __init__(self, process_id: int) -> None:
        super().__init__(daemon=True)
        self.num_bytes = 0
        self._process_id = process_id
        self._stop_asked = threading.Event()

    def run(self) -> None:
        """Sample until asked to stop."""
        while not self._stop_asked.wait(SAMPLE_SECONDS):
            try:
                main = psutil.Process(self._process_id)
                family = [main, *main.children(recursive=True)]
                total = sum(process.memory_full_info().pss for process in family)
            except (psutil.NoSuchProcess, psutil.AccessDenied, FileNotFoundError):
                continue
            self.num_bytes = max(self.num_bytes, total)

    def stop(self) -> None:
        """Stop sampling."""
        self._stop_asked.set()
        self.join()


def tokenizers_alone(file: Path, tokenizer_dir: Path) -> float:
    """Seconds of ``encode_batch`` alone on all rendered texts of a file, a thousand at a time, on all cores."""
    from tokenizers import Tokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    seconds, texts = 0.0, []
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            # The rendering of this template by hand is enough for a time; jinja would take the night.
            turns = json.loads(line)["messages"]
            texts.append("".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in turns))
            if len(texts) == 1000:
                began = time.perf_counter()
                tokenizer.encode_batch(texts, add_special_tokens=False)
                seconds += time.perf_counter() - began
                texts = []
    return seconds


def measure(num_records: int, folder: Path, tokenizer_dir: Path) -> str:
    """Measure one size; returns its line of the table."""
    file = folder / f"chats-{num_records}.jsonl"
    if not file.exists():
        write_chats(file, num_records, tokenizer_dir)
    cache = folder / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    seconds, again, tokens, peak = run_apart(file, cache, tokenizer_dir)
    alone = tokenizers_alone(file, tokenizer_dir)
    return (
        f"| {num_records:,} | {file.stat().st_size / 1e6:,.0f} | {tokens / 1e6:,.1f} | {seconds:.1f} | "
        f"{num_records / seconds:,.0f} | {seconds / num_records * 1e6:.0f} | {peak / 1e6:,.0f} | "
        f"{again:.2f} | {alone:.1f} | {alone / seconds:.0%} |"
    )


def run_apart(file: Path, cache: Path, tokenizer_dir: Path) -> tuple[float, float, int, int]:
    """Prepare in a process of its own; returns seconds, seconds of a second start, tokens, peak bytes."""
    arguments = [sys.executable, __file__, "--prepare", *map(str, (file, cache, tokenizer_dir))]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as child:
        peak = Peak(child.pid)
        peak.start()
        assert child.stdout is not None
        lines = []
        for line in child.stdout:
            lines.append(line)
            print(line, end="", flush=True)
        peak.stop()
    seconds, again, tokens = json.loads(lines[-1])
    return seconds, again, tokens, peak.num_bytes


def prepare_twice(file: Path, cache: Path, tokenizer_dir: Path) -> None:
    """Print the seconds of a first and a second preparation, and the number of tokens."""
    data = DataSection(train=[str(file)], cache_dir=str(cache))
    began = time.perf_counter()
    prepared = prepare(data, tokenizer_dir, max_length=MAX_LENGTH)
    seconds = time.perf_counter() - began
    began = time.perf_counter()
    prepare(data, tokenizer_dir, max_length=MAX_LENGTH)
    print(json.dumps([seconds, time.perf_counter() - began, prepared.counts.tokens]))


def main() -> None:
    """Print the table, a line as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--folder", type=Path, help="keep the files here (default: a temporary folder)")
    parser.add_argument("--prepare", nargs=3, metavar=("FILE", "CACHE", "TOKENIZER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.prepare:
        prepare_twice(*map(Path, arguments.prepare))
        return
    from unisono.model.load import resolve_model  # here, since each worker imports this file as its main module

    tokenizer_dir = resolve_model("starter")
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        lines = [measure(count, folder, tokenizer_dir) for count in arguments.records]
    print(f"\n{usable_cores()} cores\n")
    print("| records | MB | M tokens | s | records/s | us/record | peak MB | again s | tokenizers alone s | share |")
    print("|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
