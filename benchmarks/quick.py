"""Hold the speed in minutes: unisono beside a tutorial's loop, its own matrix products, and itself in one process.

python benchmarks/quick.py [--data gsm8k_train.jsonl] [--store]      (make bench-quick)

Trials take turns, there and back again, and every figure is a ratio of what was measured minutes apart on the same
samples: so it holds on a machine that is not quiet, where seconds do not. Code 1 if a ratio is far below the one stored
for this kind of CPU; a kind that has none is told so, and passes. benchmarks/peers/README.md says how to read it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))

import trial as peers  # noqa: E402
from contestants import CONTESTANTS  # noqa: E402
from convert import NUM_HELD_OUT, convert  # noqa: E402
from job import Job  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

import quick_figures as gate  # noqa: E402
from unisono.bench.calibrate import environment_of_ranks  # noqa: E402
from unisono.cores import usable_cores  # noqa: E402
from unisono.doctor.exchange import free_port  # noqa: E402
from unisono.errors import UnisonoError  # noqa: E402
from unisono.model.load import resolve_model  # noqa: E402
from unisono.plan.machine import cpu_name  # noqa: E402

BOUNDS = HERE / "quick-bounds.json"
RANKS = {"ours-2": 2, "ours-1": 1, "tutorial-2": 2}
# The tutorial's loop is given the allocator that unisono brings: what is held is the loop's own speed.
CONTESTANT = {"ours-2": "unisono", "ours-1": "unisono", "tutorial-2": "tutorial+mimalloc"}
ORDER = (
    *("ours-2", "tutorial-2", "floor of ours-2", "ours-1", "floor of ours-1"),
    *("ours-1", "floor of ours-2", "tutorial-2", "ours-2"),
)  # fmt: skip
ALWAYS = 2  # of these are taken whatever time they need
WARM_UP, MEASURED = 1, 2
TRIAL_LIMIT_SECONDS = 900


@dataclass
class Bench:
    """What all trials share, and what they have found."""

    folder: Path
    model: str
    data: Path
    precision: str
    global_size: int
    trials: list[gate.Trial] = field(default_factory=list)
    floors: dict[str, list[gate.Floor]] = field(default_factory=dict)
    runs: dict[str, Path] = field(default_factory=dict)  # the latest of each of ours

    def take(self, turn: str) -> str:
        """Take a turn; returns in words what came out."""
        who = turn.removeprefix("floor of ")
        if who != turn:
            floor = self._floor(who)
            self.floors.setdefault(who, []).append(floor)
            return f"{sum(floor.products.values()) / MEASURED:.2f} s an update"
        trial = self._trial(who)
        self.trials.append(trial)
        return f"{sum(trial.tokens.values()) / math.fsum(trial.seconds.values()):.0f} useful tokens/s"

    def _trial(self, who: str) -> gate.Trial:
        contestant, folder = CONTESTANTS[CONTESTANT[who]], self.folder / f"{len(self.trials)}-{who}"
        folder.mkdir()
        job = Job(
            contestant=CONTESTANT[who],
            model=self.model,
            folder=str(folder),
            data=str(self.data),
            method="full",
            updates=WARM_UP + MEASURED,
            ranks=RANKS[who],
            global_size=self.global_size,
            precision=self.precision,
            rate=1e-5,
            micro_size=contestant.micro_size,
            sampling=contestant.sampling,
            weights=contestant.weights,
            allocator=True,
        )
        blank = peers.Trial("quick", who, len(self.trials), {}, os.getloadavg()[0])
        found = peers.run_trial(contestant, job, blank, TRIAL_LIMIT_SECONDS)
        if found.failure:
            raise SystemExit(f"error: {who} ended with: {found.failure}")
        counted = range(WARM_UP + 1, WARM_UP + MEASURED + 1)
        seconds = {str(update): found.seconds[update - 1] for update in counted}
        tokens = {str(update): found.tokens[update - 1] for update in counted}
        if not contestant.launches:
            return gate.Trial(who, seconds, tokens)
        run = self.runs[who] = folder / "run"
        for part in ("checkpoints", "model"):  # gigabytes that nobody needs
            shutil.rmtree(run / part)
        events = [gate.event_lines(run, rank) for rank in range(RANKS[who])]
        lines = [each[update] for each in events for update in counted]
        exposed, waiting = (gate.share_of(cause, lines) for cause in ("communication", "waiting"))
        return gate.Trial(who, seconds, tokens, exposed, waiting)

    def _floor(self, who: str) -> gate.Floor:
        """Time the products of the latest run of ``who`` in as many processes, under the environment of its ranks."""
        number, port = RANKS[who], free_port()
        updates = ",".join(str(update) for update in range(WARM_UP + 1, WARM_UP + MEASURED + 1))
        command = [sys.executable, "-W", "ignore", str(HERE / "floor.py"), str(self.runs[who]), updates]
        ranks: list[subprocess.Popen[str]] = []
        try:
            for rank in range(number):
                place = {
                    "RANK": rank, "WORLD_SIZE": number, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": number,
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                }  # fmt: skip
                told = environment_of_ranks(number) | {name: str(value) for name, value in place.items()}
                out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
                ranks.append(subprocess.Popen(command, env=told, stdout=out, text=True))
            said = ranks[0].communicate(timeout=TRIAL_LIMIT_SECONDS)[0]
            codes = [each.wait(timeout=60) for each in ranks]
        finally:
            for each in ranks:
                each.kill()
                each.wait()
        if any(codes):
            raise SystemExit(f"error: the floor of {who} ended with {codes}; what it said is above")
        return gate.Floor(
            **next(json.loads(x[len(gate.ANSWER) :]) for x in said.splitlines() if x.startswith(gate.ANSWER))
        )


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="GSM8K's training file; without it, sums of the same lengths")
    parser.add_argument("--model", default="starter", help="a folder, or 'starter' (default)")
    parser.add_argument("--precision", choices=("fp32", "bf16"), help="default: bf16 where this CPU multiplies it")
    parser.add_argument("--global-size", type=int, default=8, help="samples an update")
    parser.add_argument("--limit", type=float, default=220, help="seconds; turns that would end later are left out")
    parser.add_argument("--store", action="store_true", help=f"make what is measured the bound: {BOUNDS.name}")
    parser.add_argument("--out", type=Path, default=HERE.parent / "runs/bench-quick.json", help="where the figures go")
    return parser.parse_args()


def write_problems(file: Path, count: int) -> None:
    """Write sums in words, as long as GSM8K's: 60 tokens of question and 124 of answer in the mean, 22 and 55 off."""
    dice = random.Random(0)
    words = (
        "a",
        "box",
        "of",
        "red",
        "apples",
        "cost",
        "more",
        "than",
        "each",
        "man",
        "who",
        "sold",
        "them",
        "at",
        "shop",
    )
    lines = []
    for _ in range(count):
        question = " ".join(dice.choices(words, k=max(12, round(dice.gauss(59, 22)))))
        steps = [(dice.randint(2, 9), dice.randint(2, 9)) for _ in range(max(1, round(dice.gauss(8.3, 3.9))))]
        answer = "\n".join(f"{a} + {b} = <<{a}+{b}={a + b}>>{a + b}" for a, b in steps)
        lines.append(json.dumps({"question": question + "?", "answer": answer}) + "\n")
    file.write_text("".join(lines), encoding="utf-8")


def take_turns(bench: Bench, limit: float, say: Callable[[str], None]) -> list[str]:
    """Take the turns; returns those that there was no time for."""
    began, took = time.monotonic(), dict.fromkeys(ORDER, 0.0)
    for place, turn in enumerate(ORDER):
        start = time.monotonic()
        if place >= ALWAYS and start - began + took[turn] > limit:
            return list(ORDER[place:])
        what = bench.take(turn)
        took[turn] = time.monotonic() - start
        say(f"quick: {turn}: {what} ({took[turn]:.0f} s in all)")
    return []


def main() -> int:
    """Measure, show, hold against the stored bound; 1 if far below."""
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that the running trial is ended too
    kind = gate.cpu_kind(Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    precision = args.precision or ("fp32" if kind == gate.OTHER else "bf16")
    about = {
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "torch": version("torch"),
        "global_size": args.global_size,
        "data": args.data.name if args.data else "sums",
    }
    print(f"quick: {precision}, {about}; load {os.getloadavg()[0]:.1f}", flush=True)
    with tempfile.TemporaryDirectory(prefix="bench-quick-") as scratch:
        source = args.data or Path(scratch) / "sums.jsonl"
        num_samples = args.global_size * (WARM_UP + MEASURED)
        if args.data is None:
            write_problems(source, num_samples + NUM_HELD_OUT)
        model, data = str(resolve_model(args.model)), Path(scratch) / "data"
        convert(source, data, num_samples, AutoTokenizer.from_pretrained(model))
        bench = Bench(Path(scratch), model, data, precision, args.global_size)
        left_out = take_turns(bench, args.limit, lambda text: print(text, flush=True))
    found = gate.figures(bench.trials, bench.floors)
    bounds = gate.read_bounds(BOUNDS, kind, precision)
    print("\n" + "\n".join(gate.table(found, bounds)) + "\n")
    if left_out:
        print(f"quick: no time within {args.limit:.0f} s for: {', '.join(left_out)}")
    values = {"kind": kind, "precision": precision, **about, "left_out": left_out, "figures": asdict(found)}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    if args.store:
        gate.store_bounds(BOUNDS, kind, precision, found, about)
        print(f"quick: stored for {kind}, {precision}: {BOUNDS.name}")
        return 0
    return verdict(found, bounds, kind, precision)


def verdict(found: gate.Figures, bounds: dict[str, float] | None, kind: str, precision: str) -> int:
    """Say how the figures stand to the stored ones; 1 if one is far below."""
    if bounds is None:
        print(f"quick: nothing is stored for this kind of CPU ({kind}, {precision}), so nothing is held against it;")
        print(f"  on a quiet machine `{gate.STORE}` makes what is measured the bound")
        return 0
    problems = gate.problems(found, bounds)
    for problem in problems:
        print(f"quick: too slow: {problem}")
    if problems:
        print(
            "  measure again on a quiet machine. If it stays: the change before this one costs it. If it is meant to:"
        )
        print(f"  `{gate.STORE}` stores the new ratios, and the commit says why")
    else:
        print(f"quick: no ratio is far below the one stored for {kind}, {precision}")
    return int(bool(problems))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UnisonoError as error:  # such as a starter model that cannot be fetched
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
