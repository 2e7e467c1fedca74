"""Measure what preparing adds to tokenising: JSON, conversion, chat template and targets against the library alone.

    RAYON_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false python benchmarks/data/encode.py MODEL_FOLDER [GSM8K.jsonl]

Both sides do the same texts, in turns, in one thread; printed are processor seconds and the median of the ratios.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from unisono.data.encode import Encoder
from unisono.data.records import Shape, convert
from unisono.data.template import load_tokenizer

PAIRS = 7
BATCH_RECORDS = 500
NUM_RECORDS = 3000


def chats(number: int) -> list[bytes]:
    """Make chats of 2 to 4 turns, about 250 tokens each."""
    chance = random.Random(0)
    words = ["the", "model", "learns", "every", "answer", "once", "and", "then", "forgets", "what", "42", "people"]
    words += ["said", "about", "gradients,", "maybe", "not."]
    lines = []
    for _ in range(number):
        turns = chance.randint(2, 4)
        size = 200 // turns
        contents = [" ".join(chance.choices(words, k=chance.randint(size // 2, size * 3 // 2))) for _ in range(turns)]
        roles = ("user", "assistant") if turns % 2 == 0 else ("system", "user", "assistant")
        messages = [{"role": roles[i % len(roles)], "content": text} for i, text in enumerate(contents)]
        lines.append(orjson.dumps({"messages": messages}))
    return lines


def measure(name: str, folder: Path, lines: list[bytes], shape: Shape, fields: dict[str, str]) -> None:
    """Time both sides in pairs and print them."""
    encoder = Encoder(load_tokenizer(folder, trust_remote_code=False), shape, 8192)
    tokenizer: Any = encoder._tokenizer
    records = [convert(orjson.loads(line), shape, "", fields) for line in lines]
    texts = [
        tokenizer.apply_chat_template([message.as_dict() for message in record.messages], tokenize=False)  # type: ignore[union-attr]
        for record in records
    ]
    num_tokens = sum(len(samples[0].ids) for samples in encoder.encode(records) if isinstance(samples, tuple))

    def alone(begin: int) -> None:
        tokenizer.backend_tokenizer.encode_batch(texts[begin : begin + BATCH_RECORDS], add_special_tokens=False)

    def ours(begin: int) -> None:
        batch = lines[begin : begin + BATCH_RECORDS]
        encode(encoder, [convert(orjson.loads(line), shape, "", fields) for line in batch])

    pairs = [(seconds(alone, len(lines)), seconds(ours, len(lines))) for _ in range(PAIRS)]
    ratio = statistics.median(mine / theirs for theirs, mine in pairs)
    theirs, mine = (min(side) for side in zip(*pairs))
    print(f"{name}: {len(lines):,} records, {num_tokens / len(lines):.0f} tokens each")
    print(f"    tokenizers alone {theirs:.3f} s, ours {mine:.3f} s, ratio {ratio:.3f}")


def encode(encoder: Encoder, records: list[Any]) -> None:
    """Encode a batch; every record must give a sample."""
    assert all(isinstance(result, tuple) for result in encoder.encode(records))


def seconds(work: Callable[[int], None], number: int) -> float:
    """Return the processor seconds of going through all batches."""
    began = time.process_time()
    for begin in range(0, number, BATCH_RECORDS):
        work(begin)
    return time.process_time() - began


def main() -> None:
    """Measure both kinds of data."""
    folder = Path(sys.argv[1])
    if len(sys.argv) > 2:
        lines = Path(sys.argv[2]).read_bytes().splitlines()[:NUM_RECORDS]
        fields = {"prompt": "question", "completion": "answer"}
        measure("gsm8k", folder, lines, "prompt_completion", fields)
    measure("chats", folder, chats(NUM_RECORDS), "messages", {})


if __name__ == "__main__":
    main()
