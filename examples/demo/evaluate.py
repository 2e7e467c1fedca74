"""Ask a model every held-out request of the demo, and count the answers that are the right command.

    python examples/demo/evaluate.py MODEL_FOLDER|starter

An answer counts if it is JSON and equal to the command; greedy, so that it is the same every time.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HELD_OUT = Path(__file__).parent / "validation.jsonl"
BATCH = 40
MAX_NEW_TOKENS = 20  # the longest command has 16, with its end marker
NUM_SHOWN = 3


@dataclass(frozen=True)
class Answer:
    """A held-out request, the command it means, and what the model made of it."""

    request: str
    command: str
    answer: str

    @property
    def right(self) -> bool:
        try:
            return bool(json.loads(self.answer) == json.loads(self.command))
        except ValueError:
            return False


def ask(folder: Path, held_out: Path = HELD_OUT) -> list[Answer]:
    """Answer every request of ``held_out`` with the model in ``folder``, in batches of about equal lengths."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().to(device)
    records = [json.loads(line)["messages"] for line in held_out.read_text(encoding="utf-8").splitlines()]
    records.sort(key=lambda messages: len(messages[-2]["content"]))
    answers: list[Answer] = []
    told = time.monotonic()
    for start in range(0, len(records), BATCH):
        answers += ask_batch(model, tokenizer, records[start : start + BATCH])
        if time.monotonic() - told > 2:
            told = time.monotonic()
            print(f"  {len(answers)} of {len(records)} requests asked", flush=True)
    return answers


def ask_batch(model: Any, tokenizer: Any, records: list[list[dict[str, str]]]) -> list[Answer]:
    """Answer one batch; the shorter requests are padded on the left, so that all go on from their last token."""
    import torch

    inputs = tokenizer.apply_chat_template(
        [messages[:-1] for messages in records],
        add_generation_prompt=True,
        padding=True,
        return_tensors="pt",
        return_dict=True,
    ).to(model.device)
    with torch.inference_mode():
        rows = model.generate(**inputs, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
    texts = tokenizer.batch_decode(rows[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return [
        Answer(messages[-2]["content"], messages[-1]["content"], text)
        for messages, text in zip(records, texts, strict=True)
    ]


def report(answers: list[Answer]) -> str:
    """Describe the answers: three of them as they are, and how many are right."""
    step = len(answers) // NUM_SHOWN
    shown = answers[step // 2 :: step][:NUM_SHOWN]
    lines = [f"  {one.request}\n    -> {' '.join(one.answer.split())}" for one in shown]
    right = sum(one.right for one in answers)
    lines.append(f"  exactly right: {right} of {len(answers)} held-out requests ({right / len(answers):.1%})")
    return "\n".join(lines)


def main(name: str) -> None:
    """Evaluate the starter model or a model folder."""
    from unisono.model.starter import starter_folder

    print(report(ask(starter_folder() if name == "starter" else Path(name))))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
