"""A person's mistakes end in plain words and exit code 2, also where the rank module is started by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.ranks import RankFailed, run_ranks
from support.runs import make_run, run_training
from unisono.errors import ConfigError
from unisono.train import start


def test_a_rank_without_a_run_file_says_so() -> None:
    with pytest.raises(ConfigError, match=r"no run file is named\n  hint: python -m unisono.train RUN.yaml"):
        start([])


def test_a_misspelt_setting_in_allow_changes_is_refused(tiny: Path, tmp_path: Path) -> None:
    file = make_run(tmp_path, tiny, length={"updates": 1})
    run_ranks(run_training, 1, file)
    with pytest.raises(RankFailed, match=r"checkpoint.allow_changes: optim.lrr: no such setting .*optim.lr, "):
        run_ranks(run_training, 1, file, ("checkpoint.allow_changes=[optim.lrr]",))
