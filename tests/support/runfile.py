"""Run files for tests of the configuration: small, sound, and easy to spoil."""

from __future__ import annotations

from pathlib import Path

SOUND = """\
run:
  output_dir: out
  seed: 1
model:
  path: starter
data:
  train: [train.jsonl]
batch:
  global_size: 8
optim:
  lr: 2e-5
length:
  epochs: 1
"""


def write_run(folder: Path, text: str = SOUND, name: str = "run.yaml") -> Path:
    """Write a run file and the data file it names; returns the run file."""
    (folder / "train.jsonl").write_text('{"text": "a"}\n', encoding="utf-8")
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path
