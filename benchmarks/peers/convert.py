"""From GSM8K's questions and answers to chats, in the two shapes that the contestants read."""

from __future__ import annotations

import json
import random
from pathlib import Path

SEED = 0


def convert(source: Path, folder: Path, num_samples: int) -> tuple[Path, Path]:
    """Draw ``num_samples`` records with a fixed seed; return the chats' file and the prompt-completion file.

    The order is part of the work: contestants read it from top to bottom, so an update has the same samples for all.
    """
    records = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    if num_samples > len(records):
        raise SystemExit(f"error: {source} has {len(records)} records, and {num_samples} are needed")
    chosen = random.Random(SEED).sample(records, num_samples)
    turns = [
        ({"role": "user", "content": record["question"]}, {"role": "assistant", "content": record["answer"]})
        for record in chosen
    ]
    chats, prompts = folder / "chats.jsonl", folder / "prompts.jsonl"
    _write(chats, [{"messages": [user, assistant]} for user, assistant in turns])
    _write(prompts, [{"prompt": [user], "completion": [assistant]} for user, assistant in turns])
    return chats, prompts


def _write(file: Path, records: list[dict[str, object]]) -> None:
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
