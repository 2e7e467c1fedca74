"""``unisono bench``: the person's own run on 1, 2, 4 ... ranks for some updates each, and the scaling table of it.

The global batch stays as it is on every number of ranks, and so do the samples: it is the same work, shared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import orjson

from unisono.bench.measure import WARM_UP, Row, flops_per_second, related, row_of, short_run, table
from unisono.bench.plot import svg
from unisono.config.check import check_world
from unisono.config.load import Loaded
from unisono.config.schema import RunConfig
from unisono.drill.scratch import Interrupted, Outcome, Scratch
from unisono.durable import replace_file
from unisono.errors import ConfigError, ModelError
from unisono.goodput import counted
from unisono.launch.ranks import look_at_machine
from unisono.stopping import AGAIN

VERSION = 1


def parse_ranks(text: str) -> list[int]:
    """Read 1,2,4. Raises ConfigError for what is not a list of different numbers of ranks."""
    numbers = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in numbers) or len(set(numbers)) < len(numbers):
        raise ConfigError(
            f"--ranks is {text}, but it takes different numbers of ranks", hint="for example --ranks 1,2,4"
        )
    return [int(part) for part in numbers]


def bench(
    loaded: Loaded, given: Sequence[str], ranks: Sequence[int], updates: int, folder: Path, say: Callable[[str], None]
) -> int:
    """Measure and show; returns 0, 1 if a run failed, AGAIN if the person stopped it."""
    config, gpus = loaded.config, look_at_machine().gpus
    for number in ranks:
        check_world(_strategy_free(config), number)
        if gpus and number > gpus:
            raise ConfigError(f"--ranks asks for {number} ranks, but there are {gpus} GPUs", hint="one rank a GPU")
    say(f"bench: {updates} updates each on {', '.join(map(str, ranks))} ranks; nothing of the runs is kept")
    rows: list[Row] = []
    peaks: list[float] = []
    failed: list[int] = []
    try:
        with Scratch.beside(loaded, given) as scratch:
            for number in ranks:
                say(f"\nbench: {counted(number, 'rank')}")
                outcome = scratch.run(f"ranks-{number}", _settings(config, number, updates))
                if outcome.code:
                    failed.append(number)
                    continue
                rows.append(_measured(number, outcome, config, peaks))
    except Interrupted:
        say("bench: stopped")
        return AGAIN
    _write(related(_shares_of_peak(rows, peaks, gpus)), config, folder, say)
    for number in failed:
        say(f"{counted(number, 'rank')}: the run failed, see above")
    return 1 if failed else 0


def _strategy_free(config: RunConfig) -> RunConfig:
    """Leave the strategy out of what is judged: one rank takes none."""
    return config.model_copy(update={"strategy": config.strategy.model_copy(update={"name": "auto"})})


def _settings(config: RunConfig, ranks: int, updates: int) -> dict[str, object]:
    """Return what makes a short run of the person's own, on any number of ranks."""
    settings = short_run(config, ranks, updates)
    if ranks == 1 or config.strategy.name == "single":
        settings["strategy.name"] = "auto"
    return settings


def _measured(ranks: int, outcome: Outcome, config: RunConfig, peaks: list[float]) -> Row:
    """Sum up a run; ``mfu`` holds the model's operations a second until the peak is known."""
    row = row_of(ranks, outcome.updates, outcome.events, outcome.summary)
    try:
        flops = _flops_of_update(config)
    except ModelError:  # a family without a formula
        return row
    peaks.append(_peak_flops(outcome.summary["compute"]))
    return replace(row, mfu=flops_per_second(outcome.updates, outcome.ids(), flops))


def _shares_of_peak(rows: Sequence[Row], peaks: Sequence[float], gpus: int) -> list[Row]:
    """Divide by the best peak of those measured after each run: whatever else runs here only lowers it."""
    return [
        row if row.mfu is None else replace(row, mfu=row.mfu / (max(peaks) * (row.ranks if gpus else 1)))
        for row in rows
    ]


def _flops_of_update(config: RunConfig) -> Callable[[int, int, int], float]:
    from unisono.model.load import resolve_model
    from unisono.plan.architecture import read_architecture
    from unisono.plan.memory import Load
    from unisono.plan.time import micro_batch_flops

    shape = read_architecture(resolve_model(config.model.path))
    lora = config.model.lora

    def flops(num_samples: int, num_tokens: int, num_targets: int) -> float:
        documents = [round(num_tokens / num_samples)] * num_samples  # attention is that of samples of one length
        rank = None if lora is None else lora.rank
        return micro_batch_flops(Load(shape, documents, num_targets, lora_rank=rank))

    return flops


def _peak_flops(compute: str) -> float:
    """Measure the products of a GPU, or of all usable cores."""
    import torch

    from unisono.cores import usable_cores
    from unisono.doctor.speed import product_flops

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(usable_cores())
    formats = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    return product_flops(formats[compute], device)


def _write(rows: Sequence[Row], config: RunConfig, folder: Path, say: Callable[[str], None]) -> None:
    if not rows:
        return
    say("")
    for line in table(rows):
        say(line)
    folder.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {
        "version": VERSION,
        "model": config.model.path,
        "strategy": config.strategy.name,
        "warm_up_updates": WARM_UP,
        "rows": [asdict(row) for row in rows],
    }
    replace_file(folder / "bench.json", orjson.dumps(result, option=orjson.OPT_INDENT_2) + b"\n")
    replace_file(
        folder / "bench.svg", svg(rows, f"{Path(config.model.path).name}: the same work on more ranks").encode()
    )
    say(f"bench: {folder / 'bench.json'}, {folder / 'bench.svg'}")
