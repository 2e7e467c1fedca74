"""Measure unisono and its peers on the same work: contestants take turns, cell by cell; a line a trial, a table.

python run.py --data gsm8k_train.jsonl [--cells bf16/full/2/16 ...] [--minutes 25] [--only NAME ...] [--rounds 2]

The same command again goes on where the last one stopped.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from cell import Cell, every, parse
from contestants import CONTESTANTS, DEFAULT, REFERENCE
from convert import EXAMPLE, convert
from job import Job
from machine import describe, load_average
from results import Results
from table import cell_table, document
from transformers import AutoTokenizer
from trial import Trial, run_trial

from unisono.model.load import resolve_model

MARGIN = 2  # updates' worth of samples beyond what is trained: packed rows do not end where updates do


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="GSM8K's training file: question and answer a line")
    parser.add_argument("--model", default="starter", help="a folder, or 'starter' (default)")
    parser.add_argument("--cells", default="bf16/full/2/16", help="a list with commas, or 'all' (32 cells)")
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=DEFAULT, metavar="NAME", help="contestants")
    parser.add_argument(
        "--minutes", type=float, help="begin no trial that would not end in time; go on by the same command"
    )
    parser.add_argument("--rounds", type=int, default=2, help="how often they take turns")
    parser.add_argument("--warmup", type=int, default=1, help="updates that are not counted")
    parser.add_argument("--measured", type=int, default=2, help="updates that are")
    parser.add_argument("--rate", type=float, default=2e-5, help="of full fine-tuning")
    parser.add_argument("--lora-rate", type=float, default=5e-4, help="of LoRA")
    parser.add_argument("--limit", type=float, default=1800, help="seconds that a trial may take")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="where results.jsonl and RESULTS.md go")
    args = parser.parse_args()
    if not args.data.is_file():
        raise SystemExit(f"error: there is no file {args.data} (--data, or DATA= of make)")
    args.cells = list(every()) if args.cells == "all" else [parse(text) for text in args.cells.split(",")]
    return args


def settings_of(args: argparse.Namespace, cpu: object) -> dict[str, object]:
    """Return what must be the same for two trials to stand in one table."""
    return {
        "model": Path(args.model).name,
        "cpu": cpu,
        "rate": args.rate,
        "lora_rate": args.lora_rate,
        "warmup": args.warmup,
        "updates": args.warmup + args.measured,
    }


def turns(args: argparse.Namespace) -> Iterator[tuple[int, Cell, str]]:
    """Yield who runs where, in which round: a cell's contestants one after the other, all cells in each round."""
    for number in range(1, args.rounds + 1):
        for cell in args.cells:
            if number == 1:
                yield number, cell.of_reference, REFERENCE
            for name in args.only:
                if cell.precision in CONTESTANTS[name].precisions and name != REFERENCE:
                    yield number, cell, name


def job_of(name: str, cell: Cell, args: argparse.Namespace, model: str, folder: Path, data: Path) -> Job:
    """Say what the contestant is to do."""
    contestant = CONTESTANTS[name]
    micro_size = 1 if cell.global_size % (contestant.micro_size * cell.ranks) else contestant.micro_size
    if cell.global_size % (micro_size * cell.ranks):
        raise SystemExit(f"error: {cell}: {cell.global_size} samples cannot be shared by {cell.ranks} processes")
    folder.mkdir(parents=True)
    return Job(
        contestant=name,
        model=model,
        folder=str(folder),
        data=str(data),
        method=cell.method,
        updates=args.warmup + args.measured,
        ranks=cell.ranks,
        global_size=cell.global_size,
        precision=cell.precision,
        rate=args.rate if cell.method == "full" else args.lora_rate,
        micro_size=micro_size,
        sampling=contestant.sampling,
        weights=contestant.weights,
        allocator=contestant.preloaded,
    )


def measure(args: argparse.Namespace, results: Results, model: str, machine: dict[str, object]) -> None:
    """Let the contestants take turns until all is measured or the minutes are over; the table is written after each."""
    deadline = time.monotonic() + 60 * args.minutes if args.minutes else float("inf")
    tokenizer = AutoTokenizer.from_pretrained(model)
    wanted = list(dict.fromkeys(turns(args)))
    for place, (number, cell, name) in enumerate(wanted, start=1):
        if results.has(cell, name, number):
            continue
        left = deadline - time.monotonic()
        expected = results.expected_seconds(cell, name)
        say = f"{place} of {len(wanted)}: round {number}, {cell}, {name}"
        if expected > left:
            print(f"{say}: would take about {expected:.0f} s, and {left:.0f} are left; the same command goes on here")
            return
        print(f"{say} ...", end=" ", flush=True)
        with tempfile.TemporaryDirectory(prefix="peers-") as scratch:
            data = Path(scratch) / "data"
            num_samples = cell.global_size * (args.warmup + args.measured + MARGIN)
            convert(args.data if cell.data == "gsm8k" else EXAMPLE, data, num_samples, tokenizer)
            job = job_of(name, cell, args, model, Path(scratch) / "job", data)
            blank = Trial(str(cell), name, number, results.settings, load_average())
            try:
                trial = run_trial(CONTESTANTS[name], job, blank, min(args.limit, left))
            except TimeoutError as error:
                if left <= args.limit:
                    print(f"{error}: the minutes are over; the same command goes on here")
                    return
                trial = Trial(str(cell), name, number, results.settings, blank.load, args.limit, failure=str(error))
        results.add(trial)
        (args.out / "RESULTS.md").write_text(document(results, machine), encoding="utf-8")
        speed = trial.failure or f"{trial.speed(args.warmup):.1f} useful tokens/s"
        print(f"{speed}, {trial.took:.0f} s in all", flush=True)


def main() -> None:
    """Measure, and print the tables of the cells."""
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that the running trial is ended too
    machine = describe()
    results = Results(args.out / "results.jsonl", settings_of(args, machine["cpu"]))
    measure(args, results, str(resolve_model(args.model)), machine)
    for cell in args.cells:
        print(f"\n{cell}", *cell_table(results, cell), sep="\n")


if __name__ == "__main__":
    main()
