"""From records to the work: chats for those who render them themselves, and the same as token ids and labels.

The order is part of the work: contestants read it from top to bottom, so an update has the same samples for all.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

SEED = 0
NUM_HELD_OUT = 16
EXAMPLE = Path(__file__).parents[2] / "examples/demo/train.jsonl"


def convert(source: Path, folder: Path, num_samples: int, tokenizer: Any) -> None:
    """Draw records with a fixed seed; write ``num_samples`` and the held-out ones into the folder."""
    records = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    needed = num_samples + NUM_HELD_OUT
    if needed > len(records):
        raise SystemExit(f"error: {source} has {len(records)} records, and {needed} are needed")
    chats = [_messages(record) for record in random.Random(SEED).sample(records, needed)]
    tokens = [_tokens(messages, tokenizer) for messages in chats]
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "chats.jsonl", [{"messages": messages} for messages in chats[NUM_HELD_OUT:]])
    _write(folder / "samples.jsonl", tokens[NUM_HELD_OUT:])
    _write(folder / "held_out.jsonl", tokens[:NUM_HELD_OUT])


def _messages(record: dict[str, Any]) -> list[dict[str, str]]:
    if "messages" in record:
        return list(record["messages"])
    return [{"role": "user", "content": record["question"]}, {"role": "assistant", "content": record["answer"]}]


def _tokens(messages: list[dict[str, str]], tokenizer: Any) -> dict[str, list[int]]:
    """The answer and its end marker are targets; the newline that the template writes behind it is not even read."""
    prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
    ids = tokenizer.apply_chat_template(messages, return_dict=False)
    if ids[: len(prompt)] != prompt:
        raise SystemExit("error: the prompt's tokens are not the beginning of the conversation's")
    ids = ids[: ids.index(tokenizer.eos_token_id, len(prompt)) + 1]
    return {"ids": ids, "labels": [-100] * len(prompt) + ids[len(prompt) :]}


def _write(file: Path, records: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
