"""Measure unisono and its peers on the same work: contestants take turns, useful tokens a second, a table.

python run.py --data gsm8k_train.jsonl [--only NAME ...] [--precision bf16] [--rounds 2]
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from pathlib import Path

from contestants import CONTESTANTS, DEFAULT
from convert import convert
from job import Job
from machine import describe
from table import Setting, write
from trial import Trial, run_trial

from unisono.model.load import resolve_model

MARGIN = 2  # updates' worth of samples beyond what is trained: packed rows do not end where updates do


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="GSM8K's training file: question and answer a line")
    parser.add_argument("--model", default="starter", help="a folder, or 'starter' (default)")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=DEFAULT, metavar="NAME", help="contestants")
    parser.add_argument("--rounds", type=int, default=2, help="how often they take turns")
    parser.add_argument("--warmup", type=int, default=1, help="updates that are not counted")
    parser.add_argument("--measured", type=int, default=2, help="updates that are")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--global-size", type=int, default=16)
    parser.add_argument("--row-tokens", type=int, default=1728, help="TRL's packed rows: 8 samples of GSM8K's mean")
    parser.add_argument("--rate", type=float, default=1e-5)
    parser.add_argument("--limit", type=float, default=1800, help="seconds that a trial may take")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="where the results go")
    return parser.parse_args()


def job_of(name: str, args: argparse.Namespace, model: str, folder: Path, chats: Path, prompts: Path) -> Job:
    """Say what the contestant is to do."""
    contestant = CONTESTANTS[name]
    by_count = not (contestant.launches or contestant.packed)
    if by_count and args.global_size % (contestant.micro_size * args.ranks):
        size = f"micro-batch {contestant.micro_size} x {args.ranks} processes"
        raise SystemExit(f"error: --global-size {args.global_size} is not a multiple of {size}, which {name} needs")
    folder.mkdir()
    return Job(
        contestant=name,
        model=model,
        folder=str(folder),
        chats=str(chats),
        prompts=str(prompts),
        updates=args.warmup + args.measured,
        ranks=args.ranks,
        global_size=args.global_size,
        precision=args.precision,
        rate=args.rate,
        micro_size=contestant.micro_size,
        row_tokens=args.row_tokens,
        packed=contestant.packed,
        balanced=contestant.balanced,
        allocator=contestant.preloaded,
    )


def main() -> None:
    """Let the contestants take turns; results are written after every trial."""
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that the running trial is ended too
    if not args.data.is_file():
        raise SystemExit(f"error: there is no file {args.data} (--data, or DATA= of make)")
    model = str(resolve_model(args.model))
    setting = Setting(
        model=Path(model).name,
        precision=args.precision,
        ranks=args.ranks,
        global_size=args.global_size,
        rate=args.rate,
        row_tokens=args.row_tokens,
        warmup=args.warmup,
        updates=args.warmup + args.measured,
        rounds=args.rounds,
        machine=describe(),
    )
    trials: list[Trial] = []
    with tempfile.TemporaryDirectory(prefix="peers-") as scratch:
        samples = args.global_size * (setting.updates + MARGIN)
        chats, prompts = convert(args.data, Path(scratch), samples)
        for number in range(1, args.rounds + 1):
            for name in args.only:
                began = time.monotonic()
                print(f"round {number} of {args.rounds}: {name} ...", end=" ", flush=True)
                job = job_of(name, args, model, Path(scratch) / f"{name}-{number}", chats, prompts)
                trial = run_trial(CONTESTANTS[name], job, number, args.limit)
                trials.append(trial)
                speed = trial.speed(args.warmup)
                print(f"{speed:.1f} useful tokens/s, {time.monotonic() - began:.0f} s in all", flush=True)
                table = write(args.out, setting, trials)
    print(table)


if __name__ == "__main__":
    main()
