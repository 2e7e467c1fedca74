"""Fixtures every test may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# no deadline: a busy machine is not a bug; no dice: what CI saw can be seen again
settings.register_profile("unisono", deadline=None, derandomize=True)
settings.load_profile("unisono")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TINY: a two-layer model with untied embeddings and the byte tokenizer, as a folder."""
    from support.tiny import save_tiny

    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TINY with the embedding and the output head sharing storage."""
    from support.tiny import save_tiny

    return save_tiny(tmp_path_factory.mktemp("tiny_tied"), tied=True)
